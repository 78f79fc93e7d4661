"""The door of a cluster: addresses, tokens, and what is said when nobody, or somebody else, answers."""

import http.server
import json
import threading

import pytest

import packsvc.run.dashboard as module
from packsvc.errors import ClusterError, ConfigError
from packsvc.run.cluster_jobs import ClusterJob
from packsvc.run.dashboard import _await_version, find_token, is_loopback, open_dashboard, parse_address


@pytest.fixture(autouse=True)
def _nobody(monkeypatch, tmp_path):
    """No token, no address, no proxy, and a home of one's own."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_API_SERVER_ADDRESS", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def server():
    """An HTTP server whose answers are set by the test: a list of (status, body), the last one for ever."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.seen.append(self.headers.get("Authorization"))
            answers = self.server.answers
            status, body = answers.pop(0) if len(answers) > 1 else answers[0]
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "http://127.0.0.1:9/")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.seen, made.answers = [], [(200, json.dumps({"ray_version": "2.60.0"}))]
    made.url = f"http://127.0.0.1:{made.server_port}"
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def wait_for(server, *, token=None, seconds=0.0, say=print):
    return _await_version(server.url, token, wait_seconds=seconds, say=say)


@pytest.mark.parametrize("address", ["auto", "ray://head:10001", "local", "ftp://x", "http://", "http://h:port", ""])
def test_an_address_of_another_kind_is_refused(address):
    if address:
        with pytest.raises(ConfigError, match="give the URL of the cluster's dashboard"):
            parse_address(address)
    else:
        assert parse_address(address) == "http://127.0.0.1:8265"


def test_the_address_given_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://env:1")
    assert parse_address("http://given:1") == "http://given:1"
    assert parse_address(None) == "http://env:1"


@pytest.mark.parametrize("host", ["10.1.2.3", "ray.example", "127.0.0.1.example", "localhost.example", "[fe80::1]"])
def test_plain_http_to_another_machine_needs_a_token(host, monkeypatch):
    monkeypatch.setattr(module, "_get", None)  # it is refused before anything is asked
    with pytest.raises(ConfigError, match=r"without a token.*--insecure"):
        open_dashboard(f"http://{host}:8265", wait_seconds=60)
    assert not is_loopback(f"http://{host}:8265")


def test_the_token_is_the_variable_then_the_named_file_then_that_of_ray(monkeypatch, tmp_path):
    assert find_token() is None
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("three\n")
    assert find_token() == "three"
    (tmp_path / "named").write_text(" two ")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "named"))
    assert find_token() == "two"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "one")
    assert find_token() == "one"


def test_a_named_token_file_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/none/token")
    with pytest.raises(ConfigError, match="RAY_AUTH_TOKEN_PATH: /none/token: cannot be read: No such file"):
        find_token()


def test_a_dashboard_that_comes_up_late_is_waited_for(server):
    server.answers = [(503, ""), (502, ""), (200, json.dumps({"ray_version": "2.60.0"}))]
    said = []
    assert wait_for(server, token="t", seconds=20, say=said.append) == "2.60.0"
    assert server.seen == ["Bearer t"] * 3
    assert len(said) == 1
    assert "waiting up to 20 s" in said[0]


@pytest.mark.parametrize(("token", "text"), [(None, "wants a token"), ("wrong", "the token is not this cluster's")])
@pytest.mark.parametrize("status", [401, 403])
def test_a_wrong_token_is_told_at_once(server, token, text, status):
    server.answers = [(status, "no")]
    with pytest.raises(ConfigError, match=text):
        wait_for(server, token=token, seconds=60)
    assert len(server.seen) == 1


@pytest.mark.parametrize("answer", [(404, ""), (200, "<html>"), (200, "[]"), (200, "{}"), (302, "")])
def test_what_is_no_dashboard_is_told(server, answer):
    server.answers = [answer]
    with pytest.raises(ConfigError, match="Ray dashboard"):
        wait_for(server, token="secret", seconds=60)


def test_nobody_there_is_told_with_the_way_out(server):
    server.shutdown()
    server.server_close()
    with pytest.raises(ClusterError, match=r"no answer \(.*refused\).*--wait-for-dashboard"):
        wait_for(server, seconds=0.1)


def ended(status, exit_code):
    return ClusterJob(
        id="x",
        status=status,
        message="",
        exit_code=exit_code,
        started_at=None,
        ended_at=None,
        entrypoint="",
        metadata={},
    )


@pytest.mark.parametrize(
    ("status", "exit_code", "code"),
    [
        ("SUCCEEDED", 0, 0),
        ("FAILED", 1, 1),
        ("FAILED", 2, 2),
        ("FAILED", 3, 3),
        ("FAILED", 127, 127),
        ("FAILED", None, 3),  # its environment could not be made, or its node was lost
        ("FAILED", -9, 3),
        ("FAILED", 137, 3),
        ("STOPPED", None, 3),
        ("STOPPED", 143, 3),
    ],
)
def test_waiting_ends_with_the_code_of_the_job(status, exit_code, code):
    assert ended(status, exit_code).command_exit_code == code
