"""The door of a Ray cluster: its dashboard's address, the token, and errors that say what to do.

Everything goes through Ray's own job client; what it leaves out is here: an answer is awaited for a while, since a
submitter often starts before the dashboard does; every request has a time limit; the address given is the one
used, whatever RAY_ADDRESS says; a wrong token, an unknown id and a dead server are told apart. The token is
RAY_AUTH_TOKEN, else the file that RAY_AUTH_TOKEN_PATH names, else ~/.ray/auth_token, as Ray itself looks for it.
A job API without a token runs anybody's code: plain http to another machine without one is refused.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import platform
import re
import socket
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar

from packsvc.errors import ClusterError, ConfigError

T = TypeVar("T")
DEFAULT_ADDRESS = "http://127.0.0.1:8265"
ADDRESS_VARIABLE = "RAY_API_SERVER_ADDRESS"
OLDEST_RAY = (2, 54)
"""Older job servers can be driven by any web page that the user opens (CVE-2026-27482)."""
ASK_SECONDS = 10.0
REQUEST_SECONDS = 120.0
PAUSE_SECONDS = 0.5
FIRST_NODE_SECONDS = 60.0
"""A dashboard that has just started does not know its nodes yet."""
_CHATTY = (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
)
_ENVIRONMENT = threading.Lock()


def find_token() -> str | None:
    """The user's token for Ray clusters, None where there is none.

    Raises:
        ConfigError: RAY_AUTH_TOKEN_PATH names a file that cannot be read.
    """
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token
    named = os.environ.get("RAY_AUTH_TOKEN_PATH", "")
    path = Path(named).expanduser() if named else Path.home() / ".ray" / "auth_token"
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError) as error:
        if named:
            reason = error.strerror if isinstance(error, OSError) else "not text"
            raise ConfigError(f"RAY_AUTH_TOKEN_PATH: {path}: cannot be read: {reason}") from error
        return None


def parse_address(address: str | None) -> str:
    """The dashboard's URL, from what the user gave, RAY_API_SERVER_ADDRESS, or Ray's default.

    >>> parse_address("head:8265"), parse_address("https://ray.example/")
    ('http://head:8265', 'https://ray.example')

    Raises:
        ConfigError: It is an address of another kind.
    """
    given = address or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS
    url = given if "://" in given else f"http://{given}"
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if "://" not in given and port is None:
        host = None  # `auto` and the like: words of `pack --address`
    if host is None or parts.scheme not in ("http", "https"):
        raise ConfigError(
            f"--address {given!r}: give the URL of the cluster's dashboard, e.g. http://127.0.0.1:8265 "
            f"(ray:// and auto are for `packsvc pack --address`)"
        )
    return url.rstrip("/")


def is_loopback(address: str) -> bool:
    """Whether a URL stays on this machine.

    >>> is_loopback("http://localhost:8265"), is_loopback("http://[::1]:1"), is_loopback("http://10.0.0.1:8265")
    (True, True, False)
    """
    host = urllib.parse.urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """A cluster that answered."""

    address: str
    token: str | None
    ray_version: str
    client: Any
    """Ray's JobSubmissionClient."""

    def call(self, what: str, ask: Callable[[], T]) -> T:
        """Ask the client; its errors become ours. `what` opens the message."""
        try:
            return ask()
        except Exception as error:
            raise self.told(what, error) from error

    def told(self, what: str, error: Exception) -> Exception:
        """An error of Ray's client as one of ours; what it is not about is given back as it is."""
        kind, text = type(error).__name__, str(error).strip()
        if kind == "AuthenticationError":
            return ConfigError(_refused(self.address, self.token))
        status = re.search(r"status code (\d+)", text)
        if status and status[1] == "404":
            return ConfigError(f"{what}: no such job at {self.address}; `packsvc jobs list` shows those there are")
        if status:
            last = (text.splitlines() or [""])[-1].strip().rstrip(".")
            return ClusterError(f"{what}: {self.address} answered {status[1]}: {last[:500]}")
        if isinstance(error, OSError) or kind in ("RuntimeError", "ClientError", "WSServerHandshakeError"):
            # requests' errors are OSErrors; aiohttp's derive from ClientError.
            return ClusterError(f"{what}: {self.address}: {_first_line(error)}")
        return error

    def is_this_machine(self) -> bool:
        """Whether all nodes of the cluster are this machine: its name and its network addresses, both.

        The address of the dashboard says little: a port forwarded from a cluster elsewhere is on loopback too.

        Raises:
            ClusterError: The cluster has no node, so that no job could run.
        """
        deadline = time.monotonic() + FIRST_NODE_SECONDS
        while True:
            try:
                names, alive = self._hosts()
            except (OSError, HTTPException, ValueError, KeyError, TypeError):
                return False  # some gateways show the job API only
            if names and alive:
                return names == {platform.node()} and all(map(_is_mine, alive))
            if time.monotonic() > deadline:
                raise ClusterError(f"{self.address}: the cluster has no node yet; is it still starting?")
            time.sleep(PAUSE_SECONDS)

    def _hosts(self) -> tuple[set[str], set[str]]:
        """Names and addresses of the nodes that are alive."""
        names = set(self._get("/nodes?view=hostNameList")["data"]["hostNameList"])
        nodes = self._get("/api/v0/nodes")["data"]["result"]["result"]
        return names, {node["node_ip"] for node in nodes if node["state"] == "ALIVE"}

    def _get(self, path: str) -> Any:
        return json.loads(_get(self.address + path, self.token))


def open_dashboard(
    address: str | None = None, *, insecure: bool = False, wait_seconds: float = 0.0, say: Callable[[str], None] = print
) -> Dashboard:
    """Reach a cluster's job API, waiting a while for it to answer.

    Args:
        address: `http://HOST:8265`; RAY_API_SERVER_ADDRESS, else this machine's default, when None.
        insecure: Allow plain http to another machine without a token.
        wait_seconds: How long to wait for the first answer.
        say: Told once when there is something to wait for.

    Raises:
        ConfigError: The address, the token, or what answers there is not right.
        ClusterError: Nothing answers.
    """
    url = parse_address(address)
    token = find_token()
    if token is None and url.startswith("http://") and not is_loopback(url) and not insecure:
        raise ConfigError(
            f"{url}: refused: plain http to another machine without a token, where whoever can reach the port can run "
            f"code. Turn on token authentication there (RAY_AUTH_MODE=token) and set RAY_AUTH_TOKEN here, use https or "
            f"a tunnel to 127.0.0.1, or pass --insecure."
        )
    version = _await_version(url, token, wait_seconds=wait_seconds, say=say)
    _check_version(url, version)
    return Dashboard(address=url, token=token, ray_version=version, client=_make_client(url, token))


def _await_version(url: str, token: str | None, *, wait_seconds: float, say: Callable[[str], None]) -> str:
    deadline, told = time.monotonic() + wait_seconds, False
    while True:
        try:
            answer = json.loads(_get(f"{url}/api/version", token))
            return str(answer["ray_version"])
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                raise ConfigError(_refused(url, token)) from error
            if error.code < 500:
                raise ConfigError(f"{url}: answered {error.code}; is this a Ray dashboard?") from error
            why = f"answered {error.code}"
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{url}: what answers there is no Ray dashboard") from error
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLError):
                raise ConfigError(f"{url}: {_first_line(reason)}; set SSL_CERT_FILE to the CA's certificate") from error
            why = _first_line(reason)
        left = deadline - time.monotonic()
        if left <= 0:
            raise ClusterError(
                f"{url}: no answer ({why}). Is the cluster up, and its dashboard reachable from here? "
                f"--wait-for-dashboard SECONDS waits longer."
            )
        if not told:
            say(f"waiting up to {wait_seconds:.0f} s for {url} ({why})")
            told = True
        time.sleep(min(PAUSE_SECONDS, left))


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the token to another host."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _get(url: str, token: str | None) -> bytes:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=ASK_SECONDS) as answer:
            return bytes(answer.read())
    except UnicodeEncodeError as error:
        raise ConfigError("the Ray token holds characters that no token has") from error


def _check_version(url: str, server: str) -> None:
    import ray

    oldest = ".".join(map(str, OLDEST_RAY))
    for where, version in ((f"the cluster at {url}", server), ("here", ray.__version__)):
        numbers = re.match(r"(\d+)\.(\d+)", version)
        if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST_RAY:
            raise ConfigError(
                f"Ray {version} {where}: packsvc needs {oldest} or later, for its safety fixes; upgrade it"
            )


def _make_client(url: str, token: str | None) -> Any:
    """Ray's client, for this address and no other, with a time limit on every request."""
    from ray.job_submission import JobSubmissionClient

    class Client(JobSubmissionClient):
        def _do_request(self, method: str, endpoint: str, **more: Any) -> Any:
            more.setdefault("timeout", REQUEST_SECONDS)
            return super()._do_request(method, endpoint, **more)

    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    headers = {"Authorization": f"Bearer {token}"} if token else None
    try:
        with _address_for_ray(url):
            return Client(url, headers=headers)
    except Exception as error:
        raise Dashboard(address=url, token=token, ray_version="", client=None).told("the job API", error) from error


@contextlib.contextmanager
def _address_for_ray(url: str) -> Iterator[None]:
    """Ray's client lets RAY_API_SERVER_ADDRESS, then RAY_ADDRESS, win over what it is given."""
    with _ENVIRONMENT:
        before = os.environ.get(ADDRESS_VARIABLE)
        os.environ[ADDRESS_VARIABLE] = url
        try:
            yield
        finally:
            os.environ.pop(ADDRESS_VARIABLE)
            if before is not None:
                os.environ[ADDRESS_VARIABLE] = before


def _refused(url: str, token: str | None) -> str:
    if token is None:
        return f"{url}: wants a token; set RAY_AUTH_TOKEN, or put it into ~/.ray/auth_token"
    return f"{url}: the token is not this cluster's; check RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH and ~/.ray/auth_token"


def _is_mine(ip: str) -> bool:
    """Whether an address is one of this machine's: only then can a socket be bound to it."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((ip, 0))
        except OSError:
            return False
    return True


def _first_line(error: object) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
