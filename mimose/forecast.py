"""What steps to come would take, before anything is run: `Session.forecast`.

Note: [As the next step begins]
A plan depends on what is held as its step begins, and a sampler asks between steps, in
the middle of a window of accumulation, or before the first step. So gradients that are
held now and go before the next step are taken off, and those that a step of a window
finds there are added. Until an optimizer of the model has stepped, its state is to
come: what a loaded state says of the start of its steps counts then, if it is more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from cachetools import LRUCache

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
"""Parts of the budget that what is held is rounded up to: within one, forecasts are
those of before."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a step of one shape would take, if it began now."""

    shape: Mapping[str, int]
    """All sizes that vary, by name."""
    fits: bool | None
    """Whether a plan keeps the budget with the safety margin; None where that is not
    known, and the step would be measured with everything recomputed."""
    why_not: str | None
    """Why it does not fit, or is not known; None where it fits."""
    budget_bytes: int
    """The budget it was asked for."""
    peak_bytes: float | None
    """The predicted peak, counted as `StepRecord.predicted_peak_bytes`: of the plan;
    of the plan with the least peak where none fits; None where it is not known."""
    plan: Plan | None
    """What the step would run; None where no plan fits."""
    seconds: float | None
    """Of the step under that plan on the device, its share of the optimizer's step
    included; None where it is not known."""
    extra_seconds: float | None
    """What the plan adds to that; None where it is not known."""
    extrapolation: float
    """How far beyond the sizes measured it lies: 0 inside, 0.5 for half as large again;
    infinite where nothing was measured with such inputs."""


def asked(
    engine: Engine, shape: Mapping[str, int] | None
) -> tuple[StepInput, SizeTable]:
    """Return the step that a shape asks for, and the names of its sizes.

    It is like the last step whose mask hid something, if some do, or, before the
    first step, like those that a loaded state was taught by last.

    Args:
        engine: The session's parts.
        shape: Sizes by name, the others as in that step; None for its own.

    Raises:
        MimoseError: A name is not one of the model's; or nothing is known yet.
    """
    last = engine.snapshot.last if shape is None else engine.snapshot.typical
    if last is None:
        msg = (
            "no step was run yet and no state was loaded, so no shape is known; train "
            "a step first"
        )
        raise MimoseError(msg)
    step_input, table = last
    if shape is None:
        return step_input, table
    first = step_input
    if "+" in step_input.context:  # a window: Note: [Windows] of the policy
        contexts, structures = (
            step_input.context.split("+"),
            step_input.structure.split("+"),
        )
        found = engine.snapshot.tables.get(structures[0])
        assert found is not None
        table = found
        sizes = step_input.sizes[: len(table.names)]
        first = StepInput(contexts[0], sizes, step_input.has_gradients, structures[0])
    first = first._replace(sizes=table.fill(shape, first.sizes))
    if first.context not in engine.policy.windows.seen:
        return first, table
    whole = engine.policy.windows.expected(first)
    if isinstance(whole, str):
        msg = f"no plan is made for such steps: {whole}"
        raise MimoseError(msg)
    return whole, table


class Forecasts:
    """Answers what steps to come would take; the last answers are remembered.

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
        """Return what a step of a shape would take; see `Session.forecast`."""
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
        return replace(forecast, seconds=seconds, extra_seconds=extra)

    def largest(
        self,
        shape: Mapping[str, int],
        vary: str,
        budget: float | str | None,
        most: int | None,
        accumulating: bool | None,
    ) -> int:
        """Return the largest size with which a step fits; see `Session.largest`."""
        step_input, table, memory = self._begins(
            {**shape, vary: 1}, self._budget(budget), accumulating
        )
        key = self._key(step_input, memory), vary, most
        found = self._largest.get(key)
        if found is not None:
            return found

        def known(size: int) -> tuple[StepInput, float | None]:
            own, _ = asked(self._engine, {**shape, vary: size})
            own = own._replace(has_gradients=step_input.has_gradients)
            return self._usable(own, table, memory)

        def over(size: int) -> float:
            own, usable = known(size)
            if usable is None:  # the worker has learned meanwhile that it is not known
                return math.inf
            growth = self._engine.policy.plans.least(own, memory, usable).growth
            return growth.bytes(memory.released_bytes) + memory.start_bytes - usable

        reach = _furthest(lambda size: known(size)[1] is not None, most)
        found = self._largest[key] = _last_within(over, reach)
        return found

    # ------------------------------------------------------------------ one shape

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
        """Return a step, its sizes' names, and what is held as it begins."""
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
        """Return which known step predicts this one, and how far it may go.

        A loss by rows takes less than another, so that one tells what it takes at most;
        so does a step that makes its gradients, of one that finds them there.

        Returns:
            The step, and the level that its prediction may reach; None where nothing
            that is known predicts it.
        """
        driver, learner = self._engine.driver, self._engine.learner
        contexts = [step_input.context]
        if "+" not in step_input.context:
            base = step_input.context.removesuffix(BY_ROWS)
            n_labels = table.n_elements(step_input.sizes, "labels")
            budget_bytes = self._engine.memory_limit.budget_bytes
            large = large_logits(driver.losses, n_labels, budget_bytes)
            contexts = [base]
            if large:
                plain = step_input._replace(context=base)
                by_rows = step_input._replace(context=base + BY_ROWS)
                plans = self._engine.policy.plans
                is_plain = plans.prefers_plain_loss(plain, by_rows, large, memory)
                contexts.insert(is_plain, base + BY_ROWS)
        likes = [
            step_input._replace(context=context, has_gradients=has_gradients)
            for context in contexts
            for has_gradients in dict.fromkeys((step_input.has_gradients, False))
        ]
        if all(why_unknown(learner.model, like) for like in likes):
            learner.worker.catch_up()
        is_first, policy = not self._engine.steps.n_begun, self._engine.policy
        for like in likes:
            if not why_unknown(learner.model, like):
                return like, policy.usable_bytes(like, memory, is_first=is_first)
        return likes[0], None

    def _forecast(
        self, step_input: StepInput, table: SizeTable, memory: Memory, budget_bytes: int
    ) -> tuple[Forecast, Work | None]:
        """Return a forecast without seconds, and what these follow from."""
        known, usable = self._usable(step_input, table, memory)
        model, plans = self._engine.learner.model, self._engine.policy.plans
        is_new = known.context not in model.patterns
        forecast = Forecast(
            shape=table.named(step_input.sizes),
            fits=None,
            why_not=None,
            budget_bytes=budget_bytes,
            peak_bytes=None,
            plan=None,
            seconds=None,
            extra_seconds=None,
            extrapolation=math.inf if is_new else extrapolation_ratio(model, known),
        )
        if usable is None:
            return replace(forecast, why_not=why_unknown(model, known)), None
        try:
            made = plans.peek(known, memory) or plans.make(known, memory, usable)
        except InfeasibleBudgetError:
            made = plans.least(known, memory, usable)
        peak = _peak_bytes(made, memory)
        if peak <= usable:
            forecast = replace(forecast, fits=True, peak_bytes=peak, plan=made.plan)
            return forecast, step_work(model, known, made.plan.actions)
        share, most = self._engine.policy.margin.share, format_bytes(usable)
        why_not = (
            f"the {made.plan.planner} plan is predicted to reach {format_bytes(peak)}; "
            f"with the margin of {share:.1%} it may reach {most}"
        )
        return replace(forecast, fits=False, peak_bytes=peak, why_not=why_not), None


def _peak_bytes(made: CachedPlan, memory: Memory) -> float:
    return memory.start_bytes + made.growth.bytes(memory.released_bytes)


def _furthest(is_known: Callable[[int], bool], most: int | None) -> int:
    """Return the largest size that is known, as are all below it; 0 where none is."""
    low, high = 0, 1
    while (most is None or high <= most) and is_known(high):
        low, high = high, 2 * high
    if most is not None:
        high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_known(middle) else (low, middle)
    return low


def _last_within(over: Callable[[int], float], most: int) -> int:
    """Return the largest size up to `most` that is not over; 0 where all are.

    What is over grows nearly by a line, so it is looked for along one, and halved in
    every third try.
    """
    if not most or over(most) <= 0.0:
        return most
    low, high, tries = (1, over(1)), (most, over(most)), 0
    if low[1] > 0.0:
        return 0
    while high[0] - low[0] > 1:
        tries += 1
        share = -low[1] / (high[1] - low[1]) if tries % 3 else 0.5
        at = low[0] + int(share * (high[0] - low[0]))
        at = min(max(at, low[0] + 1), high[0] - 1)
        value = over(at)
        low, high = ((at, value), high) if value <= 0.0 else (low, (at, value))
    return low[0]
