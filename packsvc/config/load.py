"""From a job file, overrides and the command line to a checked `PackJob`."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from packsvc.config.job import PackJob
from packsvc.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice, which plain YAML readers take in silence."""


def _unique_mapping(loader: _Loader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, Hashable):
            raise yaml.constructor.ConstructorError(None, None, "a key must be a plain value", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
        seen.add(key)
    return dict(yaml.SafeLoader.construct_mapping(loader, node, deep))


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def load_job(path: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None) -> PackJob:
    """Read a job file.

    Args:
        path: YAML file; relative paths in it are relative to its folder.
        overrides: Dotted path to value, e.g. {"packing.align": 16, "sources.0.weight": 2}.

    Raises:
        ConfigError: The file cannot be read, is not YAML, or is not a job; the message names the key.
    """
    where = Path(path)
    try:
        text = where.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{where}: cannot read the job file: {reason}") from error
    try:
        data = _copied(yaml.load(text, Loader=_Loader))
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2026-13-01
        raise ConfigError(f"{where}: not YAML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{where}: nested too deeply, or a value that contains itself") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: a job file is a mapping of keys to values; `packsvc init` writes one")
    return parse_job(data, overrides=overrides, base=where.resolve().parent, where=str(where))


def parse_job(
    data: Mapping[str, Any],
    *,
    overrides: Mapping[str, Any] | None = None,
    base: str | os.PathLike[str] | None = None,
    where: str = "job",
) -> PackJob:
    """Check a job given as plain values; `where` opens the error messages."""
    tree: Any = _copied(data)
    for dotted, value in (overrides or {}).items():
        _set(tree, dotted, value)
    try:
        job = PackJob.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_message(where, error)) from error
    return job.with_base(base) if base is not None else job


def parse_set(items: Sequence[str]) -> dict[str, Any]:
    """`key=value` strings of the command line as overrides; the value is YAML."""
    out: dict[str, Any] = {}
    for item in items:
        key, sign, value = item.partition("=")
        if not sign or not key.strip():
            raise ConfigError(f"--set {item!r}: write key=value, e.g. --set packing.align=16")
        try:
            out[key.strip()] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigError(f"--set {item!r}: the value is not YAML: {error}") from error
    return out


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _copied(v) for k, v in value.items()}
    return [_copied(v) for v in value] if isinstance(value, list) else value


def _set(tree: Any, dotted: str, value: Any) -> None:
    parts = dotted.split(".")
    at = tree
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(at, list):
            if not part.isdigit() or int(part) >= len(at):
                raise ConfigError(f"override {dotted}: {part!r} is no index into a list of {len(at)}")
            key: Any = int(part)
        elif isinstance(at, dict):
            key = part
            if not last and at.get(key) is None:
                at[key] = {}
        else:
            raise ConfigError(f"override {dotted}: {'.'.join(parts[:depth])} is a single value")
        if last:
            at[key] = value
        else:
            at = at[key]


def _message(where: str, error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        text = problem["msg"].removeprefix("Value error, ")
        given = "" if problem["type"] in ("value_error", "missing") else f" (given: {problem['input']!r})"
        lines.append(f"{key + ': ' if key else ''}{text}{given}")
    return f"{where}: " + "; ".join(lines)
