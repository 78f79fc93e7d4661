"""A job written down reads back as the same job."""

from hypothesis import given
from hypothesis import strategies as st

from packsvc.config import job_text, load_job, parse_job

WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12)
VALUES = WORDS | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | st.none()


@given(
    name=WORDS,
    where=st.dictionaries(WORDS, VALUES | st.lists(VALUES, max_size=3), max_size=3),
    kwargs=st.dictionaries(WORDS, VALUES, max_size=2),
    weight=st.floats(0, 1e6),
    date=st.none() | st.dates(),
)
def test_a_job_is_the_same_after_it_was_written_down(tmp_path_factory, name, where, kwargs, weight, date):
    job = parse_job(
        {
            "name": name,
            "tokenizer": "t",
            "date": date,
            "template_kwargs": kwargs,
            "sources": [{"path": ["./a/*.jsonl", "s3://b/c"], "name": name, "where": where, "weight": weight}],
            "shard_size": "1.5MB",
        }
    )
    path = tmp_path_factory.mktemp("job") / "job.yaml"
    path.write_text(job_text(job), encoding="utf-8")
    assert load_job(path).dump() == job.dump()
