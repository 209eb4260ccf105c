"""The daemon's thread: what it does in which order, and that nothing of it stays."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

import pytest

from mimose.pauses import give_way
from mimose.worker import Daemon, Inline, Lane
from mimose.worker.thread import NAME


def _threads():
    return [thread for thread in threading.enumerate() if thread.name == NAME]


@pytest.fixture
def daemon():
    """A daemon that is closed, come what may."""
    made = Daemon()
    yield made
    made.close()
    assert _threads() == []


@pytest.fixture
def blocked(daemon):
    """The daemon in the midst of a job, until the returned event is set."""
    began, goes_on = threading.Event(), threading.Event()

    def wait():
        began.set()
        assert goes_on.wait(10)

    daemon.submit(Lane.LEARN, "wait", wait)
    assert began.wait(10)
    yield goes_on
    goes_on.set()


def test_no_thread_before_the_first_job(daemon):
    """And then one, which is not the caller's."""
    assert _threads() == []
    ran = []
    daemon.submit(Lane.LEARN, 1, lambda: ran.append(threading.current_thread()))
    daemon.catch_up()
    assert _threads() == ran


def test_the_urgent_comes_first(daemon, blocked):
    """Whatever came in first."""
    done, all_done = [], threading.Event()
    daemon.submit(Lane.REFINE, 1, all_done.set)
    daemon.submit(Lane.PLAN, 1, lambda: done.append("plan"))
    daemon.submit(Lane.LEARN, 1, lambda: done.append("learn"))
    blocked.set()
    assert all_done.wait(10)
    assert done == ["learn", "plan"]


def test_a_job_replaces_the_one_of_its_key(daemon, blocked):
    """The newer one runs, and where the older would not have been before others."""
    done = []
    for key, word in ((1, "old"), (2, "other"), (1, "new")):
        daemon.submit(Lane.LEARN, key, lambda word=word: done.append(word))
    blocked.set()
    daemon.catch_up()
    assert done == ["other", "new"]


def test_the_stalest_work_is_dropped(daemon, blocked):
    """The queue is bounded."""
    done = []
    for n in range(200):
        daemon.submit(Lane.LEARN, n, lambda n=n: done.append(n))
    blocked.set()
    daemon.catch_up()
    assert done == list(range(200 - 64, 200))


def test_a_failure_is_told_once_and_lessons_go_on_inline(daemon):
    """What failed is not run again; what is not needed is not done any more."""
    here = []
    daemon.submit(Lane.LEARN, 1, lambda: 1 / 0)
    daemon.catch_up()
    told = daemon.take_failure()
    assert "ZeroDivisionError" in told
    assert daemon.take_failure() == ""
    daemon.submit(Lane.LEARN, 2, lambda: here.append(threading.current_thread()))
    daemon.submit(Lane.PLAN, 3, lambda: here.append("plan"))
    daemon.submit(Lane.REFINE, 3, lambda: here.append("refined"))
    assert here == [threading.current_thread()]


def test_what_waited_as_it_failed_is_learned_by_who_asks(daemon, blocked):
    """No lesson is lost but the one that failed."""
    done = []
    daemon.submit(Lane.LEARN, 1, lambda: 1 / 0)
    daemon.submit(Lane.LEARN, 2, lambda: done.append(2))
    blocked.set()
    daemon.catch_up()
    assert done == [2]


def test_no_thread_is_left_of_a_daemon_that_is_dropped():
    """It ends without a word, its jobs unfinished or not."""
    for _ in range(20):
        daemon = Daemon()
        daemon.submit(Lane.PLAN, 1, lambda: None)
        del daemon
    gc.collect()
    assert _threads() == []


def test_a_job_that_gives_way_ends_with_the_daemon(daemon):
    """Nobody waits for a search that would go on; it is no failure."""
    began = threading.Event()

    def search():
        while True:
            began.set()
            give_way()

    daemon.submit(Lane.REFINE, "search", search)
    assert began.wait(10)
    (thread,) = _threads()
    daemon.close()
    thread.join()
    assert daemon.take_failure() == ""


def test_a_solver_is_not_waited_for(daemon):
    """What cannot be interrupted goes on alone, and ends the thread when it ends."""
    began, answers = threading.Event(), threading.Event()

    def solve():
        began.set()
        answers.wait()

    daemon.submit(Lane.REFINE, "solve", solve)
    assert began.wait(10)
    (thread,) = _threads()
    daemon.close()
    assert thread.is_alive()
    answers.set()
    thread.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_starts_afresh():
    """Also where the parent's thread was in the midst of a job, or held the lock."""
    code = """
import os, threading, sys
from mimose.worker import Daemon, Lane
daemon = Daemon()
busy = threading.Event()
def spin():
    busy.set()
    for _ in range(50_000):
        daemon.submit(Lane.REFINE, 1, int)   # takes the lock again and again
daemon.submit(Lane.LEARN, 0, spin)
busy.wait()
children = []
for _ in range(20):
    child = os.fork()
    if child == 0:
        done = []
        daemon.submit(Lane.LEARN, 1, lambda: done.append(1))
        daemon.catch_up()
        os._exit(0 if done == [1] else 1)
    children.append(child)
codes = {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children}
daemon.close()
sys.exit(0 if codes == {0} else f"children ended with {codes}")
"""
    ran = _python(code)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("pass", 0, ""),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt"),
    ],
)
def test_the_interpreter_ends(end, code, said):
    """In the midst of work, by whatever way, and says what it would have said."""
    program = f"""
import time
from mimose.worker import Daemon, Lane
from mimose.pauses import give_way
daemon = Daemon()
def work():
    while not daemon._queue._is_closed:
        give_way()
daemon.submit(Lane.REFINE, 1, work)
time.sleep(0.05)
{end}
"""
    ran = _python(program)
    assert ran.returncode == code
    assert ran.stderr.strip().splitlines()[-1:] == ([said] if said else [])


def test_the_twin_does_the_same_at_once():
    """In the caller's thread; what fails reaches the caller."""
    twin, done = Inline(), []
    for lane in Lane:
        twin.submit(lane, 1, lambda: done.append(threading.current_thread()))
    assert done == [threading.current_thread()] * 3
    twin.catch_up()
    with pytest.raises(ZeroDivisionError):
        twin.submit(Lane.PLAN, 1, lambda: 1 / 0)
    assert twin.take_failure() == ""
    twin.close()
    twin.submit(Lane.LEARN, 1, lambda: done.append("after its end"))
    assert len(done) == 3


def _python(code):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
