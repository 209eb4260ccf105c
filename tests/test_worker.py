"""The worker thread: what it does in which order, and that nothing of it stays."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time

import pytest

import mimose
from mimose.worker import NAME, JobKind, Worker

pytestmark = pytest.mark.worker

LENGTHS = [64, 20, 64, 30, 40, 50, 34, 44, 60, 28, 56, 38]


def _threads():
    return [thread for thread in threading.enumerate() if thread.name == NAME]


@pytest.fixture(autouse=True)
def _none_left():
    yield
    gc.collect()
    until = time.monotonic() + 10
    while _threads() and time.monotonic() < until:
        time.sleep(0.01)
    assert _threads() == []


@pytest.fixture
def worker():
    """A worker that is closed, come what may."""
    made = Worker()
    yield made
    made.close()


@pytest.fixture
def blocked(worker):
    """The worker in the midst of a plan, until the returned event is set."""
    began, goes_on = threading.Event(), threading.Event()

    def wait():
        began.set()
        assert goes_on.wait(10)

    worker.submit(JobKind.PLAN, "wait", wait)
    assert began.wait(10)
    yield goes_on
    goes_on.set()


def _wait_for_all(worker):
    done = threading.Event()
    worker.submit(JobKind.PLAN, object(), done.set)
    assert done.wait(10)


def test_the_urgent_comes_first_and_the_newest_of_a_key(worker, blocked):
    """Whatever came in first; an older job of the same key is not done."""
    done = []
    for kind, key, word in (
        (JobKind.PLAN, 1, "old"),
        (JobKind.PLAN, 2, "other"),
        (JobKind.PLAN, 1, "new"),
        (JobKind.LEARN, 1, "learn"),
    ):
        worker.submit(kind, key, lambda word=word: done.append(word))
    blocked.set()
    _wait_for_all(worker)
    assert done == ["learn", "other", "new"]


def test_who_waits_for_lessons_learns_them(worker, blocked):
    """Rather than for a solver that the thread is in the midst of."""
    done = []
    worker.submit(JobKind.LEARN, 1, lambda: done.append(threading.current_thread()))
    worker.catch_up()
    assert done == [threading.current_thread()]


def test_a_lesson_that_was_begun_is_waited_for(worker):
    """Item by item, without rests in between."""
    began, items = threading.Event(), []

    def learn():
        for item in range(1000):
            began.set()
            items.append(item)
            yield

    worker.submit(JobKind.LEARN, 1, learn)
    assert began.wait(10)
    worker.catch_up()
    assert len(items) == 1000


def test_a_failure_is_told_once_and_lessons_go_on_inline(worker, caplog):
    """What failed is not run again; what is not needed is not done any more."""
    here = []
    worker.submit(JobKind.LEARN, 1, lambda: 1 / 0)
    worker.catch_up()
    (told,) = caplog.messages
    assert "ZeroDivisionError" in told
    worker.submit(JobKind.LEARN, 2, lambda: here.append(threading.current_thread()))
    worker.submit(JobKind.PLAN, 3, lambda: here.append("plan"))
    assert here == [threading.current_thread()]


def test_a_lesson_that_hangs_is_given_up(worker, caplog, monkeypatch):
    """It is said where; those behind it are learned inline, and it ends if it wakes."""
    monkeypatch.setattr("mimose.worker.HUNG_SECONDS", 0.05)
    began, wakes, done = threading.Event(), threading.Event(), []

    def hang():
        began.set()
        wakes.wait()
        yield
        done.append("the hung one")

    worker.submit(JobKind.LEARN, 1, hang)
    assert began.wait(10)
    worker.submit(JobKind.LEARN, 2, lambda: done.append("the next"))
    worker.catch_up()
    worker.catch_up()
    (said,) = caplog.messages
    assert "in hang" in said
    wakes.set()
    for thread in _threads():
        thread.join()
    assert ["the next"] == done


def test_a_solver_is_not_waited_for(worker):
    """What cannot be interrupted goes on alone, and ends the thread when it ends."""
    began, answers = threading.Event(), threading.Event()

    def solve():
        began.set()
        answers.wait()

    worker.submit(JobKind.PLAN, "solve", solve)
    assert began.wait(10)
    (thread,) = _threads()
    worker.close()
    assert thread.is_alive()
    answers.set()
    thread.join()


def test_no_thread_is_left_of_a_worker_that_is_dropped():
    """It ends without a word, its jobs unfinished or not."""
    for _ in range(20):
        worker = Worker()
        worker.submit(JobKind.PLAN, 1, lambda: None)
        del worker


def test_the_interpreter_ends():
    """In the midst of work, and says what it would have said."""
    program = """
import itertools, time
from mimose.worker import JobKind, Worker
worker = Worker()
def work():
    for _ in itertools.count():
        yield
worker.submit(JobKind.PLAN, 1, work)
time.sleep(0.05)
1 / 0
"""
    ran = _python(program)
    assert ran.returncode == 1
    assert "ZeroDivisionError: division by zero" == ran.stderr.splitlines()[-1]


def _python(code):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# -------------------------------------------------------------------- in sessions


def test_results_budget_and_phases_are_as_without(toys, meter):
    """To the last bit, under plans soon."""
    model = toys.chain(6)
    batches = [toys.inputs(n) for n in LENGTHS * 2]
    ends = [toys.inputs(LENGTHS[0]), toys.inputs(LENGTHS[-1])]
    budget = toys.budget_between(model, ends, 0.6, meter)
    found, session = toys.compare(model, batches, meter=meter, budget=budget)
    assert found == []
    assert {"plan"} == {r.phase for r in list(session.records)[len(LENGTHS) :]}
    assert 0 == session.summary().steps_over
    late = [r for r in session.records if r.phase == "plan"]
    assert any("recompute" in r.actions for r in late)
    assert any("keep" in r.actions for r in late)


def test_a_session_dropped_without_detach_leaves_nothing(toys, meter):
    """Nor does one whose step was cut off by an interrupt."""
    model = toys.chain(4)
    session = mimose.attach(model, "1TiB", meter=meter)
    toys.train(model, [toys.inputs(8)])
    del session
    model = toys.chain(4)

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), mimose.attach(model, "1TiB", meter=meter):
        toys.train(model, [toys.inputs(8), toys.inputs(9)])
        model.register_forward_hook(stop)
        toys.train(model, [toys.inputs(8)])
