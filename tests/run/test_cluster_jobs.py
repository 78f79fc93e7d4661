"""Following a job over lost connections, and errors of Ray's client as ours; Ray itself is not there."""

import asyncio
from types import SimpleNamespace

import pytest

import packsvc.run.cluster_jobs as module
from packsvc.errors import ClusterError, ConfigError
from packsvc.run.cluster_jobs import checked_id, follow_logs
from packsvc.run.dashboard import Dashboard

TEXT = "".join(f"line {n} é\n" for n in range(20))


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(module, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.05)


class Client:
    """Ray's client, with a log of which each connection tells so much before it breaks in its way."""

    def __init__(self, *connections, over_after=99, text=TEXT):
        self.connections = list(connections)
        self.over_after = over_after
        self.asked = 0
        self.text = text

    async def tail_job_logs(self, job_id):
        upto, end = self.connections.pop(0) if self.connections else (len(self.text), "ends")
        for at in range(0, upto, 7):
            yield self.text[at : min(at + 7, upto)]
        if end == "ends":
            self.over_after = 0
        elif end == "hangs":
            await asyncio.sleep(60)
        elif end != "closes":
            raise end

    def get_job_info(self, job_id):
        self.asked += 1
        return SimpleNamespace(
            submission_id=job_id, job_id=None, status="SUCCEEDED" if self.asked > self.over_after else "RUNNING",
            message="", driver_exit_code=0, start_time=1, end_time=2, entrypoint="", metadata=None,
        )  # fmt: skip

    def get_job_logs(self, job_id):
        return self.text


def followed(client):
    dashboard = Dashboard(address="http://127.0.0.1:1", token=None, ray_version="2.60.0", client=client)
    return "".join(follow_logs(dashboard, "x"))


BROKEN = RuntimeError("WebSocket connection closed unexpectedly with close code 1006")


@pytest.mark.parametrize(
    "connections",
    [
        [],
        [(50, BROKEN)],
        [(0, BROKEN), (100, OSError("gone")), (30, BROKEN)],
        [(60, "closes"), (0, "closes")],
        [(50, BROKEN)] * 8,
    ],
    ids=["whole", "breaks", "breaks again", "closes early", "often"],
)
def test_each_character_comes_once(connections):
    assert followed(Client(*connections)) == TEXT


def test_a_connection_that_falls_silent_does_not_hide_the_end():
    assert followed(Client((40, "hangs"), over_after=2)) == TEXT


def test_a_job_that_ends_as_the_connection_breaks_is_told_to_its_end():
    assert followed(Client((40, BROKEN), (90, "closes"), over_after=0)) == TEXT


def test_a_cluster_that_stays_away_is_told_and_that_the_job_may_go_on(monkeypatch):
    monkeypatch.setattr(module, "LOST_SECONDS", 0.05)
    client = Client(*[(20, BROKEN)] * 10_000)
    with pytest.raises(ClusterError, match="the job may go on: `packsvc jobs status x` tells"):
        followed(client)


def asking(error):
    def ask():
        raise error

    return lambda: Dashboard(address="http://h:1", token="t", ray_version="", client=None).call("job x", ask)


class AuthenticationError(RuntimeError):
    """As Ray names it."""


def test_errors_of_the_client_become_ours():
    with pytest.raises(ConfigError, match=r"job x: no such job at http://h:1.*jobs list"):
        asking(RuntimeError("Request failed with status code 404: Job x does not exist."))()
    with pytest.raises(ClusterError, match="job x: http://h:1 answered 500: ValueError: taken"):
        asking(RuntimeError("Request failed with status code 500: Traceback\n  File x\nValueError: taken."))()
    with pytest.raises(ConfigError, match="the token is not this cluster's"):
        asking(AuthenticationError("Forbidden"))()
    with pytest.raises(ClusterError, match="job x: http://h:1: Read timed out"):
        asking(TimeoutError("Read timed out"))()
    with pytest.raises(KeyError):
        asking(KeyError("a bug"))()


@pytest.mark.parametrize("job_id", ["", "a/b", "../x", "a b", "x?y"])
def test_an_id_that_is_none_is_refused(job_id):
    with pytest.raises(ConfigError, match="letters, digits"):
        checked_id(job_id)
