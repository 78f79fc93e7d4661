"""fsspec opened right: URL -> bytes, and whole files -> URL. See `store`."""

from packsvc.storage.store import (
    TEMPORARY_SUFFIX,
    FileInfo,
    Store,
    file_info,
    filesystem,
    is_passing,
    retrying,
)

__all__ = ["TEMPORARY_SUFFIX", "FileInfo", "Store", "file_info", "filesystem", "is_passing", "retrying"]
