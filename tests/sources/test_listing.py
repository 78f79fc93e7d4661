"""From paths to inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from packsvc.errors import SourceError
from packsvc.sources import list_inputs
from packsvc.types import InputFile
from tests.sources.inputs import job_with


def make(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}\n")


def listed(folder: Path, path: Any) -> list[InputFile]:
    job = job_with(folder, {"path": path, "name": "s"})
    return list_inputs(job.sources[0], job=job)


def paths(folder: Path, path: Any) -> list[str]:
    return [file.path for file in listed(folder, path)]


def test_a_file_has_its_path_as_written_and_its_facts(tmp_path: Path) -> None:
    make(tmp_path, "data/a.jsonl")
    (file,) = listed(tmp_path, "./data//a.jsonl")
    stat = (tmp_path / "data/a.jsonl").stat()
    assert file == InputFile(
        path="data/a.jsonl", url=str(tmp_path / "data/a.jsonl"), source="s", size_bytes=3, mtime=stat.st_mtime
    )
    assert paths(tmp_path, str(tmp_path / "data/a.jsonl")) == [str(tmp_path / "data/a.jsonl")]
    assert paths(tmp_path / "data", "../data/a.jsonl") == ["../data/a.jsonl"]


def test_files_are_sorted_by_the_bytes_of_their_paths(tmp_path: Path) -> None:
    make(tmp_path, *(f"d/{name}.jsonl" for name in ("b", "B", "a10", "a9", "é", "z", "c/x")))
    want = ["d/B.jsonl", "d/a10.jsonl", "d/a9.jsonl", "d/b.jsonl", "d/c/x.jsonl", "d/z.jsonl", "d/é.jsonl"]
    assert paths(tmp_path, "d") == paths(tmp_path, "d/**/*.jsonl") == want
    assert all(Path(file.url).exists() for file in listed(tmp_path, "d"))


def test_the_folder_of_the_job_itself_is_a_folder(tmp_path: Path) -> None:
    make(tmp_path, "a.jsonl", "d/b.jsonl")
    assert paths(tmp_path, ".") == paths(tmp_path, "./") == ["a.jsonl", "d/b.jsonl"]
    assert paths(tmp_path, "./*.jsonl") == ["a.jsonl"]


def test_globs_match_files_at_their_depth(tmp_path: Path) -> None:
    make(tmp_path, "d/a.jsonl", "d/b.jsonl.gz", "d/c.csv", "d/sub/a.jsonl", "e/a.jsonl", "d/.hidden.jsonl")
    assert paths(tmp_path, "./d/*.jsonl*") == ["d/a.jsonl", "d/b.jsonl.gz"]
    assert paths(tmp_path, "*/a.jsonl") == ["d/a.jsonl", "e/a.jsonl"]
    assert paths(tmp_path, "d/[ab].jsonl") == ["d/a.jsonl"]
    assert paths(tmp_path, str(tmp_path / "d" / "*.csv")) == [str(tmp_path / "d/c.csv")]


def test_signs_of_globs_in_real_names_are_no_globs(tmp_path: Path) -> None:
    make(tmp_path, "run[1]/a*.jsonl", "run[1]/ab.jsonl", "run1/ac.jsonl")
    assert paths(tmp_path, "run[1]/a*.jsonl") == ["run[1]/a*.jsonl"]
    assert paths(tmp_path / "run[1]", "*.jsonl") == ["a*.jsonl", "ab.jsonl"]


def test_a_file_named_twice_counts_once(tmp_path: Path) -> None:
    make(tmp_path, "d/a.jsonl", "d/b.jsonl")
    assert paths(tmp_path, ["d/a.jsonl", "./d/a.jsonl", "d", "d/*.jsonl", "d/../d/a.jsonl"]) == [
        "d/a.jsonl",
        "d/b.jsonl",
    ]


def test_of_two_spellings_of_a_file_the_first_counts(tmp_path: Path) -> None:
    make(tmp_path, "d/a.jsonl")
    whole = str(tmp_path / "d" / "a.jsonl")
    assert paths(tmp_path, ["d/a.jsonl", whole]) == ["d/a.jsonl"]
    assert paths(tmp_path, [whole, "d"]) == [whole]


def test_documents_and_hidden_files_beside_data_are_passed_over(tmp_path: Path) -> None:
    make(tmp_path, "d/a.jsonl", "d/README.md", "d/LICENSE", "d/_SUCCESS", "d/.cache/x.jsonl", "d/notes.txt")
    assert paths(tmp_path, "d") == paths(tmp_path, "d/*") == ["d/a.jsonl"]


@pytest.mark.parametrize("path", ["d/a.jsonl.bz2", "d", "d/*"])
def test_a_kind_that_is_not_read_is_refused_by_name(tmp_path: Path, path: str) -> None:
    make(tmp_path, "d/a.jsonl.bz2", "d/b.jsonl")
    with pytest.raises(SourceError, match=r"source 's': d.*a\.jsonl\.bz2 is of no kind that is read"):
        listed(tmp_path, path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("x.jsonl", "no such file or folder"),
        ("d/*.csv", "no file matches"),
        ("*", "only folders match"),
        ("empty", "no data file is there"),
    ],
)
def test_nothing_found_is_an_error_that_says_where_it_looked(tmp_path: Path, path: str, message: str) -> None:
    make(tmp_path, "d/a.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=message):
        listed(tmp_path, path)


def test_a_saved_data_set_is_its_arrow_files(tmp_path: Path) -> None:
    make(
        tmp_path,
        "ds/data-00000-of-00002.arrow",
        "ds/data-00001-of-00002.arrow",
        "ds/cache-1f.arrow",
        "ds/dataset_info.json",
    )
    state = '{"_data_files": [{"filename": "data-00000-of-00002.arrow"}, {"filename": "data-00001-of-00002.arrow"}]}'
    (tmp_path / "ds" / "state.json").write_text(state)
    assert paths(tmp_path, "ds") == ["ds/data-00000-of-00002.arrow", "ds/data-00001-of-00002.arrow"]
    (tmp_path / "ds" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(SourceError, match=r"state\.json names data-00001-of-00002\.arrow, which is not there"):
        listed(tmp_path, "ds")


def test_a_data_set_of_several_splits_names_them(tmp_path: Path) -> None:
    make(tmp_path, "ds/train/data-00000-of-00001.arrow")
    (tmp_path / "ds" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(SourceError, match="name one of them: ds/train or ds/test"):
        listed(tmp_path, "./ds/")
    assert paths(tmp_path, "ds/train") == ["ds/train/data-00000-of-00001.arrow"]


def test_a_data_set_saved_by_datasets_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    from tests.sources.inputs import chat, rows_of

    rows = [chat(f"q{n}", f"a{n}") for n in range(5)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "ds"), num_shards=2)
    files = listed(tmp_path, "ds")
    assert len(files) == 2
    assert [row.record for file in files for row in rows_of(file)] == rows


def test_urls_keep_their_spelling(tmp_path: Path) -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    for name in ("a.jsonl", "b.jsonl", "sub/c.jsonl"):
        fs.pipe_file(f"/listing-test/{name}", b"{}\n")
    found = listed(tmp_path, "memory://listing-test/*.jsonl")
    assert [file.path for file in found] == ["memory://listing-test/a.jsonl", "memory://listing-test/b.jsonl"]
    assert [file.url for file in found] == [file.path for file in found]
    assert len(listed(tmp_path, "memory://listing-test")) == 3
