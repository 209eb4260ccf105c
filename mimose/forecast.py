"""Predicts what a step would take, before it runs: `Session.forecast`.

Note: [As the next step begins]
A plan depends on what is held when its step begins. A sampler asks for forecasts
between steps, in the middle of an accumulation window, or before the first step. So a
forecast subtracts gradients that are held now and freed before the next step, and adds
those that a later step of a window finds. Before an optimizer of the model has stepped,
its state does not exist yet: then what was held at the start of the steps of a loaded
state counts, if it is more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from cachetools import LRUCache

from mimose.arguments import check_shape
from mimose.budget import format_bytes
from mimose.cost.problem import Memory, step_work
from mimose.cost.trust import extrapolation_ratio, why_unknown
from mimose.exceptions import InfeasibleBudgetError
from mimose.inputs.describe import Describer
from mimose.inputs.size_table import SizeTable
from mimose.loss_by_rows import LossChoice
from mimose.planners import Plan
from mimose.policy.plans import CachedPlan, Plans
from mimose.runtime.budget import SessionBudget
from mimose.runtime.last_steps import LastSteps
from mimose.runtime.seconds import StepSeconds
from mimose.runtime.step import Steps
from mimose.types import BY_ROWS, StepInput

Work: TypeAlias = tuple[float, float, float]
"""What `step_work` returns."""

_ROUNDINGS_PER_BUDGET = 2048
"""Held bytes are rounded up to this fraction of the budget, so that small changes find
the cached forecast."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The predicted memory and time of a step of one shape, if it began now."""

    shape: Mapping[str, int]
    """All sizes that vary, by name."""
    budget_bytes: int
    """The budget of the forecast."""
    extrapolation: float
    """Relative distance beyond the measured sizes: 0 inside, 0.5 for half as large
    again, infinite if nothing was measured with such inputs."""
    fits: bool | None = None
    """Whether a plan keeps the budget with the safety margin. None if that cannot be
    predicted yet: the step would recompute and measure everything."""
    why_not: str | None = None
    """Why the step does not fit, or why that is not known; None if it fits."""
    peak_bytes: float | None = None
    """The predicted peak in the same unit as `StepRecord.predicted_peak_bytes`. If no
    plan fits, the peak of the plan with the lowest one. None if not known."""
    plan: Plan | None = None
    """The plan that the step would run; None if none fits or is known."""
    seconds: float | None = None
    """Seconds for forward and backward under the plan, of the host where it is slower
    than the device, with the step's share of the optimizer step, and with what a shape
    takes that the process never had; None if not known."""
    extra_seconds: float | None = None
    """The part of these seconds that the plan adds; None if not known."""
    first_seconds: float = 0.0
    """The part that goes to the shape's first time; 0 if the process has had it."""

    @property
    def settled_seconds(self) -> float | None:
        """The seconds of a later step at the shape; None if not known."""
        return None if self.seconds is None else self.seconds - self.first_seconds


class Forecasts:
    """Makes forecasts, and caches the last ones.

    Args:
        last_steps: The steps that a shape refers to.
        plans: Makes plans.
        budget: The session's budget.
        seconds: Predicts seconds.
        losses: Chooses how losses are computed.
        steps: Says whether a step has run.
        describer: Knows the gradients.
    """

    def __init__(
        self,
        last_steps: LastSteps,
        plans: Plans,
        budget: SessionBudget,
        seconds: StepSeconds,
        losses: LossChoice,
        steps: Steps,
        describer: Describer,
    ) -> None:
        self._last, self._plans, self._budget = last_steps, plans, budget
        self._seconds, self._losses = seconds, losses
        self._steps, self._describer = steps, describer
        self._known: LRUCache[Hashable, tuple[Forecast, Work | None]] = LRUCache(4096)
        self._largest: LRUCache[Hashable, int] = LRUCache(4096)

    def ask(
        self,
        shape: Mapping[str, int] | None,
        budget: float | str | None,
        accumulating: bool | None,
    ) -> Forecast:
        """Return the forecast of a step; see `Session.forecast`."""
        n_bytes = self._read(budget)
        step_input, table, memory = self._begins(shape, n_bytes, accumulating)
        key = self._key(step_input, memory), n_bytes
        found = self._known.get(key)
        if found is None:
            found = self._forecast(step_input, table, memory, n_bytes)
            self._known[key] = found
        forecast, work = found
        rates = self._seconds.rates(step_input.context)
        if work is None or rates is None:
            return forecast
        seconds, _, extra = rates.parts(*work)
        is_new = self._seconds.is_new(step_input)
        first = rates.first[bool(work[-1])] if is_new else 0.0
        return replace(
            forecast,
            seconds=seconds + first,
            extra_seconds=extra,
            first_seconds=first,
        )

    def largest(
        self,
        shape: Mapping[str, int],
        dim: str,
        budget: float | str | None,
        limit: int | None,
        accumulating: bool | None,
    ) -> int:
        """Return the largest size with which a step fits; see `Session.largest`."""
        check_shape("shape", shape)
        step_input, table, memory = self._begins(
            {**shape, dim: 1}, self._read(budget), accumulating
        )
        key = self._key(step_input, memory), dim, limit
        found = self._largest.get(key)
        if found is not None:
            return found

        def fits(size: int) -> bool:
            own, _ = self._last.asked({**shape, dim: size})
            own = own._replace(has_gradients=step_input.has_gradients)
            known, usable = self._usable(own, table, memory)
            if usable is None:
                return False
            least = self._plans.least_plan(known, memory, usable)
            return _peak_bytes(least, memory) <= usable

        found = self._largest[key] = _last(fits, limit)
        return found

    # ------------------------------------------------------------------ one shape

    def _read(self, budget: float | str | None) -> int:
        return self._budget.n_bytes if budget is None else self._budget.read(budget)

    def _begins(
        self,
        shape: Mapping[str, int] | None,
        budget_bytes: int,
        accumulating: bool | None,
    ) -> tuple[StepInput, SizeTable, Memory]:
        """Return a step, the names of its sizes, and the memory as it begins."""
        step_input, table = self._last.asked(shape)
        if accumulating is None:
            accumulating = self._last.accumulate
        memory = self._memory_to_come(has_gradients=accumulating)
        more = budget_bytes - self._budget.n_bytes
        more_level = more / memory.reserved_ratio
        grain = budget_bytes / _ROUNDINGS_PER_BUDGET
        memory = memory._replace(
            start_bytes=math.ceil(memory.start_bytes / grain) * grain,
            budget_bytes=math.floor((memory.budget_bytes + more_level) / grain) * grain,
        )
        return step_input._replace(has_gradients=accumulating), table, memory

    def _memory_to_come(self, *, has_gradients: bool) -> Memory:
        """Return the memory at the start of the next step, as far as it is known.

        Args:
            has_gradients: Whether gradients are there when it begins.
        """
        there, to_be = self._describer.gradient_bytes()
        start = self._budget.live_bytes() - there
        if not self._budget.has_optimizer_state():
            start = max(start, self._last.start_bytes)
        return self._budget.memory_at(start + to_be if has_gradients else start)

    def _key(self, step_input: StepInput, memory: Memory) -> Hashable:
        known = self._plans.learner.model.version, self._steps.n_begun > 0
        return step_input, memory, known, round(self._plans.margin.share, 3)

    def _usable(
        self, step_input: StepInput, table: SizeTable, memory: Memory
    ) -> tuple[StepInput, float | None]:
        """Return a known step that predicts this one, and its limit in bytes.

        A step with a plain loss is an upper bound for one whose loss goes by rows. A
        step that creates its gradients is an upper bound for one that finds them.

        Returns:
            The step, and the highest level that its prediction may reach; None if no
            known step predicts it.
        """
        learner, plans = self._plans.learner, self._plans
        contexts = [step_input.context]
        if "+" not in step_input.context:
            base = step_input.context.removesuffix(BY_ROWS)
            n_labels = table.n_elements(step_input.sizes, "labels")
            plain, budget_bytes = (
                step_input._replace(context=base),
                self._budget.n_bytes,
            )
            contexts = self._losses.contexts(plain, n_labels, memory, budget_bytes)
        likes = [
            step_input._replace(context=context, has_gradients=has_gradients)
            for context in contexts
            for has_gradients in dict.fromkeys((step_input.has_gradients, False))
        ]
        if all(why_unknown(learner.model, like) for like in likes):
            learner.worker.catch_up()
        is_first = not self._steps.n_begun
        for like in likes:
            if not why_unknown(learner.model, like):
                return like, plans.usable_bytes(like, memory, is_first=is_first)
        return likes[0], None

    def _forecast(
        self, step_input: StepInput, table: SizeTable, memory: Memory, budget_bytes: int
    ) -> tuple[Forecast, Work | None]:
        """Return a forecast without seconds, and the work that decides them."""
        known, usable = self._usable(step_input, table, memory)
        model, plans = self._plans.learner.model, self._plans
        is_new = known.context not in model.patterns
        forecast = Forecast(
            shape=table.named(step_input.sizes),
            budget_bytes=budget_bytes,
            extrapolation=math.inf if is_new else extrapolation_ratio(model, known),
        )
        if usable is None:
            return replace(forecast, why_not=why_unknown(model, known)), None
        try:
            made = plans.peek(known, memory) or plans.make(known, memory, usable)
        except InfeasibleBudgetError:
            made = plans.least_plan(known, memory, usable)
        peak = _peak_bytes(made, memory)
        if peak <= usable:
            forecast = replace(forecast, fits=True, peak_bytes=peak, plan=made.plan)
            return forecast, step_work(model, known, made.plan.actions)
        share, most = plans.margin.share, format_bytes(usable)
        why_not = (
            f"even the best plan ({made.plan.planner}) is predicted to reach "
            f"{format_bytes(peak)}, and with the safety margin of {share:.1%} it may "
            f"reach at most {most}"
        )
        return replace(forecast, fits=False, peak_bytes=peak, why_not=why_not), None


def _peak_bytes(made: CachedPlan, memory: Memory) -> float:
    return memory.start_bytes + made.growth.bytes(memory.released_bytes)


def _last(fits: Callable[[int], bool], most: int | None) -> int:
    """Return the largest size up to `most` that fits; 0 if none does."""
    low, high = 0, 1
    while (most is None or high <= most) and fits(high):
        low, high = high, 2 * high
    high = high if most is None else min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
