"""From an input to its bytes: opened, decompressed, and told apart by content, since a suffix may lie.

Decompression goes through pyarrow's codecs, which raise on a truncated stream and read all members of a gzip
and all frames of a zstd file. Whatever is wrong with the bytes becomes a `SourceError` that names the file; a
storage that does not answer stays a `StorageError`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, BinaryIO, cast

import pyarrow as pa

from packsvc.errors import PacksvcError, SourceError, StorageError
from packsvc.storage import filesystem, retrying
from packsvc.types import InputFile

BLOCK_BYTES = 1 << 20
HEAD_BYTES = 1 << 16
BOM = b"\xef\xbb\xbf"
SUFFIXES = ("jsonl", "ndjson", "json", "parquet", "arrow", "ipc", "feather", "csv")
_COMPRESSED = ("gz", "zst")
_ZSTD_SKIPPABLE = tuple(bytes((0x50 + n,)) + b"\x2a\x4d\x18" for n in range(16))


class Compression(StrEnum):
    """As pyarrow names its codecs."""

    NONE = "none"
    GZIP = "gzip"
    ZSTD = "zstd"


class Container(StrEnum):
    """How records stand in the (decompressed) bytes."""

    JSONL = "jsonl"
    JSON_ARRAY = "json array"
    CSV = "csv"
    PARQUET = "parquet"
    ARROW_FILE = "arrow file"
    ARROW_STREAM = "arrow stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What an input is, found from its first bytes."""

    compression: Compression
    container: Container


def suffixes(path: str) -> tuple[str | None, str | None]:
    """Data suffix and compression suffix of a path, lower case, None where there is none we know.

    >>> suffixes("data/a.jsonl.gz"), suffixes("b.parquet"), suffixes("c.txt")
    (('jsonl', 'gz'), ('parquet', None), (None, None))
    """
    parts = path.rsplit("/", 1)[-1].lower().split(".")[1:]
    packed = parts.pop() if parts and parts[-1] in _COMPRESSED else None
    data = parts[-1] if parts and parts[-1] in SUFFIXES else None
    return data, packed


class InputHandle:
    """An input open for reading; a read that fails in passing is tried again where it stood."""

    def __init__(
        self, file: InputFile, storage_options: Mapping[str, Any] | None = None, *, hashed: bool = False
    ) -> None:
        self._file = file
        self._sha256 = hashlib.sha256() if hashed else None
        fs, path = filesystem(file.url, storage_options)
        try:
            self._stream = retrying(file.path, lambda: cast(BinaryIO, fs.open(path, "rb")))
        except FileNotFoundError as error:
            raise SourceError(f"{file.path}: no such file (looked at {file.url})") from error
        except StorageError as error:
            if isinstance(error.__cause__, (PermissionError, IsADirectoryError)):
                raise SourceError(f"{file.path}: cannot be read: {error.__cause__.strerror}") from error
            raise

    def read(self, size: int = -1) -> bytes:
        at = self._stream.tell()

        def once() -> bytes:
            if self._stream.tell() != at:
                self._stream.seek(at)
            return self._stream.read(size)

        data = retrying(self._file.path, once)
        if self._sha256 is not None:
            self._sha256.update(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()

    def close(self) -> None:
        """Nothing: pyarrow closes what it read from, and the handle may be read again. See `release`."""

    def release(self) -> None:
        self._stream.close()

    @property
    def closed(self) -> bool:
        return self._stream.closed

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def digest(self) -> str:
        """sha256 of all bytes: those read so far, and the rest, which is read now."""
        assert self._sha256 is not None
        while self.read(BLOCK_BYTES):
            pass
        return self._sha256.hexdigest()


@contextlib.contextmanager
def open_input(
    file: InputFile, storage_options: Mapping[str, Any] | None = None, *, hashed: bool = False
) -> Iterator[InputHandle]:
    """The bytes of an input; inside, an error about them becomes a `SourceError` that names the file."""
    with naming(file):
        handle = InputHandle(file, storage_options, hashed=hashed)
        try:
            yield handle
        finally:
            handle.release()


@contextlib.contextmanager
def naming(file: InputFile) -> Iterator[None]:
    """Turn errors about the bytes of `file` into a `SourceError` with its path."""
    try:
        yield
    except PacksvcError:
        raise
    except (OSError, pa.ArrowException, UnicodeError, EOFError) as error:
        raise SourceError(f"{file.path}: damaged or cut short: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def sniff(handle: InputHandle, file: InputFile) -> Shape:
    """Tell what an input is from its first bytes; its suffix decides only where those do not."""
    handle.seek(0)
    head = handle.read(HEAD_BYTES)
    data_suffix, packed_suffix = suffixes(file.path)
    compression = _compression(head)
    if packed_suffix is not None and compression is Compression.NONE:
        raise SourceError(f"{file.path}: named .{packed_suffix}, but its content is not; decompress or rename it")
    if compression is not Compression.NONE:
        handle.seek(0)
        head = next(blocks(handle, compression, size=HEAD_BYTES), b"")
    handle.seek(0)
    return Shape(compression=compression, container=_container(head, data_suffix, file))


def check_empty(file: InputFile) -> None:
    """Refuse an empty file of a kind that never is: it was cut short. Empty text is no rows."""
    suffix = file.path.lower().rsplit(".", 1)[-1]
    if suffix in (*_COMPRESSED, "parquet", "arrow", "ipc", "feather"):
        raise SourceError(f"{file.path}: cut short: an empty file, which no .{suffix} file is")


def _compression(head: bytes) -> Compression:
    if head.startswith(b"\x1f\x8b"):
        return Compression.GZIP
    if head.startswith((b"\x28\xb5\x2f\xfd", *_ZSTD_SKIPPABLE)):
        return Compression.ZSTD
    return Compression.NONE


def _container(head: bytes, suffix: str | None, file: InputFile) -> Container:
    if head.startswith(b"PAR1"):
        return Container.PARQUET
    if head.startswith(b"ARROW1"):
        return Container.ARROW_FILE
    if head.startswith(b"\xff\xff\xff\xff"):
        return Container.ARROW_STREAM
    if suffix in ("parquet", "arrow", "ipc", "feather"):
        old = " (Feather version 1 is not read; write version 2)" if head.startswith(b"FEA1") else ""
        raise SourceError(f"{file.path}: named .{suffix}, but its content is not{old}")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise SourceError(f"{file.path}: UTF-16 text; convert it to UTF-8")
    return _text_container(head.removeprefix(BOM).lstrip(b" \t\r\n"), suffix)


def _text_container(head: bytes, suffix: str | None) -> Container:
    """JSON lines, one JSON array, or CSV; `head` starts at the first character that is not blank."""
    line, _, rest = head.partition(b"\n")
    try:
        first = json.loads(line)
    except (ValueError, RecursionError):
        first = None
    if suffix == "csv" and not isinstance(first, (dict, list)):
        return Container.CSV
    if not head.startswith(b"["):
        return Container.JSONL
    # A whole list in the first line, and more below it: lines that happen to be lists, not one array.
    return Container.JSONL if isinstance(first, list) and rest.strip() else Container.JSON_ARRAY


def blocks(handle: InputHandle, compression: Compression, *, size: int = BLOCK_BYTES) -> Iterator[bytes]:
    """Decompressed bytes from where the handle stands to the end, in blocks of about `size`."""
    if compression is Compression.NONE:
        while block := handle.read(size):
            yield block
        return
    stream = pa.CompressedInputStream(python_file(handle), cast(Any, compression.value))
    while block := stream.read(size):
        yield block


def python_file(handle: InputHandle) -> pa.PythonFile:
    """The handle as pyarrow reads it."""
    return pa.PythonFile(cast(Any, handle), mode="r")
