"""SQL over the tables: right answers, and no way out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from packsvc.errors import ConfigError
from packsvc.statistics import query
from tests.validation.damage import edit_manifest, manifest_of
from tests.validation.outputs import make_output


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_output(tmp_path_factory.mktemp("sql"), seed=3)


def one(out: Path, sql: str) -> object:
    (row,) = query(out, sql).to_pylist()
    (value,) = row.values()
    return value


def test_every_table_answers(out: Path) -> None:
    manifest = manifest_of(out)
    totals = manifest["totals"]
    assert one(out, "select count(*) from packs") == totals["packs"]
    assert one(out, "select sum(num_tokens)::bigint from packs") == totals["tokens"]
    assert one(out, "select sum(padding)::bigint from packs") == totals["padding_tokens"]
    assert one(out, "select sum(num_packs)::bigint from shards") == totals["packs"]
    assert one(out, "select sum(examples)::bigint from lengths") == totals["segments"]
    assert one(out, "select sum(length * examples)::bigint from lengths") == totals["tokens"]
    assert one(out, "select sum(packed)::bigint from sources") == totals["packed"]
    assert one(out, "select count(*) from rejects") == totals["rejected"] + totals["rejected_parts"]
    assert one(out, "select count(*) from inputs") == 4


def test_packs_have_the_columns_of_the_contract(out: Path) -> None:
    names = query(out, "select * from packs limit 0").column_names
    assert names == [
        "pack", "shard", "group", "num_segments", "num_tokens", "num_loss_tokens", "padding", "efficiency",
        "sum_squared_lengths",
    ]  # fmt: skip
    assert query(out, "select * from lengths limit 0").column_names == ["split", "source", "length", "examples"]


def test_tables_join(out: Path) -> None:
    sql = "select split, sum(p.num_tokens)::bigint as n from packs p join shards using (shard) group by split"
    found = {row["split"]: row["n"] for row in query(out, sql).to_pylist()}
    assert found == {name: counts["tokens"] for name, counts in manifest_of(out)["splits"].items()}


def test_rejects_by_reason_can_be_asked_of_sources(out: Path) -> None:
    stated = manifest_of(out)["sources"]["a"]["rejected_by_reason"]["overlong"]
    assert one(out, "select rejected_by_reason['overlong'] from sources where source = 'a'") == stated


def test_an_output_without_rejects_has_an_empty_table(tmp_path: Path) -> None:
    out = make_output(tmp_path)
    edit_manifest(out, lambda m: m.update(rejects=[]))
    assert one(out, "select count(*) from rejects") == 0


@pytest.mark.parametrize(
    "sql",
    [
        "select * from read_csv('{file}')",
        "select * from read_text('{file}')",
        "select * from read_parquet('{out}/packs.parquet')",
        "select * from '{file}'",
        "select * from glob('/etc/*')",
        "select * from packs, read_blob('{file}')",
        "select getenv('HOME')",
    ],
)
def test_no_file_can_be_read(out: Path, tmp_path: Path, sql: str) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    with pytest.raises(ConfigError, match="SQL"):
        query(out, sql.format(file=secret, out=out))


@pytest.mark.parametrize(
    "sql",
    [
        "copy (select 1) to '{file}'",
        "copy packs to '{file}' (format parquet)",
        "export database '{file}'",
        "attach '{file}' as other",
        "install httpfs",
        "load httpfs",
        "set enable_external_access = true",
        "reset lock_configuration",
        "pragma enable_external_access",
        "create table t as select 1",
        "drop view packs",
        "delete from packs",
        "insert into lengths values ('a', 'b', 1, 1)",
        "select 1; select 2",
        "select 1; set threads = 1",
        "",
        "selekt 1",
    ],
)
def test_only_one_query_is_taken(out: Path, tmp_path: Path, sql: str) -> None:
    target = tmp_path / "written"
    with pytest.raises(ConfigError, match="SQL"):
        query(out, sql.format(file=target))
    assert not target.exists()


def test_variables_of_the_process_stay_hidden(out: Path) -> None:
    secret = query(out, "select 1 as a")
    assert secret.num_rows == 1
    with pytest.raises(ConfigError, match="does not exist"):
        query(out, "select * from secret")


def test_a_misspelt_table_or_column_says_what_there_is(out: Path) -> None:
    with pytest.raises(ConfigError, match="Tables: packs, shards"):
        query(out, "select * from pack")
    with pytest.raises(ConfigError, match="num_tokens"):
        query(out, "select num_token from packs")


def test_nothing_is_left_beside_the_output(out: Path) -> None:
    before = sorted(os.listdir(out))
    query(out, "select avg(efficiency) from packs")
    assert sorted(os.listdir(out)) == before
