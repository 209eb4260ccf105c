"""One method's memory, in a process of its own.

The task is a `Task`. Messages are ``[name, arguments]`` of the methods of `Worker`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from mimose.bench.advise.foretold import foretell
from mimose.bench.advise.methods import METHODS, compares_samples
from mimose.bench.advise.source import make
from mimose.bench.advise.task import Task, training_of
from mimose.bench.advise.training import Point
from mimose.bench.machine import available_bytes
from mimose.bench.serve import messages
from mimose.bench.step_meter import RunningStep, budget_meter, step_meter
from mimose.exceptions import MimoseError, first_line
from mimose.measure.out_of_memory import is_out_of_memory
from mimose.usage import UsageError

_SETTLING = 2
"""Steps before the first one counts: caches fill, layers find out how to rebuild."""
_PLANNING = 3
"""Steps of each size until a session has measured it twice, and plans."""


class Worker:
    """A method whose memory is measured, with one model from `begin` on."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._method = METHODS[task.method]
        self._device = torch.device(task.device)
        meter = budget_meter if self._method.plans else step_meter
        self._meter = meter(self._device)
        self._shapes: Mapping[Point, Mapping[str, int]] = {}
        self._to_settle = _SETTLING
        torch.set_num_threads(task.threads)

    def begin(self) -> dict[str, Any]:
        """Build the model to be weighed; say why that cannot be, if it cannot."""
        torch.manual_seed(self._task.seed)
        try:
            why_not = self._build()
        except UsageError as error:
            why_not = str(error)
        except MimoseError as error:
            why_not = first_line(error)
        except Exception as error:  # the user's model, whatever it is
            why_not = f"{type(error).__name__}: {first_line(error)}"
        if why_not:
            return {"why_not": why_not}
        return {
            "why_not": "",
            "batch": self._weighed.sample.batch,
            "length": self._weighed.sample.length,
            "available_bytes": available_bytes(),
            "total_bytes": self._meter.total_bytes(),
            "held_bytes": self._meter.settled_bytes(0),
            "alters": self._alters,
        }

    def _build(self) -> str:
        """Make what is trained; return why the method cannot be had, or nothing."""
        model, sample = make(self._task.source)
        parameters = list(model.parameters())
        if not any(each.requires_grad for each in parameters):
            return "the model has no parameter that is trained"
        if any(each.is_meta for each in parameters):
            return "the model is on the meta device: give one with weights"
        why_not = self._method.why_not(model, self._device.type)
        if why_not:
            return why_not
        self._alters = self._method.mixes and compares_samples(model)
        self._weighed = training_of(self._task, model, sample)
        if not self._method.plans:
            self._weighed.attach(None, self._meter)
        return ""

    def learn(
        self, points: Sequence[Sequence[Any]], passes: int, budget_bytes: int
    ) -> dict[str, Any]:
        """Let a session learn from steps of these sizes; begin the one that plans."""
        wanted = [Point(*each) for each in points]
        try:
            learned, self._shapes = self._weighed.explore(
                wanted,
                passes,
                self._meter,
                self._task.seed,
            )
            self._weighed.attach(budget_bytes, self._meter, refine=False)
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {first_line(error)}"}
        assert self._weighed.session is not None
        self._weighed.session.load_state_dict(learned)
        self._weighed.step(wanted[0])
        return {}

    def foretell(
        self, points: Sequence[Sequence[Any]], most_seconds: float
    ) -> dict[str, Any]:
        """Return what plans for batches of these sizes cost, as many as time allows."""
        session = self._weighed.session
        assert session is not None
        wanted = [Point(*each) for each in points]
        return {"table": foretell(session, self._shapes, wanted, most_seconds)}

    def learned(self) -> dict[str, Any]:
        """Return what the session has learned until now."""
        assert self._weighed.session is not None
        return {"learned": self._weighed.session.state_dict()}

    def notes(self) -> dict[str, Any]:
        """Return what the user should know of how the model is trained."""
        return {"notes": self._weighed.notes()}

    def weigh(self, batch: int, length: int | None = None) -> dict[str, Any]:
        """Return what a step reaches, in bytes, and takes, in seconds."""
        point = Point(batch, length)
        try:
            for _ in range(self._to_settle):
                self._weighed.step(point)
            self._to_settle = _PLANNING if self._method.plans else 1
            self._meter.settled_bytes(0)
            running = RunningStep(self._meter, self._device)
            self._weighed.step(point)
            measured = running.end()
            reserved = self._reserved(point)
        except Exception as error:
            self._weighed.forget()
            if is_out_of_memory(error):
                return {"out_of_memory": True}
            return {"failed": f"{type(error).__name__}: {first_line(error)}"}
        return {
            "peak_bytes": measured.peak_bytes,
            "reserved_bytes": reserved or measured.peak_bytes,
            "seconds": measured.seconds,
        }

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
