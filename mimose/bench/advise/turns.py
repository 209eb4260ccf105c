"""Seconds of steps, in a process in which methods take turns.

The task is a `Task`; its method is that of no turn. In each turn a model is built, and
nothing of it is left behind. Messages are the arguments of `Turns.take`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mimose.bench.advise.methods import METHODS
from mimose.bench.advise.pace import pace_of
from mimose.bench.advise.source import make
from mimose.bench.advise.task import Task, training_of
from mimose.bench.advise.training import Point
from mimose.bench.serve import messages
from mimose.bench.step_meter import budget_meter

_UNTIMED = 2
"""Steps of a size before the timed ones."""
_UNPLANNED = 3
"""Further ones of a session that plans, at a size that it has not measured twice."""


def untimed(method: str) -> int:
    """Return how many steps of a size a turn takes before the timed ones."""
    return _UNTIMED + _UNPLANNED * METHODS[method].plans


class Turns:
    """A process's turns."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.source = task.source
        torch.set_num_threads(task.threads)

    def take(
        self,
        method: str,
        points: Sequence[Sequence[Any]],
        budget_bytes: int,
        learned: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """Return the seconds of steps at each of these sizes, and the pace at each.

        Args:
            method: Its name.
            points: Each a batch size, a length or None, and how many steps to time.
            budget_bytes: For methods that plan.
            learned: By a session of theirs.
        """
        torch.manual_seed(self._task.seed)
        model, sample = make(self._task.source)
        training = training_of(replace(self._task, method=method), model, sample)
        pace = pace_of(training.device)
        seconds: list[list[float]] = []
        paces: list[list[float]] = []
        try:
            if METHODS[method].plans:
                meter = budget_meter(training.device)
                training.attach(budget_bytes, meter, refine=False)
            else:
                training.attach(None, None)
            if training.session is not None and learned is not None:
                training.session.load_state_dict(learned)
            training.step(Point(*points[0][:2]))
            for batch, length, n_steps in points:
                point = Point(batch, length)
                for _ in range(untimed(method)):
                    training.step(point)
                seconds.append([])
                paces.append([pace()])
                for _ in range(n_steps):
                    seconds[-1].append(training.step(point))
                    paces[-1].append(pace())
        finally:
            training.close()
            device = training.device
            del training, model
            gc.collect()
            if device.type != "cpu":
                torch.accelerator.empty_cache()
        return {"seconds": seconds, "paces": paces}


def work(task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Take the turns that messages ask for, until there are no more."""
    turns = Turns(Task(**task))
    make(turns.source)  # what it imports is no turn's to pay for
    yield {"ready": True}
    for arguments in messages():
        yield turns.take(**arguments)
