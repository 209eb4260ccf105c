"""One method at work in a process of its own, told what to do by the one that asks.

The task is a `Task`. Messages are ``[name, arguments]`` of the methods of `Worker`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mimose.bench.advise.foretold import foretell
from mimose.bench.advise.methods import METHODS
from mimose.bench.advise.source import make
from mimose.bench.advise.training import Point, Training
from mimose.bench.machine import available_bytes
from mimose.bench.serve import messages
from mimose.bench.step_meter import RunningStep, budget_meter, step_meter
from mimose.exceptions import MimoseError, first_line
from mimose.measure.out_of_memory import is_out_of_memory

_SETTLING = 2
"""Steps at new sizes before one counts: caches fill, layers find out how to rebuild."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What one process is asked to train."""

    source: str
    """``module:function`` or a file, as `mimose.bench.advise.source.make` takes it."""
    method: str
    device: str
    dtype: str
    optimizer: str
    threads: int
    seed: int


class Worker:
    """A method at work.

    Memory is measured with one model, from `begin` on; for seconds a new one is built
    in each turn, and nothing of it is left between two turns.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._method = METHODS[task.method]
        self._device = torch.device(task.device)
        meter = budget_meter if self._method.plans else step_meter
        self._meter = meter(self._device)
        self._learned: Mapping[str, Any] | None = None
        self._shapes: Mapping[Point, Mapping[str, int]] = {}
        torch.set_num_threads(task.threads)

    def begin(self) -> dict[str, Any]:
        """Build the model to be weighed; say why that cannot be, if it cannot."""
        torch.manual_seed(self._task.seed)
        model, sample = make(self._task.source)
        why_not = self._method.why_not(model, self._device.type)
        if why_not:
            return {"why_not": why_not}
        self._weighed = self._training(model, sample)
        if not self._method.plans:
            try:
                self._weighed.attach(None, self._meter)
            except (MimoseError, ValueError) as error:
                return {"why_not": first_line(error)}
        if self._task.method == "rows" and not self._weighed.goes_by_rows:
            return {"why_not": "the model's loss is none that goes by rows"}
        return {
            "why_not": "",
            "batch": self._weighed.sample.batch,
            "length": self._weighed.sample.length,
            "available_bytes": available_bytes(),
            "total_bytes": self._meter.total_bytes(),
            "held_bytes": self._meter.settled_bytes(0),
        }

    def learn(
        self, points: Sequence[Sequence[Any]], passes: int, budget_bytes: int
    ) -> dict[str, Any]:
        """Let a session learn from steps of these sizes; then begin the one that plans.

        Returns:
            What it has learned, for the process in which steps are timed.
        """
        wanted = [Point(*each) for each in points]
        try:
            self._learned, self._shapes = self._weighed.explore(
                wanted,
                passes,
                self._meter,
                self._task.seed,
            )
            self._weighed.attach(budget_bytes, self._meter, refine=False)
        except (MimoseError, ValueError) as error:
            return {"failed": first_line(error)}
        assert self._weighed.session is not None
        self._weighed.session.load_state_dict(self._learned)
        self._weighed.step(wanted[0])
        return {"learned": self._learned}

    def foretell(self, points: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Return what plans for batches of these sizes cost."""
        session = self._weighed.session
        assert session is not None
        wanted = [Point(*each) for each in points]
        return {"table": foretell(session, self._shapes, wanted)}

    def weigh(self, batch: int, length: int | None = None) -> dict[str, Any]:
        """Return what a step reaches, in bytes, and takes, in seconds."""
        point = Point(batch, length)
        try:
            for _ in range(_SETTLING):
                self._weighed.step(point)
            self._meter.settled_bytes(0)
            running = RunningStep(self._meter, self._device)
            self._weighed.step(point)
            measured = running.end()
            reserved = self._reserved(point)
        except Exception as error:
            self._weighed.forget()
            if is_out_of_memory(error):
                return {"out_of_memory": True}
            return {"failed": first_line(error)}
        return {
            "peak_bytes": measured.peak_bytes,
            "reserved_bytes": reserved or measured.peak_bytes,
            "seconds": measured.seconds,
        }

    def time(
        self,
        points: Sequence[Sequence[Any]],
        budget_bytes: int,
        learned: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """Return the seconds of one step at each of these sizes, in a turn.

        Args:
            points: Each a batch size, a length or None, and how many steps to time.
            budget_bytes: For methods that plan.
            learned: By a session of theirs; it is told with the first turn alone.
        """
        self._learned = learned or self._learned
        torch.manual_seed(self._task.seed)
        training = self._training(*make(self._task.source))
        training.attach(
            budget_bytes if self._method.plans else None,
            self._meter if self._method.plans else None,
        )
        if training.session is not None and self._learned is not None:
            training.session.load_state_dict(self._learned)
        seconds = []
        try:
            training.step(Point(*points[0][:2]))
            for batch, length, n_steps in points:
                point = Point(batch, length)
                training.step(point)
                seconds.append([training.step(point) for _ in range(n_steps)])
        finally:
            training.close()
            del training
            gc.collect()
            if self._device.type != "cpu":
                torch.accelerator.empty_cache()
        return {"seconds": seconds}

    def _training(self, model: Any, sample: Any) -> Training:
        return Training(
            model,
            sample,
            self._method,
            device=self._device,
            optimizer=self._task.optimizer,
            dtype=self._task.dtype,
        )

    def _reserved(self, point: Point) -> int | None:
        """Return what the allocator reserves for a step, beginning with free blocks."""
        if self._device.type == "cpu":
            return None
        torch.accelerator.empty_cache()
        self._weighed.step(point)
        return int(torch.accelerator.memory_reserved(self._device))


def work(task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Do what each message asks for, until there are no more."""
    worker = Worker(Task(**task))
    for command, arguments in messages():
        yield getattr(worker, command)(**arguments)
