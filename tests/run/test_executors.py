"""Where tasks run: outcomes as values, in order here."""

from packsvc.errors import LimitError
from packsvc.run.executors import InProcess, make_executor


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
