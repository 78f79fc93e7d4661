"""Toy encoders, each tokenizer written once a session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from packsvc.encode import Encoder, load_encoder
from tests.encode import toys

MakeEncoder = Callable[..., Encoder]


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """A saved toy: the name of a function of `toys`, a template, and what `save` takes."""
    made: dict[str, str] = {}

    def folder(
        kind: str = "english", template: str | None = toys.CML, build: dict[str, Any] | None = None, **save: Any
    ) -> str:
        key = repr((kind, template, build, sorted(save.items())))
        if key not in made:
            tokenizer = getattr(toys, kind)(**(build or {}))
            made[key] = toys.save(tokenizer, tmp_path_factory.mktemp(kind), template=template, **save)
        return made[key]

    return folder


@pytest.fixture(scope="session")
def make_encoder(toy_folder: Callable[..., str]) -> MakeEncoder:
    """A new encoder of a toy, which is loaded once; `toy` says which, the rest is the job's."""

    made: dict[str, Encoder] = {}

    def make(toy: dict[str, Any] | None = None, **options: Any) -> Encoder:
        job = toys.job(toy_folder(**(toy or {})), **options)
        key = repr(job.dump())
        if key not in made:
            made[key] = load_encoder(job)
        old = made[key]
        return Encoder(job, engine=old._engine, settings=old.settings, audit_lines=old.audit_lines)

    return make
