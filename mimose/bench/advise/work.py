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
from mimose.measure.meters import Meter
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
    """A method, built anew for each turn."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._method = METHODS[task.method]
        self._device = torch.device(task.device)
        self._learned: Mapping[str, Any] | None = None
        self._weighed: Training | None = None
        self._shapes: dict[Point, Mapping[str, int]] = {}
        self._budget_bytes: int | None = None
        torch.set_num_threads(task.threads)

    def begin(self, budget_bytes: int | None) -> dict[str, Any]:
        """Build the model to be weighed; say why that cannot be, if it cannot.

        Args:
            budget_bytes: For methods that plan; None if it is not known yet.
        """
        self._budget_bytes = budget_bytes
        torch.manual_seed(self._task.seed)
        model, sample = make(self._task.source)
        why_not = self._method.why_not(model, self._device.type)
        if why_not:
            return {"why_not": why_not}
        meter = budget_meter if self._method.plans else step_meter
        self._meter = meter(self._device)
        try:
            self._weighed = self._training(model, sample, self._meter)
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

    def weigh(self, batch: int, length: int | None = None) -> dict[str, Any]:
        """Return what a step reaches, in bytes, and takes, in seconds."""
        assert self._weighed is not None
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

    def learn(self, points: Sequence[Sequence[Any]], passes: int) -> dict[str, Any]:
        """Let a session that plans learn from steps of these sizes."""
        assert self._weighed is not None
        self._teach(self._weighed, [Point(*each) for each in points], passes)
        return {}

    def foretell(self, points: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Return what plans for batches of these sizes cost."""
        assert self._weighed is not None
        session = self._weighed.session
        assert session is not None
        wanted = [Point(*each) for each in points]
        return {"table": foretell(session, self._shapes, wanted)}

    def time(
        self, points: Sequence[Sequence[Any]], passes: int, budget_bytes: int
    ) -> dict[str, Any]:
        """Return the seconds of one step at each of these sizes, in a turn.

        Args:
            points: Each a batch size, a length or None, and how many steps to time.
            passes: Over all sizes, to learn in a first turn.
            budget_bytes: For methods that plan.
        """
        self._budget_bytes = budget_bytes
        torch.manual_seed(self._task.seed)
        model, sample = make(self._task.source)
        training = self._training(model, sample, None)
        sizes = [Point(*each[:2]) for each in points]
        try:
            if self._method.plans and training.session is not None:
                if self._learned is None:
                    self._teach(training, sizes, passes)
                    self._learned = training.session.state_dict()
                else:
                    training.session.load_state_dict(self._learned)
            training.step(sizes[0])
            seconds = []
            for point, (_, _, n_steps) in zip(sizes, points, strict=True):
                training.step(point)
                seconds.append([training.step(point) for _ in range(n_steps)])
        finally:
            training.close()
            del training, model
            gc.collect()
            if self._device.type != "cpu":
                torch.accelerator.empty_cache()
        return {"seconds": seconds}

    def _teach(self, training: Training, points: Sequence[Point], passes: int) -> None:
        """Train on all sizes so many times, and note the shapes that they have."""
        assert training.session is not None
        for _ in range(passes):
            for point in points:
                training.step(point)
                self._shapes[point] = training.session.records[-1].shape

    def _training(self, model: Any, sample: Any, meter: Meter | None) -> Training:
        task = self._task
        return Training(
            model,
            sample,
            self._method,
            device=self._device,
            optimizer=task.optimizer,
            dtype=task.dtype,
            budget_bytes=self._budget_bytes if self._method.plans else None,
            meter=meter,
        )

    def _reserved(self, point: Point) -> int | None:
        """Return what the allocator reserves for a step, beginning with free blocks."""
        if self._device.type == "cpu":
            return None
        assert self._weighed is not None
        torch.accelerator.empty_cache()
        self._weighed.step(point)
        return int(torch.accelerator.memory_reserved(self._device))


def work(task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Do what each message asks for, until there are no more."""
    worker = Worker(Task(**task))
    for command, arguments in messages():
        yield getattr(worker, command)(**arguments)
