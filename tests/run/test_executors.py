"""Where tasks run: outcomes as values, in order here, and a clear word where no cluster answers."""

import socket

import pytest

from packsvc.errors import ClusterError, LimitError
from packsvc.run.executors import InProcess, make_executor
from packsvc.run.ray_start import check_listens


def divide(a, b):
    if b == 7:
        raise LimitError("seven")
    return a / b


def test_in_this_process_each_task_ends_as_a_value_or_an_error():
    outcomes = list(InProcess().run(divide, [(6, 3), (1, 0), (1, 7)]))
    assert [o.task for o in outcomes] == [0, 1, 2]
    assert outcomes[0].value == 2
    assert isinstance(outcomes[1].error, ZeroDivisionError)
    assert "divide" in outcomes[1].trace
    assert isinstance(outcomes[2].error, LimitError)


def test_no_workers_means_this_process():
    assert isinstance(make_executor(workers=0, address=None, say=print), InProcess)


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
