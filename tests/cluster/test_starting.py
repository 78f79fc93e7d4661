"""Starting and leaving Ray: late processes, addresses where nothing is, signals while Ray is at work."""

import os
import signal
import socket

import pytest

from packsvc.cluster import check_listens, leave_ray, signals_later, start_ray
from packsvc.errors import ClusterError

LATE = "The current node timed out during startup."


class FakeRay:
    """As much of Ray as starting it needs; each `init` does the next thing of a list."""

    def __init__(self, *does):
        self.does = list(does)
        self.inits = []
        self.shutdowns = 0

    def is_initialized(self):
        return False

    def init(self, **options):
        self.inits.append(options)
        does = self.does.pop(0)
        if isinstance(does, BaseException):
            raise does
        does()

    def shutdown(self):
        self.shutdowns += 1


@pytest.fixture
def ended():
    """SIGTERM and SIGINT call a handler of the test, which notes them and raises."""
    came = []

    def handler(number, frame):
        came.append(number)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    yield came
    assert [signal.getsignal(number) for number in before] == [handler, handler]
    for number, was in before.items():
        signal.signal(number, was)


def test_a_ray_that_comes_up_late_is_started_once_more():
    ray, said = FakeRay(Exception(LATE), lambda: None), []
    assert start_ray(ray, workers=3, address=None, say=said.append) is True
    assert [options["num_cpus"] for options in ray.inits] == [3, 3]
    assert ray.shutdowns == 1
    assert "timed out during startup" in said[0]


def test_a_ray_that_never_comes_up_is_a_cluster_error():
    ray = FakeRay(Exception(LATE), Exception(LATE))
    with pytest.raises(ClusterError, match="timed out during startup") as caught:
        start_ray(ray, workers=None, address=None, say=print)
    assert caught.value.exit_code == 3
    assert ray.shutdowns == 2


def test_a_cluster_that_refuses_is_asked_once():
    ray = FakeRay(ConnectionError("no"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ClusterError, match="no cluster could be reached"):
            start_ray(ray, workers=None, address=address, say=print)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_inside_ray_is_handled_when_ray_is_through(ended, signum):
    """Ray sets a handler of its own first, which stays without effect."""
    steps = []

    def start():
        signal.signal(signal.SIGTERM, lambda *_: os._exit(134))
        os.kill(os.getpid(), signum)
        steps.append("through")

    ray = FakeRay(start)
    with pytest.raises(KeyboardInterrupt):
        start_ray(ray, workers=1, address=None, say=print)
    assert (steps, ended, ray.shutdowns) == (["through"], [signum], 1)


def test_a_second_signal_is_handled_at_once(ended):
    steps = []

    @signals_later()
    def impatient():
        os.kill(os.getpid(), signal.SIGTERM)
        steps.append("goes on")
        os.kill(os.getpid(), signal.SIGINT)
        steps.append("not reached")

    with pytest.raises(KeyboardInterrupt):
        impatient()
    assert steps == ["goes on"]


def test_leaving_ray_is_not_cut_short(ended):
    class Slow(FakeRay):
        def shutdown(self):
            os.kill(os.getpid(), signal.SIGTERM)
            super().shutdown()

    ray = Slow()
    with pytest.raises(KeyboardInterrupt):
        leave_ray(ray)
    assert ray.shutdowns == 1


def test_an_address_where_nothing_listens_is_told_at_once():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
        with pytest.raises(ClusterError, match="no cluster could be reached") as caught:
            check_listens(address)
        assert caught.value.exit_code == 3


def test_an_address_where_something_listens_and_one_without_a_port_pass():
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_listens(f"127.0.0.1:{server.getsockname()[1]}")
    check_listens("auto")
