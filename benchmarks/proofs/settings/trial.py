"""One setting, trained bare and within a budget."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.proofs.common import AMPLE_BYTES
from benchmarks.proofs.loop import differing
from benchmarks.proofs.numbers import quantile
from benchmarks.proofs.settings.case import Outcome, Setting, Training, World
from mimose.bench.step_meter import budget_meter
from mimose.exceptions import MimoseError
from mimose.records import StepRecord
from mimose.session import Session, attach

_SHARE, _OVER_LEAST = 0.5, 1.1
"""Where the budget lies between the least and the most that the longest reserves, and
how far above the least it is at any rate: other shapes may reserve more."""
_FOUND = ("least_bytes", "most_bytes", "budget_bytes", "peak_bytes", "left_bytes")
_MOST_SAID = 2_000
"""Characters of messages in a row."""


class Trial:
    """A setting's two runs, and the row that comes of them."""

    def __init__(self, setting: Setting, task: Mapping[str, Any]) -> None:
        self._setting = setting
        self._device = torch.device(task["device"])
        self._seed = int(task["seed"])
        self._steps = int(task["steps"])
        self._losses: list[Tensor] = []
        self._records: list[StepRecord] = []
        self._found: dict[str, Any] = {}

    def needs(self) -> tuple[int, int] | None:
        """Return what the longest batch reserves at the least, and at the most.

        None where it cannot be trained so; the run itself will tell why.
        """
        try:
            return self._probe("full"), self._probe("none")
        except Exception:  # whatever it is, it comes again
            return None

    def run(self, needs: tuple[int, int] | None) -> dict[str, Any]:
        """Return a row's own columns."""
        said = _Log()
        logger = logging.getLogger("mimose")
        logger.addHandler(said)
        least, most = needs or (AMPLE_BYTES, AMPLE_BYTES)
        budget = int(max(least + _SHARE * (most - least), _OVER_LEAST * least))
        if needs is not None:
            self._found = {
                "least_bytes": least,
                "most_bytes": most,
                "budget_bytes": budget,
            }
        try:
            before = self._requested()
            actual = self._under(budget)
            own_bytes = self._requested() - before
            message = "\n".join(said.lines)
            expected = self._bare()  # behind it, so that nothing lies in its way
            bare_bytes = self._requested() - before - own_bytes
            self._found["left_bytes"] = own_bytes - bare_bytes
            different = differing(expected, actual)
        except Exception as error:  # whatever it is, it is what this setting gets
            kind = type(error).__name__
            outcome: Outcome = "refused" if isinstance(error, MimoseError) else "error"
            return self._row(outcome, f"{kind}: {error}", None)
        finally:
            logger.removeHandler(said)
            gc.collect()
        has_plan = any(record.phase == "plan" for record in self._records)
        outcome = "planned" if has_plan else "recomputed"
        return self._row(outcome, message, different)

    def died(self, message: str) -> dict[str, Any]:
        """Return the columns of a run that ended its process."""
        return self._row("error", message, None)

    # -------------------------------------------------------------- the runs

    def _build(self) -> tuple[World, Training]:
        gc.collect()
        _seed(self._seed)
        world = World(str(self._device), self._seed + 1)
        training = self._setting.build(world)
        for module in training.roots:
            module.train()
        _seed(self._seed + 2)
        return world, training

    def _lengths(self, training: Training) -> list[int]:
        generator = torch.Generator().manual_seed(self._seed + 3)
        least, most = training.lengths
        n_sizes = (most - least) // training.multiple
        drawn = torch.randint(n_sizes + 1, (self._steps,), generator=generator)
        return [least + training.multiple * number for number in drawn.tolist()]

    def _requested(self) -> int:
        gc.collect()
        if self._device.type == "cpu":
            return 0
        # Allocated bytes differ with the blocks that a step happened to get.
        return int(torch.accelerator.memory_stats()["requested_bytes.all.current"])

    def _bare(self) -> dict[str, Tensor]:
        world, training = self._build()
        losses = [training.step(length).cpu() for length in self._lengths(training)]
        return _all(world, training, losses)

    def _probe(self, planner: str) -> int:
        """Return the most that a later step of the longest batch reserves."""
        _, training = self._build()
        meter = budget_meter(self._device)
        with _attached(training, AMPLE_BYTES, planner=planner, meter=meter):
            for _ in range(training.steps_before):
                training.step(training.lengths[1])
            meter.resting_bytes()
            meter.begin_step()
            training.step(training.lengths[1])
            return meter.step_peak_bytes()

    def _under(self, budget_bytes: int) -> dict[str, Tensor]:
        world, training = self._build()
        lengths = self._lengths(training)
        losses: list[Tensor] = []
        with _attached(training, budget_bytes) as sessions:
            try:
                for step, length in enumerate(lengths):
                    training.between(step, sessions)
                    losses.append(training.step(length).cpu())
            finally:
                self._records = [r for session in sessions for r in session.records]
                summaries = [session.summary() for session in sessions]
                self._found["peak_bytes"] = max(s.peak_bytes for s in summaries)
                self._found["units"] = sum(s.units for s in summaries)
                self._losses = losses
        return _all(world, training, losses)

    # -------------------------------------------------------------- the row

    def _row(
        self, outcome: Outcome, message: str, different: Sequence[str] | None
    ) -> dict[str, Any]:
        records, setting = self._records, self._setting
        planned = [record for record in records if record.phase == "plan"]
        reasons = Counter(record.reason for record in records if record.reason)
        phases = Counter(record.phase for record in records)
        return {
            **dict.fromkeys(_FOUND),
            "units": 0,
            **self._found,
            "setting": setting.name,
            "what": setting.what,
            "outcome": outcome,
            "expected": setting.expects,
            "says": setting.says,
            "message": message[:_MOST_SAID],
            "reasons": json.dumps(reasons),
            "steps": len(self._losses),
            "records": len(records),
            "phases": json.dumps(phases),
            "first_plan": min((record.step for record in planned), default=None),
            "planned": len(planned),
            "mixed": sum(0 < r.n_recomputed < len(r.actions) for r in planned),
            "recomputed": sum(record.n_recomputed for record in records),
            "calls": sum(len(record.actions) for record in records),
            "retries": sum(record.retries for record in records),
            "over": sum(record.is_over for record in records),
            "is_equal": None if different is None else not different,
            "different": json.dumps(different or []),
            "cached_plan_seconds": _median(planned, cache_hit=True),
            "new_plan_seconds": _median(planned, cache_hit=False),
        }


class _Log(logging.Handler):
    """Keeps what is said."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def _attached(
    training: Training, budget_bytes: int, **options: Any
) -> Iterator[list[Session]]:
    """Attach a session to each root."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                attach(root, budget_bytes, **{**training.options, **options})
            )
            for root in training.roots
        ]


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - some settings draw from the global one
    torch.manual_seed(seed)


def _all(
    world: World, training: Training, losses: Sequence[Tensor]
) -> dict[str, Tensor]:
    gradients = enumerate(world.gradients)
    return {
        **{f"loss {step}": loss for step, loss in enumerate(losses)},
        **{f"gradient {index}": gradient for index, gradient in gradients},
        **{f"weight {name}": tensor for name, tensor in training.state().items()},
        "random state": torch.get_rng_state(),
    }


def _median(records: Sequence[StepRecord], *, cache_hit: bool) -> float | None:
    return quantile([r.plan_seconds for r in records if r.cache_hit == cache_hit], 0.5)
