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
from typing import TYPE_CHECKING, TypeAlias

from cachetools import LRUCache

from mimose.arguments import check_shape
from mimose.budget import format_bytes
from mimose.cost.problem import Memory, extrapolation_ratio, step_work, why_unknown
from mimose.exceptions import InfeasibleBudgetError, MimoseError
from mimose.planners import Plan
from mimose.policy import CachedPlan
from mimose.runtime.loss_choice import large_logits
from mimose.types import BY_ROWS, StepInput

if TYPE_CHECKING:
    from mimose.inputs.describe import SizeTable
    from mimose.runtime.engine import Engine

Work: TypeAlias = tuple[float, float, float]
"""What `step_work` returns."""

_GRAINS = 2048
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


def asked(
    engine: Engine, shape: Mapping[str, int] | None
) -> tuple[StepInput, SizeTable]:
    """Return the step of a shape, and the names of its sizes.

    Everything that the shape does not name is as in the last step (in the last one
    whose mask hides something, if any does). Before the first step it is as in the last
    step of the loaded state.

    Args:
        engine: The session's parts.
        shape: Sizes by name; None for the sizes of the last step.

    Raises:
        MimoseError: The model has no size of such a name; or nothing is known yet.
        TypeError: `shape` is not a mapping.
    """
    if shape is not None:
        check_shape("shape", shape)
    last = engine.last if shape is None else engine.typical or engine.last
    if last is None:
        msg = (
            "no step was run yet and no state was loaded, so the sizes of the model's "
            "inputs are not known: train a step first"
        )
        raise MimoseError(msg)
    step_input, table = last
    if shape is None:
        return step_input, table
    first = step_input
    if "+" in step_input.context:  # several forwards: Note: [Windows] of the policy
        context, _, _ = step_input.context.partition("+")
        structure, _, _ = step_input.structure.partition("+")
        table = engine.tables[structure]
        sizes = step_input.sizes[: len(table.names)]
        first = StepInput(context, sizes, step_input.has_gradients, structure)
    first = first._replace(sizes=table.fill(shape, first.sizes))
    whole = engine.policy.windows.expected(first)
    if isinstance(whole, str):
        msg = f"mimose makes no plan for such steps, so it cannot predict them: {whole}"
        raise MimoseError(msg)
    return whole, table


class Forecasts:
    """Makes forecasts, and caches the last ones.

    Args:
        engine: The session's parts.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: LRUCache[Hashable, tuple[Forecast, Work | None]] = LRUCache(4096)
        self._largest: LRUCache[Hashable, int] = LRUCache(4096)

    def ask(
        self,
        shape: Mapping[str, int] | None,
        budget: float | str | None,
        accumulating: bool | None,
    ) -> Forecast:
        """Return the forecast of a step; see `Session.forecast`."""
        n_bytes = self._budget(budget)
        step_input, table, memory = self._begins(shape, n_bytes, accumulating)
        key = self._key(step_input, memory), n_bytes
        found = self._known.get(key)
        if found is None:
            found = self._forecast(step_input, table, memory, n_bytes)
            self._known[key] = found
        forecast, work = found
        rates = self._engine.seconds.rates(step_input.context)
        if work is None or rates is None:
            return forecast
        seconds, _, extra = rates.parts(*work)
        is_new = self._engine.seconds.is_new(step_input)
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
            {**shape, dim: 1}, self._budget(budget), accumulating
        )
        key = self._key(step_input, memory), dim, limit
        found = self._largest.get(key)
        if found is not None:
            return found

        def fits(size: int) -> bool:
            own, _ = asked(self._engine, {**shape, dim: size})
            own = own._replace(has_gradients=step_input.has_gradients)
            known, usable = self._usable(own, table, memory)
            if usable is None:
                return False
            least = self._engine.policy.least_plan(known, memory, usable)
            return _peak_bytes(least, memory) <= usable

        found = self._largest[key] = _last(fits, limit)
        return found

    def _budget(self, budget: float | str | None) -> int:
        if budget is None:
            return self._engine.memory_limit.budget_bytes
        return self._engine.read_budget(budget)

    def _begins(
        self,
        shape: Mapping[str, int] | None,
        budget_bytes: int,
        accumulating: bool | None,
    ) -> tuple[StepInput, SizeTable, Memory]:
        """Return a step, the names of its sizes, and the memory as it begins."""
        step_input, table = asked(self._engine, shape)
        driver = self._engine.driver
        if accumulating is None:
            accumulating = driver.accumulates
        memory = driver.memory_to_come(has_gradients=accumulating)
        more = budget_bytes - self._engine.memory_limit.budget_bytes
        more_level = more / memory.reserved_ratio
        grain = budget_bytes / _GRAINS
        memory = memory._replace(
            start_bytes=math.ceil(memory.start_bytes / grain) * grain,
            budget_bytes=math.floor((memory.budget_bytes + more_level) / grain) * grain,
        )
        return step_input._replace(has_gradients=accumulating), table, memory

    def _key(self, step_input: StepInput, memory: Memory) -> Hashable:
        engine, share = self._engine, round(self._engine.policy.margin.share, 3)
        known = engine.learner.model.version, engine.steps.n_begun > 0
        return step_input, memory, known, share

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
        learner, policy = self._engine.learner, self._engine.policy
        contexts = [step_input.context]
        if "+" not in step_input.context:
            base = step_input.context.removesuffix(BY_ROWS)
            n_labels = table.n_elements(step_input.sizes, "labels")
            budget_bytes = self._engine.memory_limit.budget_bytes
            large = large_logits(self._engine.losses, n_labels, budget_bytes)
            contexts = [base]
            if large:
                plain = step_input._replace(context=base)
                by_rows = step_input._replace(context=base + BY_ROWS)
                is_plain = policy.prefers_plain_loss(plain, by_rows, large, memory)
                contexts.insert(is_plain, base + BY_ROWS)
        likes = [
            step_input._replace(context=context, has_gradients=has_gradients)
            for context in contexts
            for has_gradients in dict.fromkeys((step_input.has_gradients, False))
        ]
        if all(why_unknown(learner.model, like) for like in likes):
            learner.worker.catch_up()
        is_first = not self._engine.steps.n_begun
        for like in likes:
            if not why_unknown(learner.model, like):
                return like, policy.usable_bytes(like, memory, is_first=is_first)
        return likes[0], None

    def _forecast(
        self, step_input: StepInput, table: SizeTable, memory: Memory, budget_bytes: int
    ) -> tuple[Forecast, Work | None]:
        """Return a forecast without seconds, and the work that decides them."""
        known, usable = self._usable(step_input, table, memory)
        model, policy = self._engine.learner.model, self._engine.policy
        is_new = known.context not in model.patterns
        forecast = Forecast(
            shape=table.named(step_input.sizes),
            budget_bytes=budget_bytes,
            extrapolation=math.inf if is_new else extrapolation_ratio(model, known),
        )
        if usable is None:
            return replace(forecast, why_not=why_unknown(model, known)), None
        try:
            made = policy.peek(known, memory) or policy.make(known, memory, usable)
        except InfeasibleBudgetError:
            made = policy.least_plan(known, memory, usable)
        peak = _peak_bytes(made, memory)
        if peak <= usable:
            forecast = replace(forecast, fits=True, peak_bytes=peak, plan=made.plan)
            return forecast, step_work(model, known, made.plan.actions)
        share, most = policy.margin.share, format_bytes(usable)
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
