"""Shards: packs -> Parquet files -> packs, and the manifest that names them.

`layout` says what a shard is, `columns` turns packs into Arrow tables and back, `writer` makes whole files,
`reader` reads and checks them, `pages` reads any packs of them in any order (found by `footer` and `page_index`, which
stand on `thrift`; decoded by `page_values` one by one and by `page_batch` several at once), `manifest` (with `entries`
and `parsing`) is the record of all of them, `reject_files` keeps what was not packed.
"""

from packsvc.shards.columns import from_tables, to_table
from packsvc.shards.entries import InputEntry, RejectEntry, ShardEntry, TableEntry
from packsvc.shards.layout import (
    COUNT_COLUMNS,
    FORMAT_VERSION,
    ORIGIN_COLUMNS,
    TOKEN_COLUMNS,
    ShardMeta,
    packs_per_page,
    packs_per_row_group,
    packs_per_shard,
    schema,
    shard_file_name,
    shard_name,
    shard_of_path,
)
from packsvc.shards.manifest import MANIFEST, PACK_KEYS, PLAN, SOURCE_KEYS, TOTAL_KEYS, Manifest
from packsvc.shards.page_batch import RawPack, open_packs
from packsvc.shards.page_values import PackPages, num_boundaries
from packsvc.shards.pages import PageReader
from packsvc.shards.reader import ShardReader
from packsvc.shards.recent import RecentlyUsed
from packsvc.shards.reject_files import REJECT_SCHEMA, RejectWriter, read_rejects, write_rejects
from packsvc.shards.thrift import Unfamiliar
from packsvc.shards.writer import write_shard

__all__ = [
    "COUNT_COLUMNS",
    "FORMAT_VERSION",
    "MANIFEST",
    "ORIGIN_COLUMNS",
    "PACK_KEYS",
    "PLAN",
    "REJECT_SCHEMA",
    "SOURCE_KEYS",
    "TOKEN_COLUMNS",
    "TOTAL_KEYS",
    "InputEntry",
    "Manifest",
    "PackPages",
    "PageReader",
    "RawPack",
    "RecentlyUsed",
    "RejectEntry",
    "RejectWriter",
    "ShardEntry",
    "ShardMeta",
    "ShardReader",
    "TableEntry",
    "Unfamiliar",
    "from_tables",
    "num_boundaries",
    "open_packs",
    "packs_per_page",
    "packs_per_row_group",
    "packs_per_shard",
    "read_rejects",
    "schema",
    "shard_file_name",
    "shard_name",
    "shard_of_path",
    "to_table",
    "write_rejects",
    "write_shard",
]
