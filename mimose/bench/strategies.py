"""Training a workload under one strategy, each step measured the same way."""

from __future__ import annotations

import time

import torch

from mimose.bench.corpus import EncodedCorpus
from mimose.bench.limits import limit_memory
from mimose.bench.machine import describe_machine, load_average
from mimose.bench.rows import StepRow
from mimose.bench.step_meter import StepMeter
from mimose.bench.tasks import Task
from mimose.bench.workloads import (
    Batch,
    evaluate,
    iterate_batches,
    make_model,
    make_optimizer,
)
from mimose.planners import Planner, Static
from mimose.session import Session, attach

_LENGTH = "input_ids.1"


class Training:
    """A model in training under one strategy.

    Args:
        task: What to train, and how.

    Raises:
        OSError: The system cannot tell a process's peak (see `ProcessMeter`).
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._corpus = EncodedCorpus.load(task.corpus)
        self._batches = list(iterate_batches(task.workload, self._corpus, task.steps))
        self._model = make_model(task.workload, self._corpus)
        self._optimizer, self._schedule = make_optimizer(
            task.workload, self._model, task.steps
        )
        self._meter = StepMeter()
        self._machine = describe_machine()
        self._n_steps = 0
        self._warm_up()
        self._session = self._attach()
        torch.manual_seed(task.workload.seed)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each batch's longest member."""
        return tuple(batch.length for batch in self._batches)

    def advance(self, index: int, *, evaluates: bool = False) -> StepRow:
        """Train on one batch.

        Args:
            index: Which of the batches.
            evaluates: Whether to measure held-out accuracy afterwards.

        Raises:
            RuntimeError: Memory ran out.
        """
        batch = self._batches[index]
        start_bytes = self._meter.begin_step()
        if self._task.is_limited and self._task.budget_bytes is not None:
            limit_memory(self._task.budget_bytes, start_bytes)
        began = time.perf_counter()
        loss = self._train_on(batch)
        seconds = time.perf_counter() - began
        peak_bytes = self._meter.step_peak_bytes()
        accuracy = evaluate(self._model, self._corpus) if evaluates else None
        row = self._row(batch, start_bytes, peak_bytes, seconds, loss, accuracy)
        self._n_steps += 1
        return row

    def close(self) -> None:
        """Give the model back as it was."""
        if self._session is not None:
            self._session.detach()

    def _warm_up(self) -> None:
        """Start the threads and fill the caches that a first step would pay for."""
        with torch.random.fork_rng(devices=[]):
            shortest = min(self._batches, key=lambda batch: batch.length)
            _, loss = self._model(**shortest.as_inputs())
            loss.backward()
        self._optimizer.zero_grad(set_to_none=True)

    def _attach(self) -> Session | None:
        if self._task.strategy == "none":
            return None
        assert self._task.budget_bytes is not None
        planners: dict[str, str | Planner] = {
            "full": "full",
            "static": Static(shape={_LENGTH: max(self.lengths)}),
            "mimose": "auto",
        }
        return attach(
            self._model,
            self._task.budget_bytes,
            planner=planners[self._task.strategy],
            meter=self._meter,
        )

    def _train_on(self, batch: Batch) -> float:
        _, loss = self._model(**batch.as_inputs())
        loss.backward()
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def _row(
        self,
        batch: Batch,
        start_bytes: int,
        peak_bytes: int,
        seconds: float,
        loss: float,
        accuracy: float | None,
    ) -> StepRow:
        task = self._task
        record = None if self._session is None else self._session.records[-1]
        return StepRow(
            run=task.run,
            strategy=task.strategy,
            step=self._n_steps,
            phase="" if record is None else record.phase,
            texts=batch.size,
            length=batch.length,
            start_bytes=start_bytes,
            peak_bytes=peak_bytes,
            predicted_peak_bytes=None
            if record is None
            else record.predicted_peak_bytes,
            budget_bytes=task.budget_bytes,
            limit_bytes=task.budget_bytes if task.is_limited else None,
            seconds=seconds,
            plan_seconds=0.0 if record is None else record.plan_seconds,
            cache_hit=False if record is None else record.cache_hit,
            recomputed_flops=0 if record is None else record.recomputed_flops,
            retries=0 if record is None else record.retries,
            loss=loss,
            accuracy=accuracy,
            load_average=load_average(),
            seed=task.workload.seed,
            date=task.date,
            threads=task.threads,
            **self._machine,
        )
