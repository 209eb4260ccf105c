"""Who holds the current cost model."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mimose.learn.measured_step import with_step
from mimose.learn.model import CostModel
from mimose.learn.seconds import Timings
from mimose.learn.timed_step import tell
from mimose.types import (
    Context,
    CostOf,
    Measured,
    StepInput,
    StepSample,
    TimedEvent,
)


class Learner:
    """The current cost model; the methods below replace it, and nobody else.

    Whoever reads takes `model` once and reads that, from any thread.

    Args:
        model: To begin with.

    Attributes:
        model: What is known now.
    """

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self._timings = Timings()
        self._lock = threading.Lock()

    def absorb(
        self,
        facts: StepInput,
        events: Sequence[Measured],
        sample: StepSample,
        released_bytes: float,
        calls: tuple[int, ...],
    ) -> None:
        """Take in one measured step; the arguments are those of `with_step`."""
        with self._lock:
            self.model = with_step(
                self.model, facts, events, sample, released_bytes, calls
            )

    def absorb_cost(self, cost_of: CostOf, flops: int) -> None:
        """Take in the FLOPs of one call's action, as it stopped early."""
        with self._lock:
            self.model = self.model.with_cost(*cost_of, float(flops))

    def absorb_seconds(
        self,
        facts: StepInput,
        events: Mapping[tuple[int, int], TimedEvent],
        *,
        is_measured: bool = False,
    ) -> None:
        """Take in how long the calls of a step took longer than if they were kept.

        Args:
            facts: What was known of the step before it ran.
            events: By unit and call, the action and its times.
            is_measured: Whether all that their forwards did was counted as well.
        """
        with self._lock:
            model, timings = self.model, self._timings
            if facts.context not in model.patterns or not events:
                return
            if not (is_measured or timings.is_due()):
                return
            tell(timings, model, facts, events, has_forwards=not is_measured)
            is_other = timings.look()
            if timings.seconds is model.seconds:
                return
            timings.keep(model.families)
            if is_other and model.plans_by_seconds:
                self.model = model.distrusted(seconds=timings.seconds)
            else:
                self.model = model.changed(seconds=timings.seconds)

    def absorb_growth(self, growth_bytes: float) -> None:
        """Take in how large a step is, or could be."""
        with self._lock:
            self.model = self.model.grown(growth_bytes)

    def use(self, context: Context) -> None:
        """Take note that a context is used; the least recently used go first."""
        patterns = self.model.patterns
        if context in patterns and context != next(reversed(patterns)):
            self.model = self.model.used(context)

    def miss(self, facts: StepInput) -> None:
        """Take note of a step, not measured, in which more ran than was planned for.

        Args:
            facts: The step's, with what it called.
        """
        with self._lock:
            self.model = self.model.missing(facts)

    def restrict(self, unit: int, actions: Iterable[str]) -> None:
        """Let a unit run under some actions only, from now on."""
        with self._lock:
            self.model = self.model.restricted(unit, actions)

    def distrust_plans(self) -> None:
        """Make every plan made so far invalid, as after a step over the budget."""
        with self._lock:
            self.model = self.model.distrusted()

    def state_dict(self) -> dict[str, Any]:
        """Return all that was learned, ready for JSON."""
        return {**self.model.state_dict(), "seconds": self._timings.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over all that another one learned, in place of what is here.

        Args:
            state: What ``state_dict`` returned.
        """
        with self._lock:
            self._timings.load_state_dict(state.get("seconds", ()))
            seconds = self._timings.seconds
            self.model = replace(self.model.loaded(state), seconds=seconds)
