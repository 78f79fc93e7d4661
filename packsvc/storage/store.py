"""A folder on any fsspec file system, with the few verbs that packsvc needs.

A file appears whole or not at all: locally by temporary file, fsync and rename (or link, for put-if-absent),
on object stores by one PUT. A file is never streamed into its final name: an exception midway would publish a
short file that reads as valid Parquet, through s3fs and pyarrow both. Listings are never cached, since other
machines write beside us. Passing faults (429, 5xx, time-outs, dropped connections) are tried again with
jittered back-off; what stays broken is a `StorageError`, exit code 3.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from packsvc.errors import StorageError

T = TypeVar("T")
ATTEMPTS = 6
FIRST_WAIT_SECONDS = 0.2
LONGEST_WAIT_SECONDS = 10.0
TEMPORARY_SUFFIX = ".tmp"

_PASSING_ERRNO = {errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE}
_PASSING_STATUS = {408, 429, 500, 502, 503, 504}
_PASSING_CODES = {"ConditionalRequestConflict", "IncompleteBody", "OperationAborted", "RequestTimeout"}
"""Of S3, with a status that says the caller is at fault: two conditional writes met, or an upload came in halves."""
_PASSING_NAMES = {
    "ClientConnectionError",
    "ClientError",
    "ClientOSError",
    "ClientPayloadError",
    "ConnectTimeoutError",
    "ConnectionClosedError",
    "EndpointConnectionError",
    "FSTimeoutError",
    "HTTPClientError",
    "IncompleteRead",
    "ReadTimeoutError",
    "ResponseStreamingError",
    "ServerDisconnectedError",
    "ServerTimeoutError",
    "ServiceRequestError",
    "ServiceResponseError",
}
_S3_CONFIG = {"connect_timeout": 10, "read_timeout": 60, "retries": {"total_max_attempts": 1}}
"""For botocore. s3fs tries each request five times and so do we; its own five would make hours of a dead server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """A file under a store's root."""

    name: str
    """Relative to the root, with forward slashes."""
    size_bytes: int
    etag: str | None = None
    mtime: float | None = None


def filesystem(url: str, storage_options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """The fsspec file system of `url` and the path on it; listings are not cached."""
    options = dict(storage_options or {})
    try:
        if "://" not in url or url.startswith("file://"):
            return LocalFileSystem(), os.path.abspath(url.removeprefix("file://"))
        if url.startswith(("s3://", "s3a://", "gs://", "gcs://", "az://", "abfs://", "abfss://")):
            options.setdefault("use_listings_cache", False)
        if url.startswith(("s3://", "s3a://")):
            options["config_kwargs"] = {**_S3_CONFIG, **(options.get("config_kwargs") or {})}
        fs, path = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        raise StorageError(f"{url}: cannot be opened: {error}") from error
    return fs, cast(str, path)


def is_passing(error: BaseException) -> bool:
    """Whether trying again may help: throttling, server faults, time-outs, dropped connections."""
    seen: BaseException | None = error
    while seen is not None:
        response = getattr(seen, "response", None)
        status = getattr(seen, "status", None) or getattr(seen, "status_code", None) or getattr(seen, "code", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", status)
            if response.get("Error", {}).get("Code") in _PASSING_CODES:
                return True
        with contextlib.suppress(TypeError, ValueError):
            if status is not None and int(cast(Any, status)) in _PASSING_STATUS:
                return True
            if status is not None and 400 <= int(cast(Any, status)) < 500:
                return False
        if isinstance(seen, (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError)):
            return False
        if isinstance(seen, (TimeoutError, ConnectionError)) or type(seen).__name__ in _PASSING_NAMES:
            return True
        if isinstance(seen, OSError) and seen.errno in _PASSING_ERRNO:
            return True
        text = str(seen)
        # An error of the system has a number and its text holds a path, in which anything may stand.
        if (
            isinstance(seen, OSError)
            and seen.errno is None
            and any(w in text for w in ("SlowDown", "reduce your request rate", "503", "InternalError"))
        ):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def retrying(what: str, call: Callable[[], T], *, attempts: int = ATTEMPTS) -> T:
    """Run `call`, again after passing faults; other OS errors become a `StorageError` that names `what`.

    FileNotFoundError and FileExistsError pass through: they are answers.
    """
    wait = FIRST_WAIT_SECONDS
    for attempt in range(1, attempts + 1):
        try:
            return call()
        except (FileNotFoundError, FileExistsError):
            raise
        except Exception as error:
            if is_passing(error) and attempt < attempts:
                time.sleep(wait * (0.5 + random.random() / 2))
                wait = min(wait * 2, LONGEST_WAIT_SECONDS)
                continue
            if isinstance(error, OSError) or is_passing(error) or _is_remote(error):
                raise StorageError(f"{what}: {_plain(error)}") from error
            raise
    raise AssertionError("unreachable")


def _is_precondition(error: BaseException) -> bool:
    """Whether a conditional write was refused. Not all servers name the condition, as s3fs expects."""
    response = getattr(error.__cause__, "response", None)
    return isinstance(response, dict) and response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 412


def _is_remote(error: Exception) -> bool:
    return type(error).__module__.split(".")[0] in (
        "botocore",
        "aiobotocore",
        "aiohttp",
        "s3fs",
        "gcsfs",
        "adlfs",
        "azure",
        "google",
    )


def _plain(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "no space left on the device; free some and run the same command again to resume"
    if isinstance(error, PermissionError) or (isinstance(error, OSError) and error.errno == errno.EROFS):
        return f"not writable or not readable by this user ({error.strerror or error})"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"


class Store:
    """A root folder or bucket prefix; all names are relative to it."""

    def __init__(self, url: str, *, storage_options: Mapping[str, Any] | None = None) -> None:
        self.url = url
        self.storage_options = dict(storage_options or {})
        self.fs, self.root = filesystem(url, storage_options)
        self.is_local = isinstance(self.fs, LocalFileSystem)

    def path(self, name: str) -> str:
        """`name` as a path of the file system."""
        return f"{self.root.rstrip('/')}/{name}" if name else self.root

    def describe(self, name: str) -> str:
        """`name` as a person would write it."""
        return f"{self.url.rstrip('/')}/{name}" if name else self.url

    def read(self, name: str) -> bytes:
        """The whole file. Raises FileNotFoundError, StorageError."""
        return retrying(self.describe(name), lambda: cast(bytes, self.fs.cat_file(self.path(name))))

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file."""
        return retrying(
            self.describe(name), lambda: cast(bytes, self.fs.cat_file(self.path(name), start=start, end=stop))
        )

    def open(self, name: str) -> BinaryIO:
        """A seekable binary reader. Raises FileNotFoundError, StorageError."""
        return retrying(self.describe(name), lambda: cast(BinaryIO, self.fs.open(self.path(name), "rb")))

    def info(self, name: str) -> FileInfo | None:
        """Size and identity of a file; None where there is none."""
        try:
            found = retrying(self.describe(name), lambda: cast(dict[str, Any], self.fs.info(self.path(name))))
        except FileNotFoundError:
            return None
        return None if found.get("type") == "directory" else file_info(name, found)

    def list(self, folder: str = "") -> list[FileInfo]:
        """All files below `folder`, sorted by name; none where there is no such folder."""
        root = self.path(folder)

        def find() -> dict[str, dict[str, Any]]:
            with contextlib.suppress(FileNotFoundError):
                return cast(dict[str, dict[str, Any]], self.fs.find(root, detail=True))
            return {}

        base = self.path("").rstrip("/") + "/"
        base = self.fs._strip_protocol(base).rstrip("/") + "/"
        found = retrying(self.describe(folder), find)
        return sorted((file_info(p[len(base) :], i) for p, i in found.items()), key=lambda f: f.name)

    def publish(self, name: str, data: bytes) -> None:
        """Write a whole file under its final name, over whatever stands there."""
        if not self.is_local:
            try:
                retrying(self.describe(name), lambda: self.fs.pipe_file(self.path(name), data))
            except FileNotFoundError as error:
                raise StorageError(f"{self.describe(name)}: there is no such bucket or folder") from error
            return
        with self._temporary(name, data) as temporary:
            retrying(self.describe(name), lambda: os.replace(temporary, self.path(name)))
            _sync_folder(os.path.dirname(self.path(name)))

    def publish_file(self, name: str, path: str) -> None:
        """Like `publish`, from a local file; its content never stands in memory whole."""
        if not self.is_local:
            try:
                retrying(self.describe(name), lambda: self.fs.put_file(path, self.path(name)))
            except FileNotFoundError as error:
                raise StorageError(f"{self.describe(name)}: there is no such bucket or folder") from error
            return
        final = self.path(name)
        temporary = f"{final}.{os.getpid()}-{uuid.uuid4().hex[:8]}{TEMPORARY_SUFFIX}"

        def copy() -> None:
            os.makedirs(os.path.dirname(final), exist_ok=True)
            shutil.copyfile(path, temporary)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, final)

        try:
            retrying(self.describe(name), copy)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        _sync_folder(os.path.dirname(final))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Write a whole file unless one of that name exists; True if this call wrote it.

        On an object store also if what stands there is the same: it may be ours, written by a try whose answer was
        lost, here or inside the client library.
        """
        try:
            if self.is_local:
                with self._temporary(name, data) as temporary:
                    retrying(self.describe(name), lambda: os.link(temporary, self.path(name)))
                    _sync_folder(os.path.dirname(self.path(name)))
            else:
                self._create(name, data)
        except FileExistsError:
            return not self.is_local and self.read(name) == data
        return True

    def _create(self, name: str, data: bytes) -> None:
        """One conditional PUT. Raises FileExistsError."""

        def put() -> None:
            try:
                self.fs.pipe_file(self.path(name), data, mode="create")
            except OSError as error:
                if _is_precondition(error):
                    raise FileExistsError(name) from error
                raise

        try:
            retrying(self.describe(name), put)
        except FileNotFoundError as error:
            raise StorageError(f"{self.describe(name)}: there is no such bucket or folder") from error

    def remove(self, name: str) -> None:
        """Remove a file; one that is gone already is no error."""
        with contextlib.suppress(FileNotFoundError):
            retrying(self.describe(name), lambda: self.fs.rm_file(self.path(name)))

    def remove_empty_folders(self) -> None:
        """Remove the root and the folders in it as far as they are empty; object stores have none."""
        if self.is_local:
            for folder, _, _ in os.walk(self.root, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)

    def _make_folder(self, folder: str) -> None:
        try:
            retrying(folder, lambda: os.makedirs(folder, exist_ok=True))
        except (FileNotFoundError, FileExistsError) as error:
            # A file stands where the folder should be: that must not pass for "somebody wrote it already".
            raise StorageError(f"{folder}: the folder cannot be made: {_plain(error)}") from error

    @contextlib.contextmanager
    def _temporary(self, name: str, data: bytes) -> Iterator[str]:
        """A local temporary file beside `name`, written and synced; gone afterwards whatever happens."""
        final = self.path(name)
        temporary = f"{final}.{os.getpid()}-{uuid.uuid4().hex[:8]}{TEMPORARY_SUFFIX}"

        def write() -> None:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

        try:
            self._make_folder(os.path.dirname(final))
            retrying(self.describe(name), write)
            yield temporary
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def file_info(name: str, info: Mapping[str, Any]) -> FileInfo:
    """An fsspec info dict as a `FileInfo`."""
    named = ("mtime", "LastModified", "last_modified", "created")
    mtime = next((info[key] for key in named if info.get(key) is not None), None)
    if mtime is not None and hasattr(mtime, "timestamp"):
        mtime = mtime.timestamp()
    etag = info.get("ETag", info.get("etag"))
    return FileInfo(
        name=name,
        size_bytes=int(info.get("size") or 0),
        etag=str(etag).strip('"') if etag is not None else None,
        mtime=float(mtime) if isinstance(mtime, (int, float)) else None,
    )


def _sync_folder(path: str) -> None:
    """Make a rename durable; file systems that cannot sync a folder are left alone."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
