"""From the paths of a source to its inputs: files, folders, globs, saved data sets."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from packsvc.config import PackJob, Source, is_url
from packsvc.errors import SourceError
from packsvc.sources.opening import SUFFIXES, suffixes
from packsvc.storage import file_info, filesystem, retrying
from packsvc.types import InputFile

_GLOB = re.compile(r"[*?\[]")
_NOT_DATA = (
    "md",
    "txt",
    "rst",
    "html",
    "pdf",
    "yaml",
    "yml",
    "toml",
    "lock",
    "py",
    "ipynb",
    "crc",
    "png",
    "jpg",
    "svg",
)
_METADATA = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A file on its file system: `shown` as the job would write it."""

    shown: str
    url: str
    info: Mapping[str, Any]


def list_inputs(source: Source, *, job: PackJob, storage_options: Mapping[str, Any] | None = None) -> list[InputFile]:
    """The inputs of a source, sorted by path bytes; a file named twice counts once.

    Raises:
        SourceError: A path with no file, or a file of a kind that is not read.
    """
    inputs: dict[str, InputFile] = {}
    for written in source.paths:
        found = list(_Place(written, job=job, source=source, storage_options=storage_options).find())
        if not found:
            raise SourceError(f"source {source.name!r}: {written}: no data file is there ({_kinds()})")
        for item in found:
            if item.url not in inputs:
                about = file_info(item.shown, item.info)
                inputs[item.url] = InputFile(
                    path=item.shown,
                    url=item.url,
                    source=source.name,
                    size_bytes=about.size_bytes,
                    etag=about.etag,
                    mtime=about.mtime,
                )
    return sorted(inputs.values(), key=lambda file: file.path.encode("utf-8", "surrogateescape"))


class _Place:
    """One path of a source: a file, a folder or a glob."""

    def __init__(
        self, written: str, *, job: PackJob, source: Source, storage_options: Mapping[str, Any] | None
    ) -> None:
        self._written = _normal(written)
        self._url = job.resolve(written)
        self._fs, self._path = filesystem(self._url, storage_options)
        self._where = f"source {source.name!r}: {written}"

    def find(self) -> Iterator[_Found]:
        info = self._info(self._path)
        if info is None and _GLOB.search(self._written):
            yield from self._matching()
        elif info is None:
            raise SourceError(f"{self._where}: no such file or folder (looked at {self._url})")
        elif info.get("type") == "directory":
            yield from self._below()
        else:
            self._check(self._written)
            yield _Found(shown=self._written, url=self._url, info=info)

    def _matching(self) -> Iterator[_Found]:
        """Files that match a glob; the part of the path before its first sign stays as the job wrote it."""
        depth = next(i for i, part in enumerate(self._written.split("/")) if _GLOB.search(part))
        shown = "/".join(self._written.split("/")[:depth])
        # Both spellings end in the same parts, so what follows the fixed part has the same length in each.
        num_parts = len(self._written.split("/")) - depth
        root = "/".join(self._path.split("/")[:-num_parts])
        url = "/".join(self._url.split("/")[:-num_parts])
        tail = "/".join(self._path.split("/")[-num_parts:])
        pattern = re.sub(r"([*?\[])", r"[\1]", root) + "/" + tail
        found = retrying(self._where, lambda: self._fs.glob(pattern, detail=True))
        files = {p: i for p, i in found.items() if i.get("type") != "directory"}
        if not files:
            folders = " (only folders match; add /**/* and a suffix)" if found else ""
            raise SourceError(f"{self._where}: no file matches{folders} (looked at {self._url})")
        yield from self._data(files, root=root, shown=shown, url=url)

    def _below(self) -> Iterator[_Found]:
        found = retrying(self._where, lambda: self._fs.find(self._path, detail=True))
        root = self._path.rstrip("/")
        if f"{root}/dataset_dict.json" in found:
            names = self._json(f"{root}/dataset_dict.json").get("splits") or []
            paths = " or ".join(f"{self._written.rstrip('/')}/{name}" for name in names)
            raise SourceError(f"{self._where}: a saved data set of several splits; name one of them: {paths}")
        if f"{root}/state.json" in found:
            found = self._saved(found, root)
        yield from self._data(
            found, root=root, shown="" if self._written == "." else self._written.rstrip("/"), url=self._url.rstrip("/")
        )

    def _saved(self, found: Mapping[str, Any], root: str) -> dict[str, Any]:
        """The files that a saved data set names; Arrow caches beside them are not data."""
        names = [str(entry["filename"]) for entry in self._json(f"{root}/state.json").get("_data_files") or []]
        missing = [name for name in names if f"{root}/{name}" not in found]
        if missing:
            raise SourceError(f"{self._where}: state.json names {missing[0]}, which is not there")
        return {f"{root}/{name}": found[f"{root}/{name}"] for name in names}

    def _json(self, path: str) -> dict[str, Any]:
        data = retrying(self._where, lambda: cast(bytes, self._fs.cat_file(path)))
        try:
            value = json.loads(data)
        except ValueError as error:
            raise SourceError(f"{self._where}: {path} is not JSON: {error}") from error
        return value if isinstance(value, dict) else {}

    def _data(self, files: Mapping[str, Any], *, root: str, shown: str, url: str) -> Iterator[_Found]:
        """Of files below `root`, those with data; documents, hidden files and metadata beside it are passed over."""
        for path, info in files.items():
            below = path[len(root.rstrip("/")) + 1 :]
            if not _is_beside(below):
                self._check(below)
                yield _Found(shown=f"{shown}/{below}" if shown else below, url=f"{url}/{below}", info=info)

    def _check(self, path: str) -> None:
        if suffixes(path)[0] is None:
            raise SourceError(
                f"{self._where}: {path} is of no kind that is read ({_kinds()}); name the files by a glob"
            )

    def _info(self, path: str) -> dict[str, Any] | None:
        try:
            return retrying(self._where, lambda: cast(dict[str, Any], self._fs.info(path)))
        except FileNotFoundError:
            return None


def _normal(written: str) -> str:
    """A path as plans name it.

    >>> _normal("./data//chat/a.jsonl"), _normal("s3://bucket/a.jsonl"), _normal("../x/")
    ('data/chat/a.jsonl', 's3://bucket/a.jsonl', '../x')
    """
    return written if is_url(written) else posixpath.normpath(written)


def _is_beside(path: str) -> bool:
    """Whether a file found in a folder is none that was meant: hidden, documentation, metadata."""
    parts = path.split("/")
    name = parts[-1]
    if any(part.startswith((".", "_")) for part in parts) or name in _METADATA:
        return True
    if "." not in name:
        return name.isupper()
    return name.rsplit(".", 1)[-1].lower() in _NOT_DATA


def _kinds() -> str:
    return "." + ", .".join(SUFFIXES) + "; plain, .gz or .zst"
