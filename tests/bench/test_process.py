"""Strategies in processes of their own: real ones, on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mimose.bench.corpus import EncodedCorpus
from mimose.bench.process import Child, StrategyFailedError, StrategyProcess
from mimose.bench.step_meter import StepMeter
from mimose.bench.strategies import Training
from mimose.bench.tasks import Task, Workload, task_from_json, task_to_json

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

TINY = Workload(layers=2, hidden_size=16, max_tokens=24, batch_size=4)
MIB = 2**20


@pytest.fixture
def tiny_task(
    make_task: Callable[..., Task], toy_corpus: EncodedCorpus
) -> Callable[..., Task]:
    """Make a task for a model that trains in milliseconds."""

    def make(**given: object) -> Task:
        task = make_task(**{"workload": TINY, "steps": 3, **given})
        toy_corpus.save(task.corpus)
        return task

    return make


def test_task_survives_its_journey(make_task: Callable[..., Task]) -> None:
    """A task read from plain values equals the one they were made from."""
    task = make_task(workload=TINY, budget_bytes=7)

    assert task_from_json(task_to_json(task)) == task


def test_step_meter_sees_past_resets() -> None:
    """A peak before somebody else's reset belongs to the step all the same."""
    meter = StepMeter()
    start = meter.begin_step()
    block = bytearray(64 * MIB)
    del block
    meter.reset_peak()

    assert meter.step_peak_bytes() - start > 60 * MIB
    assert meter.begin_step() - start < 8 * MIB
    assert meter.step_peak_bytes() - start < 8 * MIB


@pytest.mark.slow
def test_process_gives_the_rows_of_the_same_training(
    tiny_task: Callable[..., Task],
) -> None:
    """Losses are those of the same training in this process, to the last bit."""
    here = Training(tiny_task())
    expected = [here.advance(index).loss for index in range(3)]

    with StrategyProcess(tiny_task(strategy="mimose", budget_bytes=2**33)) as process:
        lengths = process.lengths
        rows = [process.advance(index, evaluates=index == 2) for index in range(3)]

    assert lengths == here.lengths
    assert [row.loss for row in rows] == expected
    assert [row.length for row in rows] == list(lengths)
    assert [row.step for row in rows] == [0, 1, 2]
    assert rows[0].phase == "collect"
    assert rows[0].recomputed_flops > 0
    assert rows[0].accuracy is None
    assert rows[2].accuracy is not None


@pytest.mark.slow
def test_limit_makes_allocations_fail(tiny_task: Callable[..., Task]) -> None:
    """A step that needs more than the budget and the slack ends with a message."""
    task = tiny_task(
        workload=Workload(layers=4, hidden_size=256, max_tokens=24, batch_size=48),
        budget_bytes=1,
        is_limited=True,
    )

    with (
        StrategyProcess(task) as process,
        pytest.raises(StrategyFailedError, match="can't allocate memory"),
    ):
        process.advance(0)


@pytest.mark.slow
def test_a_process_that_dies_is_reported(tiny_task: Callable[..., Task]) -> None:
    """The error tells which strategy died, with what status, and its last words."""
    task = tiny_task(strategy="nonsense", budget_bytes=1)

    with (
        StrategyProcess(task) as process,
        pytest.raises(StrategyFailedError, match="'nonsense' ended with code 1: Key"),
    ):
        _ = process.lengths


@pytest.mark.slow
def test_worker_ends_with_its_input(tiny_task: Callable[..., Task]) -> None:
    """Whoever started a worker may die: it goes when nobody can ask it anything."""
    done = subprocess.run(
        [sys.executable, "-m", "mimose.bench.worker"],
        input=json.dumps(task_to_json(tiny_task())) + "\n",
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )

    assert list(json.loads(done.stdout)) == ["lengths"]


def test_a_dead_process_can_be_asked_and_closed() -> None:
    """However often, and although it never read what it was sent."""
    child = Child("hapless", "abc", 1, {"task": 1})  # a module that ends at once
    for ask in (child.receive, lambda: child.ask({"step": 1}), child.receive):
        with pytest.raises(StrategyFailedError, match="'hapless' ended with code 0"):
            ask()
    child.close()
    child.close()


_STARTER = """
import os, subprocess, sys
busy = "from mimose.bench.worker import end_with_parent as e; e(); print(1, flush=1)"
busy += "\\nwhile True: pass"
child = subprocess.Popen(
    [sys.executable, "-c", busy], stdout=subprocess.PIPE, start_new_session=True
)
child.stdout.readline()
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_child_ends_with_a_starter_that_is_killed() -> None:
    """In the middle of its work, and without a word from anybody."""
    starter = subprocess.run(
        [sys.executable, "-c", _STARTER], stdout=subprocess.PIPE, text=True, check=False
    )
    child = Path(f"/proc/{int(starter.stdout)}")
    for _ in range(600):
        if not child.exists():
            return
        time.sleep(0.1)
    os.kill(int(starter.stdout), 9)
    pytest.fail("the child goes on")
