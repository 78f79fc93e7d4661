"""What travels with a job, and what a cluster cannot see."""

import os
from pathlib import Path

import pytest

from packsvc.config import load_job, parse_job
from packsvc.errors import ConfigError, SourceError
from packsvc.run.shipping import LocalPaths, job_hash, local_path, make_package, tokenizer_files
from packsvc.run.tasks import _base_here
from packsvc.sources import list_inputs


@pytest.fixture
def folder(tmp_path):
    """A job folder with data, a tokenizer with weights beside it, and a template one level up."""
    home = tmp_path / "team" / "job"
    for name, text in {
        "data/a.jsonl": '{"messages": []}\n',
        "data/deep/b.jsonl.gz": "x",
        "data/README.md": "words",
        "tok/tokenizer.json": "{}",
        "tok/tokenizer_config.json": "{}",
        "tok/additional_chat_templates/tool.jinja": "t",
        "tok/model.safetensors": "weights",
        "tok/model.safetensors.index.json": "{}",
        "../template.jinja": "{{ messages }}",
    }.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return home


def job_in(folder, **changes):
    tree = {
        "tokenizer": "./tok",
        "sources": [{"path": "data/a.jsonl", "name": "chat"}],
        "output": "s3://bucket/out",
    }
    return parse_job({**tree, **changes}, base=folder)


def pack_up(job, *, ship_inputs=True, local_paths=LocalPaths.UNKNOWN, here=False):
    return make_package(job, ship_inputs=ship_inputs, local_paths=local_paths, same_machine=lambda: here)


def unpacked(package, tmp_path):
    """The package as the cluster sees it, and the job read there."""
    package.write(str(tmp_path / "there"))
    return load_job(tmp_path / "there" / package.job_name)


def test_relative_paths_stay_as_they_are_written_so_that_the_plan_stays_the_same(folder, tmp_path):
    job = job_in(folder, chat_template="../template.jinja", sources=[{"path": "./data/**/*.jsonl*", "name": "chat"}])
    there = unpacked(pack_up(job), tmp_path)
    assert there.identity() == job.identity()
    mine, theirs = (list_inputs(j.sources[0], job=j) for j in (job, there))
    assert [f.path for f in theirs] == [f.path for f in mine] == ["data/a.jsonl", "data/deep/b.jsonl.gz"]
    assert os.path.isfile(there.resolve("../template.jinja"))
    assert sorted(os.listdir(there.resolve("./tok"))) == [
        "additional_chat_templates",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_weights_never_travel(folder):
    assert tokenizer_files(str(folder / "tok")) == [
        "additional_chat_templates/tool.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


@pytest.mark.parametrize("output", ["./out", "out", "../out"])
@pytest.mark.parametrize("ship_inputs", [True, False])
@pytest.mark.parametrize("here", [True, False])
def test_a_relative_output_is_refused_wherever_the_cluster_is(folder, output, ship_inputs, here):
    with pytest.raises(ConfigError, match=f"output {output}: a folder beside the job file"):
        pack_up(job_in(folder, output=output), ship_inputs=ship_inputs, here=here)


def test_an_absolute_output_is_for_a_cluster_on_this_machine(folder):
    job = job_in(folder, output="/data/out")
    assert pack_up(job, here=True).job.output == "/data/out"
    with pytest.raises(ConfigError, match=r"/data/out: a local path, and the cluster is not \(only\) this machine"):
        pack_up(job)
    assert pack_up(job, local_paths=LocalPaths.SHARED).job.output == "/data/out"


def test_local_inputs_travel_only_when_asked_to(folder):
    with pytest.raises(ConfigError, match=r"source 'chat': data/a.jsonl: .*--ship-inputs \(up to 100 MB\)"):
        pack_up(job_in(folder), ship_inputs=False, here=True)
    assert "data/a.jsonl" in pack_up(job_in(folder)).files


def test_the_tokenizer_and_the_template_always_travel(folder):
    job = job_in(folder, chat_template="../template.jinja", sources=[{"path": "s3://bucket/*.jsonl", "name": "chat"}])
    package = pack_up(job, ship_inputs=False)
    assert sorted(package.files) == [
        "template.jinja",
        "up1/tok/additional_chat_templates/tool.jinja",
        "up1/tok/tokenizer.json",
        "up1/tok/tokenizer_config.json",
    ]
    assert package.job_name == "up1/job.yaml"


def test_absolute_paths_stay_on_this_machine_and_are_rewritten_for_another(folder, tmp_path):
    job = job_in(
        folder,
        tokenizer=str(folder / "tok"),
        chat_template=str(folder.parent / "template.jinja"),
        sources=[{"path": [f"{folder}/data/*.jsonl", f"file://{folder}/data/deep"], "name": "chat"}],
    )
    stays = pack_up(job, here=True)
    assert stays.files == {}
    assert stays.job.identity() == job.identity()
    there = unpacked(pack_up(job), tmp_path)
    assert there.tokenizer == f"from_elsewhere{folder}/tok"
    found = list_inputs(there.sources[0], job=there)
    assert [Path(f.url).read_text() for f in found] == ['{"messages": []}\n', "x"]
    assert all(f.url.startswith(str(tmp_path / "there")) for f in found)


def test_shared_paths_stay_and_start_from_the_folder_of_the_job(folder):
    package = pack_up(job_in(folder, output="./out"), ship_inputs=False, local_paths=LocalPaths.SHARED)
    assert package.files == {}
    assert package.base == str(folder)
    assert package.job.output == str(folder / "out")
    assert package.job.identity() == job_in(folder).identity()


def test_everything_that_is_wrong_is_said_at_once(folder):
    job = job_in(folder, output="./out", tokenizer="./none", chat_template="none.jinja")
    with pytest.raises(ConfigError) as caught:
        pack_up(job, ship_inputs=False)
    for part in ("output ./out", "tokenizer ./none", "chat_template none.jinja", "source 'chat'"):
        assert part in str(caught.value)


@pytest.mark.parametrize("path", ["memory://x/a.jsonl", "zip://a.jsonl::/data/a.zip", "zip://a::file:///data/a.zip"])
def test_what_only_this_process_sees_is_refused(folder, path):
    with pytest.raises(ConfigError, match="only this machine sees it"):
        pack_up(job_in(folder, sources=[{"path": path, "name": "chat"}]))
    with pytest.raises(ConfigError, match="only this process sees it"):
        pack_up(job_in(folder, output="memory://out"))


def test_an_input_that_is_not_there_is_named(folder):
    with pytest.raises(SourceError, match=r"data/none.jsonl.*nothing was submitted"):
        pack_up(job_in(folder, sources=[{"path": "data/none.jsonl", "name": "chat"}]))


def test_more_than_a_package_holds_is_refused_with_its_size(folder):
    with open(folder / "data" / "big.jsonl", "wb") as file:
        file.truncate(150_000_000)
    with pytest.raises(ConfigError, match="150 MB would have to travel"):
        pack_up(job_in(folder, sources=[{"path": "data/big.jsonl", "name": "chat"}]))


def test_a_hub_id_is_left_to_the_cluster(folder):
    package = pack_up(job_in(folder, tokenizer="org/name"))
    assert package.job.tokenizer == "org/name"
    assert list(package.files) == ["data/a.jsonl"]


def test_jobs_that_are_the_same_plan_for_the_same_output_have_the_same_name(folder):
    job = job_in(folder)
    same = job_in(folder, name="other", audit_fraction=0.5, limits={"max_reject_fraction": 0.5})
    assert job_hash(job) == job_hash(same)
    others = [job_in(folder, output="s3://bucket/b"), job_in(folder, seq_len=8), job_in(folder, seed=1)]
    hashes = {job_hash(j) for j in (job, *others)} | {job_hash(job, limit=5)}
    assert len(hashes) == 5


def test_local_paths_are_told_from_urls():
    assert local_path("~/x") == os.path.expanduser("~/x")
    assert local_path("local:///x") == "/x"
    assert local_path("gs://b/x") is None


def test_a_worker_finds_the_package_under_its_own_session_folder(tmp_path, monkeypatch):
    mine = tmp_path / "other" / "_ray_pkg_0f"
    (mine / "up1").mkdir(parents=True)
    monkeypatch.chdir(mine)
    assert _base_here("/tmp/ray/session/_ray_pkg_0f/up1") == str(mine / "up1")
    assert _base_here("/tmp/ray/session/_ray_pkg_0f") == str(mine)
    assert _base_here(str(tmp_path)) == str(tmp_path)
    assert _base_here("/gone/elsewhere") == "/gone/elsewhere"
