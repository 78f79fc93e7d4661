"""What travels to a cluster with a job, and which paths cannot be seen from there.

A package is the resolved job file and the local files that it names, laid out as they stand around the job file,
so that its relative paths stay as they are written: they are part of the plan's identity, and the same job run
here and there must be the same plan. The chat template and the tokenizer's files always travel, weights never;
inputs travel when asked to. An absolute path stays as it is where the cluster is this machine; for a cluster
elsewhere the file goes into the package and the path is rewritten. Everything that the cluster could not see is
refused here, all of it in one message, before anything is sent.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from packsvc.config import PackJob, Source, is_url, job_text
from packsvc.errors import ConfigError, SourceError
from packsvc.run.planfile import canonical_json
from packsvc.sources import list_inputs

MOST_BYTES = 100_000_000
"""Of a package, unpacked: Ray keeps packages in the memory of the head node."""
JOB_NAME = "job.yaml"
MOVED = "from_elsewhere"
"""Folder of a package for files whose absolute path the cluster does not have."""
TOKENIZER_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_LOCAL_SCHEMES = ("file://", "local://")
_HERE_ONLY = ("memory://", "dir://", *_LOCAL_SCHEMES)


class LocalPaths(Enum):
    """What the caller knows of local paths on the cluster."""

    UNKNOWN = "unknown"
    SHARED = "shared"
    """The cluster sees this machine's files under the same absolute paths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A job as the cluster reads it, and the files that go with it."""

    job: PackJob
    job_name: str
    """Where the job file stands in the package."""
    base: str | None
    """Folder on the cluster that relative paths start from; None: that of the job file in the package."""
    files: dict[str, str] = field(default_factory=dict)
    """Name in the package to local path; the job file itself aside."""

    @property
    def size_bytes(self) -> int:
        return sum(os.path.getsize(path) for path in self.files.values())

    def write(self, folder: str) -> None:
        """Lay the package out in an empty folder."""
        for name, path in self.files.items():
            target = os.path.join(folder, name)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copyfile(path, target)
        target = os.path.join(folder, self.job_name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).write_text(job_text(self.job), encoding="utf-8")


def job_hash(job: PackJob, *, limit: int | None = None) -> str:
    """Names what a submission does: equal for jobs that are the same plan for the same output.

    Like the plan's identity it leaves out `name`, `limits` and `audit_fraction`, so that a job whose limits were
    raised resumes; unlike it, it can be had before the inputs are counted.
    """
    parts = {"job": job.identity(), "output": job.output_url, "limit": limit}
    return hashlib.sha256(canonical_json(parts)).hexdigest()[:12]


def make_package(
    job: PackJob, *, ship_inputs: bool, local_paths: LocalPaths, same_machine: Callable[[], bool]
) -> Package:
    """Decide what travels with a job.

    Args:
        job: Its relative paths start from `job.base`.
        ship_inputs: Local inputs travel too.
        local_paths: `SHARED` leaves local paths as they are.
        same_machine: Asked once at most, when it matters for an absolute path.

    Raises:
        ConfigError: A path that the cluster cannot see, or more to ship than `MOST_BYTES`.
        SourceError: A local input that is not there.
    """
    shared = local_paths is LocalPaths.SHARED
    if shared and not ship_inputs:
        plain = job.model_copy(update={"output": _absolute_output(job)}).with_base(job.base)
        return Package(job=plain, job_name=JOB_NAME, base=job.base)
    return _Packing(job, ship_inputs=ship_inputs, shared=shared, same_machine=same_machine).package()


class _Packing:
    """One package in the making."""

    def __init__(self, job: PackJob, *, ship_inputs: bool, shared: bool, same_machine: Callable[[], bool]) -> None:
        self._job = job
        self._ship_inputs = ship_inputs
        self._shared = shared
        self._same_machine = same_machine
        self._seen: bool | None = None
        self._problems: list[str] = []
        self._files: dict[str, str] = {}
        """Name relative to the job file, maybe above it, to local path."""

    def package(self) -> Package:
        changes = {
            "output": self._output(),
            "chat_template": self._template(),
            "tokenizer": self._tokenizer(),
            "sources": [self._source(source) for source in self._job.sources],
        }
        if self._problems:
            raise ConfigError("; ".join(self._problems))
        size = sum(os.path.getsize(path) for path in self._files.values())
        if size > MOST_BYTES:
            raise ConfigError(
                f"{size / 1e6:.0f} MB would have to travel with the job, at most {MOST_BYTES / 1e6:.0f} MB do; "
                f"put them where the cluster can read them, e.g. a bucket, and name that in the job"
            )
        # Names above the job file need folders above it in the package.
        depth = max((name.split("/").count("..") for name in self._files), default=0)
        base = "/".join(f"up{n + 1}" for n in range(depth))
        files = {posixpath.normpath(posixpath.join(base, name)): path for name, path in self._files.items()}
        job = self._job.model_copy(update=changes)
        return Package(job=job, job_name=posixpath.join(base, JOB_NAME), base=None, files=files)

    def _on_cluster(self) -> bool:
        """Whether absolute local paths are the same on the cluster."""
        if self._shared:
            return True
        if self._seen is None:
            self._seen = self._same_machine()
        return self._seen

    def _output(self) -> str:
        output = self._job.output
        local = local_path(output)
        if local is None:
            if output.startswith(_HERE_ONLY) or "::" in output:
                self._problems.append(f"output {output}: only this process sees it; use a bucket, e.g. s3://bucket/out")
            return output
        if self._shared:
            return _absolute_output(self._job)
        if not os.path.isabs(local):
            self._problems.append(
                f"output {output}: a folder beside the job file, which a cluster does not have. Set it to a bucket "
                f"(s3://..., gs://..., abfs://...) or to an absolute path that all its nodes share"
            )
        elif not self._on_cluster():
            self._problems.append(
                f"output {output}: a local path, and the cluster is not (only) this machine. Use a bucket, or pass "
                f"--local-paths-ok if all its nodes share that path with this machine"
            )
        return _absolute_output(self._job)

    def _template(self) -> str | None:
        written = self._job.chat_template
        if written is None or (local := local_path(written)) is None:
            return written
        if os.path.isabs(local) and self._on_cluster():
            return local
        path = self._job.resolve(local)
        if not os.path.isfile(path):
            self._problems.append(f"chat_template {written}: no such file (looked at {path})")
            return written
        return self._add(written, local, path)

    def _tokenizer(self) -> str:
        written = self._job.tokenizer
        local = local_path(written)
        folder = self._job.tokenizer_path
        if local is None or not os.path.isdir(folder):
            if local is not None and (os.path.isabs(local) or local.startswith(".")):
                self._problems.append(f"tokenizer {written}: no such folder (looked at {self._job.resolve(local)})")
            return written
        if os.path.isabs(local) and self._on_cluster():
            return local
        for path in tokenizer_files(folder):
            self._files[posixpath.join(_inside(local), path)] = os.path.join(folder, path)
        return _moved(written, local)

    def _source(self, source: Source) -> Source:
        paths = [self._input(source, written) for written in source.paths]
        return source.model_copy(update={"path": paths[0] if isinstance(source.path, str) else paths})

    def _input(self, source: Source, written: str) -> str:
        local = local_path(written)
        if local is None:
            if written.startswith(_HERE_ONLY) or _chained_here(written):
                self._problems.append(f"source {source.name!r}: {written}: only this machine sees it")
            return written
        if os.path.isabs(local) and self._on_cluster():
            return written
        if not self._ship_inputs:
            self._problems.append(
                f"source {source.name!r}: {written}: a local path, which the cluster does not have. Put the data into "
                f"a bucket, let it travel with --ship-inputs (up to {MOST_BYTES / 1e6:.0f} MB), or pass "
                f"--local-paths-ok if all nodes share this machine's files"
            )
            return written
        one = source.model_copy(update={"path": local})
        try:
            found = list_inputs(one, job=self._job)
        except SourceError as error:
            raise SourceError(f"{error}; nothing was submitted") from error
        for file in found:
            self._files[_inside(file.path)] = file.url
        return _moved(written, local)

    def _add(self, written: str, local: str, path: str) -> str:
        self._files[_inside(local)] = path
        return _moved(written, local)


def local_path(written: str) -> str | None:
    """A path of the local file system, without scheme and with `~` filled in; None for other URLs.

    >>> local_path("./data/a.jsonl"), local_path("file:///data/a.jsonl"), local_path("s3://bucket/a.jsonl")
    ('./data/a.jsonl', '/data/a.jsonl', None)
    """
    if "::" in written:
        return None
    for scheme in _LOCAL_SCHEMES:
        if written.startswith(scheme):
            return written.removeprefix(scheme)
    return None if is_url(written) else os.path.expanduser(written)


def tokenizer_files(folder: str) -> list[str]:
    """What of a tokenizer's folder shapes it, relative and sorted; the weights of a model beside it do not."""
    found = [
        os.path.relpath(os.path.join(at, name), folder)
        for at in (folder, os.path.join(folder, "additional_chat_templates"))
        if os.path.isdir(at)
        for name in os.listdir(at)
        if name.endswith(TOKENIZER_SUFFIXES) and os.path.isfile(os.path.join(at, name))
    ]
    return sorted(path for path in found if not path.endswith(".index.json"))


def _absolute_output(job: PackJob) -> str:
    return job.output if local_path(job.output) is None else job.resolve(local_path(job.output) or "")


def _inside(local: str) -> str:
    """A path as named from the job file in the package."""
    plain = posixpath.normpath(local)
    return posixpath.join(MOVED, plain.lstrip("/")) if plain.startswith("/") else plain


def _moved(written: str, local: str) -> str:
    """What the job says in the package: relative paths stay as they are written."""
    return _inside(local) if os.path.isabs(local) else written


def _chained_here(written: str) -> bool:
    return "::" in written and any(
        part.startswith(_HERE_ONLY) or ("://" not in part and "/" in part) for part in written.split("::")
    )
