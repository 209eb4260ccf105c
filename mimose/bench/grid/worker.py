"""Trains one workload under one strategy in a child process, a step at a time.

The task of the `Child` is a `Task`, and its messages are methods of `Worker`
(``probe``, ``step``, ``rest``, ``count``) with their arguments.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from mimose.bench.child import RunFailedError
from mimose.bench.grid.strategies import STRATEGIES, Setup
from mimose.bench.grid.traces import Sizes
from mimose.bench.grid.workloads import largest, workload_named
from mimose.bench.machine import kernel_bytes, limit_memory
from mimose.bench.serve import messages
from mimose.bench.step_meter import RunningStep, autocast, step_meter
from mimose.bench.zoo import moved
from mimose.memory.out_of_memory import is_out_of_memory
from mimose.session import attach

_UNLIMITED = 2**50
_PROBES = 3
_SMALLEST = 3
"""Number of the shortest batches with which the process warms up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What one process trains."""

    workload: str
    """A name, or ``module:function``."""
    strategy: str
    scale: str
    sizes: Sequence[Sizes]
    """The sizes of the batches, in order."""
    longest: Sizes | None
    """The sizes of the batch that needs most memory; None if not known yet."""
    headroom_bytes: int | None
    """The budget for a step's growth; None for no limit."""
    is_limited: bool = False
    """Whether the system enforces it; on a CPU."""
    seed: int
    device: str
    dtype: str
    """``"float32"``, or ``"bfloat16"`` for autocast."""
    threads: int
    shared: str
    """A folder for files that all processes share."""


class Worker:
    """A model in training under one strategy."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._workload = workload_named(task.workload)
        self._workload.prepare(Path(task.shared))
        self._device = torch.device(task.device)
        torch.set_num_threads(task.threads)
        torch.manual_seed(task.seed)
        self._model = self._workload.build(task.scale).to(self._device)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=self._workload.learning_rate, fused=True
        )
        self._meter = step_meter(self._device)
        self._warm_up()
        self._headroom = (
            _UNLIMITED if task.headroom_bytes is None else task.headroom_bytes
        )
        setup = Setup(
            model=self._model,
            device=self._device,
            meter=self._meter,
            headroom_bytes=self._headroom,
            sizes=task.sizes,
            longest=task.longest or largest(task.sizes)[0],
            try_step=self._try,
            shared=Path(task.shared),
        )
        self._applied = STRATEGIES[task.strategy].apply(setup)
        budget_bytes = self._applied.budget_bytes
        self._base_bytes = (
            None if budget_bytes is None else budget_bytes - self._headroom
        )
        torch.manual_seed(task.seed)
        self.rest()

    def probe(self) -> dict[str, Any]:
        """Measure the growth of a step on the longest batch, and return both.

        Raises:
            RunFailedError: Memory runs out.
        """
        known = self._task.longest
        candidates = largest(self._task.sizes) if known is None else [known]
        growths = [self._growth(sizes) for sizes in candidates]
        torch.manual_seed(self._task.seed)
        self.rest()
        return {
            "growth_bytes": max(growths),
            "longest": candidates[growths.index(max(growths))],
            "private_bytes": kernel_bytes("/proc/self/status", "RssAnon"),
        }

    def _growth(self, sizes: Sizes) -> int:
        growths = []
        for _ in range(_PROBES):
            start = self._meter.settled_bytes(0)
            step = RunningStep(self._meter, self._device)
            if not self._fits(sizes):
                msg = (
                    f"memory runs out on the longest batch, {json.dumps(sizes)}: "
                    f"choose a smaller scale, or shorter lengths"
                )
                raise RunFailedError(msg)
            growths.append(step.end().peak_bytes - start)
        return min(growths)

    def _fits(self, sizes: Sizes) -> bool:
        """Try a forward and backward; return whether memory sufficed."""
        try:
            self._try(sizes)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._optimizer.zero_grad(set_to_none=True)
        else:
            return True
        self.rest()  # the error and its frames are freed here
        return False

    def step(self, index: int) -> dict[str, Any]:
        """Train on the next batch; return fields of `GridRow`.

        Call it for all steps in their order.
        """
        sizes = self._task.sizes[index]
        batch = self._batch(index, sizes)
        start = self._meter.settled_bytes(0)
        if self._base_bytes is None:
            self._base_bytes = start
        if self._task.is_limited:
            limit_memory(self._base_bytes + self._headroom, start)
        step = RunningStep(self._meter, self._device)
        self._applied.before_step(sizes)
        loss = self._forward(batch)
        torch.autograd.backward(loss)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        measured = step.end()
        facts = self._applied.facts()
        is_last = index == len(self._task.sizes) - 1
        return {
            "sizes": json.dumps(sizes),
            "phase": facts.phase,
            "plan": facts.plan,
            "base_bytes": self._base_bytes,
            "start_bytes": start,
            "peak_bytes": measured.peak_bytes,
            "reserved_bytes": self._reserved(measured.peak_bytes),
            "predicted_growth_bytes": facts.predicted_growth_bytes,
            "seconds": measured.seconds,
            "plan_seconds": facts.plan_seconds,
            "cache_hit": facts.cache_hit,
            "recomputed_flops": facts.recomputed_flops,
            "retries": facts.retries,
            "loss": float(loss.detach()),
            "accuracy": self._workload.evaluate(self._model) if is_last else None,
        }

    def count(self, index: int, phase: str) -> dict[str, Any]:
        """Count the FLOPs of a forward and backward in a phase of the strategy."""
        sizes = self._task.sizes[index]
        batch = self._batch(index, sizes)
        self._applied.phase_of(phase)
        self._applied.before_step(sizes)
        with FlopCounterMode(display=False) as counter:
            torch.autograd.backward(self._forward(batch))
        self._optimizer.zero_grad(set_to_none=True)
        self.rest()
        return {"flops": counter.get_total_flops()}

    def rest(self) -> dict[str, Any]:
        """Free cached blocks before other strategies' turns on the same device."""
        if self._device.type != "cpu":
            torch.accelerator.empty_cache()
        return {}

    def close(self) -> None:
        """Restore the model."""
        self._applied.close()

    def _warm_up(self) -> None:
        """Start the threads, make the optimizer's state, and fill libraries' caches.

        This includes the longest batch, kept (if possible) and recomputed, so that each
        strategy begins with the memory that either leaves resident.
        """
        longest = largest(self._task.sizes)
        shortest = sorted(self._task.sizes, key=lambda each: sum(each.values()))
        for index, sizes in enumerate(shortest[:_SMALLEST]):
            batch = self._batch(index, sizes)
            torch.autograd.backward(self._forward(batch))
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        for sizes in longest:
            self._fits(sizes)
        with attach(self._model, _UNLIMITED, planner="full", meter=self._meter):
            for sizes in longest:
                self._try(sizes)

    def _try(self, sizes: Mapping[str, int]) -> None:
        torch.autograd.backward(self._forward(self._batch(0, sizes)))
        self._optimizer.zero_grad(set_to_none=True)

    def _batch(self, index: int, sizes: Mapping[str, int]) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self._task.seed * 100_003 + index)
        batch = self._workload.batch(sizes, self._task.scale, generator)
        return moved(batch, self._device)

    def _forward(self, batch: Mapping[str, Any]) -> torch.Tensor:
        with autocast(self._device, self._task.dtype):
            output = self._model(**batch)
        loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
        return loss

    def _reserved(self, peak: int) -> int:
        if self._device.type == "cpu":
            return peak
        return int(torch.accelerator.max_memory_reserved(self._device))


def work(task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Build the worker, then answer messages until there are no more."""
    worker = Worker(Task(**task))
    yield {"ready": True}
    for command, arguments in messages():
        yield getattr(worker, command)(**arguments)
    worker.close()
