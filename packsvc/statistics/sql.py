"""SQL over what a packed output knows of itself: DuckDB in memory, read only, without a way out.

Tables: `packs`, `lengths` and `rejects` are read from the files that the manifest names, column by column and only
as far as a query needs them; `shards`, `sources` and `inputs` come from the manifest. The query sees nothing else:
no files, no network, no extensions, no variables of this process, and it cannot change the settings back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from packsvc.errors import ConfigError, DamageError
from packsvc.shards import REJECT_SCHEMA, SOURCE_KEYS, InputEntry, Manifest, ShardEntry
from packsvc.storage import Store

TABLES = ("packs", "shards", "sources", "rejects", "lengths", "inputs")
SETTINGS = (
    "SET autoinstall_known_extensions = false",
    "SET autoload_known_extensions = false",
    "SET python_enable_replacements = false",
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)


def query(out: str | os.PathLike[str], sql: str, *, storage_options: Mapping[str, Any] | None = None) -> pa.Table:
    """The result of one SELECT over the tables of a packed output.

    Args:
        out: Folder or URL that a job wrote.
        sql: One statement in DuckDB's dialect; tables are `TABLES`.
        storage_options: For fsspec.

    Raises:
        ConfigError: The statement is no query, or DuckDB refuses it; its message is in the error.
        FormatError: No manifest, an unfinished or a foreign output.
        DamageError: A table that the manifest names is gone or unreadable.
    """
    import duckdb

    store = Store(os.fspath(out), storage_options=storage_options)
    manifest = Manifest.load(store)
    connection: Any = duckdb.connect(":memory:")
    try:
        make = _makers(store, manifest)
        for name in TABLES:
            if name in sql.lower():
                connection.register(name, make[name]())
        for setting in SETTINGS:
            connection.execute(setting)
        _only_a_query(connection, sql)
        found: pa.Table = connection.sql(sql).to_arrow_table()
        return found
    except duckdb.Error as error:
        raise ConfigError(f"SQL: {error}{_hint(error)}") from error
    except (pa.ArrowException, OSError) as error:
        raise DamageError(f"{store.url}: a table cannot be read: {' '.join(str(error).split())}") from error
    finally:
        connection.close()


def _only_a_query(connection: Any, sql: str) -> None:
    """Raises ConfigError unless `sql` is one statement that only reads."""
    kinds = [str(statement.type).rsplit(".", 1)[-1] for statement in connection.extract_statements(sql)]
    if len(kinds) != 1 or kinds[0] not in ("SELECT", "EXPLAIN"):
        found = ", ".join(kinds) or "none"
        raise ConfigError(f"SQL: one SELECT is taken, the tables are read only; found: {found}")


def _hint(error: Exception) -> str:
    """What to look at, where DuckDB found no such table."""
    return f"\nTables: {', '.join(TABLES)}." if "does not exist" in str(error) else ""


def _makers(store: Store, manifest: Manifest) -> dict[str, Callable[[], Any]]:
    """How each table is made, when it is needed."""
    return {
        "packs": lambda: _files(store, [manifest.tables["packs"].path] if "packs" in manifest.tables else []),
        "lengths": lambda: _files(store, [manifest.tables["lengths"].path] if "lengths" in manifest.tables else []),
        "rejects": lambda: _files(store, [e.path for e in manifest.rejects], empty=REJECT_SCHEMA),
        "shards": lambda: _entries([asdict(entry) for entry in manifest.shards], ShardEntry, first="shard"),
        "inputs": lambda: _entries([asdict(entry) for entry in manifest.inputs], InputEntry),
        "sources": lambda: _sources(manifest),
    }


def _files(store: Store, paths: list[str], *, empty: pa.Schema | None = None) -> Any:
    """Parquet files as one table that is read lazily, page checksums verified."""
    if not paths:
        if empty is None:
            raise ConfigError(f"{store.url}: this output has no such table")
        return empty.empty_table()
    for path in paths:
        if store.info(path) is None:
            raise DamageError(f"{store.describe(path)}: is gone, but the manifest names it")
    options = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
    return ds.dataset(
        [store.path(path) for path in paths],
        format=ds.ParquetFileFormat(default_fragment_scan_options=options),
        filesystem=store.fs,
    )


def _entries(rows: list[dict[str, Any]], entry: type, *, first: str | None = None) -> pa.Table:
    """Lines of the manifest as a table; the path is called `first` where that is given."""
    types = {"str": pa.string(), "int": pa.int64(), "float": pa.float64()}
    names = [f.name for f in fields(entry) if f.name != "extra"]
    kinds = {f.name: types[str(f.type).split(" ")[0]] for f in fields(entry) if f.name != "extra"}
    columns = {name: pa.array([row[name] for row in rows], kinds[name]) for name in names}
    return pa.table({(first or name) if name == "path" else name: column for name, column in columns.items()})


def _sources(manifest: Manifest) -> pa.Table:
    """One row a source; `rejected_by_reason` is a map."""
    columns: dict[str, Any] = {"source": pa.array(list(manifest.sources), pa.string())}
    for key in SOURCE_KEYS:
        values = [counts[key] for counts in manifest.sources.values()]
        if key == "rejected_by_reason":
            reasons = [list(value.items()) for value in values]
            columns[key] = pa.array(reasons, pa.map_(pa.string(), pa.int64()))
        else:
            columns[key] = pa.array(values, pa.int64())
    return pa.table(columns)
