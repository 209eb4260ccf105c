"""Decides what a step does: its phase and its plan, within the budget. No torch.

The input is a step's input and what is held; the output is a `Decision`.

Note: [Plans]
The worker thread makes plans for expected shapes, for a little less memory than is free
now.

Note: [Windows]
All forwards before one backward are one step for memory, because each holds its memory
until the backward. So a window, these forwards, is one step with all their layer calls.
Its context and its sizes are those of its forwards in order, and everything that is
learned, planned and predicted for steps applies to windows. A window of one forward is
an ordinary step.

When the first forward begins, the later ones are not known. The policy expects the
longest recent window that began in the same way. The sizes of its later forwards follow
from those of the first by a rule, or are the largest seen. If a forward is larger, the
plan stays if it is predicted to fit. Else this forward and those after it are
recomputed, as after a forward of another kind. If several backwards go through a graph,
the whole step is recomputed.
"""

from __future__ import annotations

import logging
import operator
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from cachetools import FIFOCache, LRUCache

from mimose.budget import format_bytes
from mimose.cost.learner import Learner
from mimose.cost.measured import MeasuredStep
from mimose.cost.model import CostModel
from mimose.cost.pattern import as_tuples
from mimose.cost.problem import (
    Growth,
    Memory,
    extra_flops,
    extrapolation_ratio,
    fill_problem,
    plan_growth,
    unknown_actions,
    why_unknown,
)
from mimose.exceptions import InfeasibleBudgetError
from mimose.planners import InfeasibleBudgetError as _Infeasible
from mimose.planners import Plan, Planner, PlanningProblem, lay_out, safest_plan
from mimose.planners.actions import REBUILDING
from mimose.planners.timeline import judge
from mimose.predictors import REACH, SafetyMargin, SizeMap
from mimose.records import Peaks, Phase, StepRecord
from mimose.types import BY_ROWS, MOST_CONTEXTS, Context, Sizes, StepInput
from mimose.worker import JobKind

# ------------------------------------------------------------ least peaks


class LeastPeaks:
    """Remembers the peaks of steps with everything recomputed.

    A batch that is at least as large in every size needs at least as much. The first
    steps run before the optimizer's state exists, so the lower of two bounds counts:
    the peak of that step with today's optimizer state, and today's start with the
    growth of that step.
    """

    def __init__(self) -> None:
        self._least: FIFOCache[tuple[Context, Sizes], tuple[float, float]]
        self._least = FIFOCache(MOST_CONTEXTS)
        """The last peaks without the optimizer's state, and the growths."""

    def add(
        self,
        step_input: StepInput,
        peak_bytes: float,
        growth_bytes: float,
        state_bytes: float,
    ) -> None:
        """Record a step with everything recomputed.

        Args:
            step_input: The step.
            peak_bytes: Its peak.
            growth_bytes: Its peak minus its start.
            state_bytes: The optimizer's state at that time.
        """
        least = peak_bytes - state_bytes, growth_bytes
        self._least[step_input.context, step_input.sizes] = least

    def bound(
        self, step_input: StepInput, start_bytes: float, state_bytes: float
    ) -> float:
        """Return a lower bound of the peak under any plan; 0 if none is known.

        Args:
            step_input: The next step.
            start_bytes: What is held now.
            state_bytes: The optimizer's state now.
        """
        own = step_input.sizes
        return max(
            (
                min(peak + state_bytes, start_bytes + growth)
                for (context, sizes), (peak, growth) in self._least.items()
                if context == step_input.context and all(map(operator.le, sizes, own))
            ),
            default=0.0,
        )


# ------------------------------------------------------------ windows

Parts: TypeAlias = tuple[StepInput, ...]
"""The forwards of a window."""

_MOST_FORWARDS = 16
LATELY = 16
"""Windows remembered for each first forward."""
SEVERAL_BACKWARDS = "several backwards go through such steps"
OTHERS = "this step has other forwards or backwards than expected"
OTHER_SIZES = "a later forward of this step has other sizes than expected"
_LARGER = f"{OTHER_SIZES}, and the step does not fit under the plan that its first has"


def joined(parts: Sequence[StepInput]) -> StepInput:
    """Return the step input of a window: Note: [Windows].

    Args:
        parts: The step inputs of its forwards.
    """
    if len(parts) == 1:
        return parts[0]
    return StepInput(
        "+".join(part.context for part in parts),
        tuple(size for part in parts for size in part.sizes),
        parts[0].has_gradients,
        "+".join(part.structure for part in parts),
    )


class Windows:
    """Remembers recent windows, and predicts how a new one continues.

    Attributes:
        seen: By the first forward's context, the windows and their numbers of
            backwards. Contexts with only ordinary steps are left out.
    """

    def __init__(self) -> None:
        self.seen: LRUCache[Context, deque[tuple[Parts, int]]]
        self.seen = LRUCache(MOST_CONTEXTS)
        self._to_come: dict[Context, list[tuple[StepInput, list[SizeMap]]]] = {}
        """The forwards after a first one, and the rules of their sizes."""

    def expected(self, first: StepInput) -> StepInput | str:
        """Return the window that a forward begins, or why it cannot be planned.

        Args:
            first: The forward.
        """
        seen = self.seen.get(first.context)
        if seen is None:
            return first
        if any(n_backwards > 1 for _, n_backwards in seen):
            return SEVERAL_BACKWARDS
        if first.context not in self._to_come:
            self._to_come[first.context] = _to_come([parts for parts, _ in seen])
        to_come = self._to_come[first.context]
        if len(to_come) >= _MOST_FORWARDS:
            return f"more than {_MOST_FORWARDS} forwards run before one backward"
        parts = [first]
        for part, rules in to_come:
            sizes = tuple(rule.predict_one(first.sizes) for rule in rules)
            parts.append(part._replace(sizes=sizes))
        return joined(parts)

    def absorb(self, parts: Sequence[StepInput], n_backwards: int) -> None:
        """Record a window that has ended, or has had another backward.

        Args:
            parts: Its forwards.
            n_backwards: How many backwards went through them.
        """
        context = parts[0].context
        if context not in self.seen and len(parts) == n_backwards == 1:
            return
        if self.expected(parts[0]) != joined(parts):
            self._to_come.pop(context, None)
        seen = self.seen.setdefault(context, deque(maxlen=LATELY))
        seen.append((tuple(parts), n_backwards))

    def state_dict(self) -> dict[str, Any]:
        """Return the windows as plain JSON data."""
        return {context: list(seen) for context, seen in self.seen.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the windows.

        Args:
            state: What ``state_dict`` returned.
        """
        self.seen.clear()
        self._to_come.clear()
        for context, seen in state.items():
            self.seen[context] = deque(maxlen=LATELY)
            for parts, n in seen:
                inputs = tuple(StepInput(*as_tuples(part)) for part in parts)
                self.seen[context].append((inputs, int(n)))


def covers(whole: StepInput, parts: Sequence[StepInput]) -> bool:
    """Whether forwards are the first ones of a window, or smaller.

    Args:
        whole: The window.
        parts: The forwards so far.
    """
    own = joined(parts)
    return _begins(whole, own) and all(map(operator.le, own.sizes, whole.sizes))


def _begins(whole: StepInput, own: StepInput) -> bool:
    """Whether forwards are of the same kinds as the first ones of a window."""
    return f"{whole.context}+".startswith(f"{own.context}+")


def _to_come(seen: Sequence[Parts]) -> list[tuple[StepInput, list[SizeMap]]]:
    """Return the later forwards of the longest windows, with their size rules."""
    longest = max(seen, key=len)
    alike = [p for p in seen if joined(p).context == joined(longest).context]
    roots = [parts[0].sizes for parts in alike]
    found = []
    for at in range(1, len(longest)):
        columns = zip(*(parts[at].sizes for parts in alike), strict=True)
        rules = [SizeMap().fit(roots, column) for column in columns]
        found.append((alike[-1][at], rules))
    return found


# ------------------------------------------------------------ plans

_SPARE = 0.01
"""The share of a step's headroom that is not worth another plan."""
_LEAST_USABLE, _LEAST_TRIED = 0.9, 0.95
"""A backward is given room for 1.1 bytes for each byte of its growth. With so much of
the room a step may stop to free all cached blocks."""
_COPIES = 4
"""A plain loss holds at most this many more copies of the logits in float32 than a loss
by rows."""

_Key = tuple[Context, Sizes, bool]
"""The first fields of a `StepInput`, which identify a plan."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a step does."""

    phase: Phase
    chosen: CachedPlan | None
    """None: everything is recomputed and measured, except in a baseline."""
    growth_bytes: float | None = None
    """The predicted growth."""
    cache_hit: bool = False
    is_measured: bool = False
    """Whether the step is measured."""
    is_whole: bool = False
    """Whether recomputations run to their end, as on another rank."""
    reason: str = ""
    """Why it is not an ordinary step; "" if it is."""

    @property
    def rebuilds(self) -> bool:
        """Whether a layer rebuilds single tensors."""
        names = () if self.chosen is None else self.chosen.plan.actions
        return not {spec.name for spec in REBUILDING}.isdisjoint(names)

    @property
    def is_baseline(self) -> bool:
        """Whether actions follow from the calls' positions, without a plan."""
        return self.chosen is None and not self.is_measured

    def withdrawn(self, reason: str) -> Decision:
        """Return it without its prediction, for a reason."""
        return replace(self, growth_bytes=None, reason=reason)

    def safest(self, reason: str) -> Decision:
        """Return what replaces it if the step must take as little as possible."""
        is_measured = not self.is_baseline
        return Decision(
            "fallback",
            None,
            is_measured=is_measured,
            is_whole=self.is_whole,
            reason=reason,
        )


BASELINE = Decision("plan", None)
"""The decision of every step of a baseline."""


def without_plan(
    reason: str, phase: Phase = "fallback", growth_bytes: float | None = None
) -> Decision:
    """Return the decision to recompute and measure everything.

    Args:
        reason: Why there is no plan.
        phase: The phase.
        growth_bytes: The predicted growth; None if not known.
    """
    return Decision(phase, None, growth_bytes, is_measured=True, reason=reason)


Ending: TypeAlias = Literal["once", "again", "unclear"]
"""How a step has ended: its backward has run to its end; another one has, through the
same graphs; or neither is known, so that only its records count."""


class StepOutcome(NamedTuple):
    """What a step has shown, once its backward has ended or is not expected any more.

    A step is a window: all forwards before one backward.
    """

    step_input: StepInput
    """The inputs of its forwards, as one."""
    parts: tuple[StepInput, ...]
    """The input of each."""
    decision: Decision
    """The last forward's, which holds for all."""
    memory: Memory
    """What was held when it began, and the budget."""
    ended: Ending
    records: tuple[StepRecord, ...]
    """The record of each forward: why it is no ordinary step, among others."""
    peaks: Peaks | None
    """The readings; None if the meter reads no peak, or there was no backward."""
    is_one: bool
    """Whether its readings are those of one step, so that it can teach something."""
    measured: MeasuredStep | None
    """None if it was not measured, or nothing can be learned from that."""
    began: Any
    """When its first forward began, as `mimose.runtime.seconds` has it; None if that is
    not known."""

    @property
    def is_over(self) -> bool:
        """Whether the peak that the budget limits was over it."""
        return self.records[-1].is_over

    @property
    def headroom_bytes(self) -> float:
        """The most that it could grow within the budget."""
        return self.memory.budget_bytes - self.memory.start_bytes


@dataclass(frozen=True, slots=True, eq=False)
class CachedPlan:
    """A plan for one shape, with everything that a cache hit needs."""

    plan: Plan
    calls: tuple[str, ...]
    """The names of the layer calls, in order."""
    by_layer: tuple[tuple[str, ...], ...]
    """The actions of each layer's calls."""
    counts: tuple[int, ...]
    """How often each layer is called."""
    growth: Growth
    flops: tuple[int, ...]
    """The FLOPs that each layer call recomputes, as far as known."""
    headroom_bytes: float
    """The headroom for which it was made."""
    version: int
    """The version of the cost model from which it was made."""
    between: tuple[tuple[int, ...], ...] = ()
    """For the end of each forward but the last, how often each layer was called."""
    ends: tuple[int, ...] = ()
    """For the end of each forward but the last, how many layer calls have run."""

    def counts_until(self, part: int) -> tuple[int, ...]:
        """Return how often each layer is called up to the end of a forward."""
        return self.between[part] if part < len(self.between) else self.counts

    def calls_of(self, part: int) -> slice:
        """Return where the layer calls of a forward stand among all."""
        ends = (0, *self.ends, len(self.calls))
        return slice(*ends[part : part + 2]) if part < len(ends) - 1 else slice(0)

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is recomputed."""
        return self.plan.extra_cost == 0


def _tightened(problem: PlanningProblem, share: float) -> PlanningProblem:
    """Lower a problem's budget to a share of the way from the safest plan to it."""
    least = safest_plan(problem).peak_bytes
    keep_all = np.zeros(len(problem.calls), dtype=np.intp)
    top = min(problem.budget_bytes, lay_out(problem, keep_all).peak_bytes)
    if least >= top:
        return problem
    return replace(problem, budget_bytes=least + share * (top - least))


def _cached(
    model: CostModel,
    step_input: StepInput,
    memory: Memory,
    problem: PlanningProblem,
    plan: Plan,
) -> CachedPlan:
    """Return a plan with its predictions."""
    pattern, actions = model.pattern(step_input), plan.actions
    return CachedPlan(
        plan,
        problem.calls,
        pattern.by_layer(actions, otherwise=model.menu.first),
        pattern.counts,
        plan_growth(model, step_input, problem, actions, memory.released_bytes),
        extra_flops(model, step_input, actions),
        memory.headroom_bytes,
        model.version,
        pattern.between,
        tuple(pattern.calls_until(part) for part in range(len(pattern.between))),
    )


def without_rows(context: Context) -> Context:
    """Return the context of the same forwards, each loss computed at once."""
    return context.replace(BY_ROWS, "")


# ------------------------------------------------------------ policy

_log = logging.getLogger(__name__)

_STAGES = (0.35, 0.7)
"""The ramp-up: shares of the way from the safest plan to the whole budget. A step
checks each before a context is planned freely. If such a plan keeps nothing, the whole
way is checked: it keeps a few layers. If it keeps none, there is nothing to check."""
_ALIKE = 1.1
"""Bytes of an action for each of another one that holds about as much."""
_MEASURED_STEPS = 32
"""At most this many steps with new plans are measured within the measured sizes. As
many steps measure actions of which little is known. As many steps in a row without a
plan log a warning."""
_RIGHT = 4
"""After this many right predictions of new plans in a row, new plans run without
measurement within the measured sizes, until one is not right. Of 80 steps of four
layers of BERT-large 16 are measured, not 32, with the same FLOPs and errors."""
_LARGE = 0.5
"""Steps with less growth, as a share of the headroom, do not change the margin, because
their readings are mostly noise."""
_OFF = 0.005
"""A prediction with a larger error is not right. If the step was measured, the plans
made until then become invalid, because the model has learned since."""


class Policy:
    """Chooses a phase and a plan for each step, and caches plans by shape.

    A shape has several plans if the budget moves, or what is held before its steps:
    each plan is for one headroom. The least recently used are dropped first.

    Args:
        learner: Holds what was learned.
        planner: Makes the plans.
        noise_bytes: The noise of a reading of the meter.
        cache_size: The most plans in the cache.
        raises: Whether it is an error if no plan is predicted to keep the budget. It is
            not if steps are observed: then the step recomputes everything, and its
            measured peak decides.

    Attributes:
        learner: The argument.
        margin: The safety margin.
        windows: Predicts which forwards make up a step.
        least_peaks: The peaks of steps with everything recomputed.
        n_hits: Steps whose plan was in the cache.
        n_misses: Steps whose plan was not.
    """

    def __init__(
        self,
        learner: Learner,
        planner: Planner,
        noise_bytes: float,
        cache_size: int,
        *,
        raises: bool,
    ) -> None:
        self.learner = learner
        self._raises = raises
        self.margin = SafetyMargin(noise_bytes=5.0 * noise_bytes)
        self._planner = planner
        self._cache: LRUCache[_Key, tuple[CachedPlan, ...]]
        self._cache = LRUCache(cache_size, getsizeof=len)
        self._lock = threading.RLock()
        self.windows = Windows()
        self.least_peaks = LeastPeaks()
        self._stages: LRUCache[Context, int] = LRUCache(MOST_CONTEXTS)
        """By context, how many stages of the ramp-up are passed."""
        self.n_hits = self.n_misses = 0
        self._n_tries = self._n_unplanned = self._n_right = 0
        self._usable: LRUCache[_Key, tuple[float, float]] = LRUCache(cache_size)
        """By shape, a headroom, and its share with which backwards have room."""
        self._last: _Key | None = None
        """The last step's."""

    # ------------------------------------------------------------------ before a step

    def decide(
        self,
        parts: Sequence[StepInput],
        memory: Memory,
        before: tuple[StepInput, Decision] | None = None,
        *,
        is_first: bool = False,
    ) -> tuple[StepInput, Decision]:
        """Choose what a forward does: Note: [Windows].

        Args:
            parts: The forwards of its window so far, this one last.
            memory: What was held when the first began, and the budget.
            before: What this method returned for the forward before it, if any.
            is_first: Whether it is the first forward of the process, which loads
                libraries that stay: a plan then leaves more free.

        Returns:
            The expected window, and the decision for all its forwards.

        Raises:
            InfeasibleBudgetError: No plan is predicted to fit, and steps are not
                observed.
        """
        if before is not None:
            whole, decision = before
            if decision.chosen is None or covers(whole, parts):
                return before
            return self._decide_larger(whole, joined(parts), decision, memory)
        step_input = self.windows.expected(parts[0])
        if isinstance(step_input, str):
            return parts[0], without_plan(step_input)
        found = self.peek(step_input, memory)
        if found is None or step_input.context not in self.learner.model.patterns:
            self.n_misses += 1
            return step_input, self._plan(step_input, memory, is_first=is_first)
        if step_input.context != next(reversed(self.learner.model.patterns), None):
            self.learner.use(step_input.context)
        self.n_hits += 1
        return step_input, _decision(found, memory, cache_hit=True)

    def _decide_larger(
        self, whole: StepInput, own: StepInput, decision: Decision, memory: Memory
    ) -> tuple[StepInput, Decision]:
        """Go on with a window's plan if it fits its forwards as they are.

        Args:
            whole: The expected window.
            own: Its forwards so far, which are other or larger ones.
            decision: The decision, with a plan.
            memory: What was held when the window began, and the budget.
        """
        if decision.chosen is None or not _begins(whole, own):
            return own, without_plan(OTHERS)
        whole = whole._replace(sizes=own.sizes + whole.sizes[len(own.sizes) :])
        reason = why_unknown(self.learner.model, whole)
        if not reason and decision.growth_bytes is not None:
            actions = decision.chosen.plan.actions
            found = self.imposed(whole, decision, memory, actions)
            most = self.usable_bytes(whole, memory) - memory.start_bytes
            if found is not None and (found.growth_bytes or 0.0) <= most:
                return whole, found
            reason = _LARGER
        return own, without_plan(reason or OTHER_SIZES)

    def _plan(
        self, step_input: StepInput, memory: Memory, *, is_first: bool
    ) -> Decision:
        """Make a plan if the step can be predicted; else decide to measure it."""
        learner, context = self.learner, step_input.context
        is_measured = context in learner.model.patterns
        is_known = is_measured and without_rows(context) in self._stages
        model, why_not = learner.model, ""
        if is_known:
            why_not = why_unknown(model, step_input)
        if not is_known or why_not:
            learner.worker.catch_up()  # what it learns may allow a plan
            model = learner.model
            why_not = why_unknown(model, step_input)
        learner.use(context)
        self._note(why_not)
        if why_not:
            return without_plan(why_not, "fallback" if is_known else "collect")
        share = self._share(context)
        beyond = extrapolation_ratio(model, step_input)
        usable = self.usable_bytes(step_input, memory, is_first=is_first)
        try:
            made = self.make(step_input, memory, usable, share)
            if share < 1.0 and model.menu.first not in made.plan.actions:
                made = self.make(step_input, memory, usable)  # it keeps a few, or none
                share = share if model.menu.first in made.plan.actions else 1.0
        except InfeasibleBudgetError as error:
            if self._raises:
                raise
            least = format_bytes(error.least_peak_bytes)
            reason = (
                f"no plan is predicted to keep the budget: the lowest peak is {least} "
                f"without the margin of {self.margin.share:.1%}, and tensors may hold "
                f"{format_bytes(memory.budget_bytes)}"
            )
            growth = error.least_peak_bytes - memory.start_bytes
            failed = without_plan(reason, growth_bytes=growth)
            return self._tried_for_less(model, step_input, memory) or failed
        is_measured = beyond > 0.0 or not self._knows_enough
        decision = replace(_decision(made, memory), is_measured=is_measured)
        if share < 1.0:
            return replace(decision, phase="step_down")
        tried = self._tried(model, step_input, decision, made)
        if tried is not None:
            return tried
        if not (is_first or beyond > 0.0):
            with self._lock:
                self._put(step_input, made)
        return decision

    def _tried(
        self,
        model: CostModel,
        step_input: StepInput,
        decision: Decision,
        made: CachedPlan,
    ) -> Decision | None:
        """Let a step try actions that are hardly measured; None if there are none.

        Layer calls that the plan keeps run under these actions in turn. They hold no
        more than keeping does, so the step keeps the budget, but it is not predicted.
        Lossy actions are not tried if everything can be kept.
        """
        menu, planned = model.menu, made.plan.actions
        if self._n_tries >= _MEASURED_STEPS or len(self.learner.lessons) > 1:
            return None
        is_exact = made.keeps_all
        actions, turns = list(planned), count()
        for at, unknown in enumerate(unknown_actions(model, step_input)):
            names = [n for n in unknown if not (is_exact and n in menu.lossy)]
            if names and planned[at] == menu.first:
                actions[at] = names[next(turns) % len(names)]
        names = [n for n in menu.names if n in set(actions) - set(planned)]
        if actions == list(planned):
            return None
        self._n_tries += 1
        by_layer = model.pattern(step_input).by_layer(actions, otherwise=menu.first)
        plan = replace(made.plan, actions=tuple(actions))
        return replace(
            decision,
            chosen=replace(made, plan=plan, by_layer=by_layer),
            is_measured=True,
            growth_bytes=None,
            reason=f"{', '.join(names)} tried in place of what would be kept",
        )

    def _tried_for_less(
        self, model: CostModel, step_input: StepInput, memory: Memory
    ) -> Decision | None:
        """Let a step try what may need less than the least action; None if nothing may.

        What drops as much, and rebuilds each tensor just before it is needed, has no
        higher peak than what rebuilds all at once. How much lower it is must be seen.
        """
        if self._n_tries >= _MEASURED_STEPS or len(self.learner.lessons) > 1:
            return None
        menu, problem = model.menu, fill_problem(model, step_input, memory)
        actions, more = [menu.least] * len(problem.calls), 0.0
        for at, unknown in enumerate(unknown_actions(model, step_input)):
            held = dict(zip(menu.names, problem.held_bytes[at], strict=True))
            for name in [n for n in unknown if menu.spec(n).rebuilds][-1:]:
                if held[name] <= _ALIKE * held[menu.least]:
                    more += max(0.0, held[name] - held[menu.least])
                    actions[at] = name
        least = judge(problem, problem.least_choice(), planner="tried")
        room = memory.headroom_bytes * memory.reserved_ratio
        if {*actions} == {menu.least} or least.growth_bytes + more > room:
            return None
        self._n_tries += 1
        plan = judge(problem, problem.choice_of(actions), planner="tried")
        decision = _decision(_cached(model, step_input, memory, problem, plan), memory)
        names = ", ".join(sorted({*actions} - {menu.least}))
        return replace(
            decision,
            is_measured=True,
            growth_bytes=None,
            reason=f"{names} tried in place of what would be recomputed",
        )

    def prepare(self, step_input: StepInput, memory: Memory) -> None:
        """Have the worker thread make a plan for an expected step.

        Args:
            step_input: Its context and sizes.
            memory: What is held as a step begins, and the budget.
        """
        model, context = self.learner.model, step_input.context
        if context not in model.patterns or not self._knows_enough:
            return
        if self._share(context) < 1.0 or extrapolation_ratio(model, step_input) > 0.0:
            return  # its step will be measured
        if self.peek(step_input, memory) is None:
            ahead = partial(self._make_ahead, step_input, memory)
            self.learner.worker.submit(JobKind.PLAN, step_input[:3], ahead)

    def imposed(
        self,
        step_input: StepInput,
        decision: Decision,
        memory: Memory,
        actions: tuple[str, ...],
    ) -> Decision | None:
        """Return a decision with the actions on which ranks have agreed.

        Args:
            step_input: The step of the plan.
            decision: This rank's own decision, with a plan.
            memory: What is held, and the budget.
            actions: The action of each layer call of that plan.

        Returns:
            None if the cost model now has other layer calls.
        """
        chosen, model = decision.chosen, self.learner.model
        if chosen is None or step_input.context not in model.patterns:
            return None
        problem = fill_problem(model, step_input, memory)
        if problem.calls != chosen.calls:
            return None
        choice = np.array([problem.actions.index(a) for a in actions], dtype=np.intp)
        plan = judge(problem, choice, planner="agreed")
        made = _cached(model, step_input, memory, problem, plan)
        growth = made.growth.bytes(memory.released_bytes)
        return replace(decision, chosen=made, growth_bytes=growth)

    # ------------------------------------------------------------------ plans

    @property
    def _knows_enough(self) -> bool:
        """Whether new plans within the measured sizes run without measurement."""
        return self._n_right >= _RIGHT or self.learner.n_steps >= _MEASURED_STEPS

    def peek(self, step_input: StepInput, memory: Memory) -> CachedPlan | None:
        """Return the plan that a step would find, and change nothing.

        If several plans are good, it is the cheapest.

        Args:
            step_input: The step.
            memory: What is held, and the budget.
        """
        with self._lock:
            plans = self._cache.get(step_input[:3], ())
        valid, best = self.learner.model.valid_since, None
        headroom = memory.budget_bytes - memory.start_bytes
        for cached in plans:
            growth = cached.growth.bytes(memory.released_bytes)
            allowed = self.margin.allowed(growth)
            if cached.version < valid or allowed > headroom:
                continue
            # It must not leave much unused.
            most = max(_SPARE * growth, self.margin.noise_bytes)
            if headroom - cached.headroom_bytes > most and not cached.keeps_all:
                continue
            if best is None or cached.plan.extra_cost < best.plan.extra_cost:
                best = cached
        return best

    def _put(self, step_input: StepInput, made: CachedPlan) -> None:
        """Store a plan beside the other plans of its shape."""
        valid, others = self.learner.model.valid_since, []
        for other in self._cache.get(step_input[:3], ()):
            if other.version < valid:
                continue
            if other.plan.actions != made.plan.actions:
                others.append(other)
            elif other.headroom_bytes > made.headroom_bytes:
                made = replace(made, headroom_bytes=other.headroom_bytes)
        most = int(self._cache.maxsize)
        self._cache[step_input[:3]] = (made, *others)[:most]

    def prefers_plain_loss(
        self,
        step_input: StepInput,
        by_rows: StepInput,
        logit_bytes: int,
        memory: Memory,
    ) -> bool:
        """Whether a step fits with a plain loss and everything kept.

        If steps with a plain loss cannot be predicted, the same step with a loss by
        rows is: it takes less by at most four copies of the logits.

        Args:
            step_input: The step with a plain loss.
            by_rows: The same step with its loss by rows.
            logit_bytes: The bytes of its logits in float32.
            memory: What is held, and the budget.
        """
        plain, made = self.peek(step_input, memory), self.peek(by_rows, memory)
        if plain is not None:
            return plain.keeps_all
        model, known, more = self.learner.model, step_input, 0
        if why_unknown(model, step_input):
            known, more = by_rows, _COPIES * logit_bytes
        if (made is not None and not made.keeps_all) or why_unknown(model, known):
            return False
        problem = fill_problem(model, known, memory)
        actions = (model.menu.first,) * len(problem.calls)
        growth = plan_growth(model, known, problem, actions, memory.released_bytes)
        most = self.margin.allowed(growth.bytes(memory.released_bytes))
        return most + more <= memory.headroom_bytes

    def make(
        self,
        step_input: StepInput,
        memory: Memory,
        usable_bytes: float,
        share: float = 1.0,
    ) -> CachedPlan:
        """Make a plan.

        Args:
            step_input: The step.
            memory: What is held, and the budget.
            usable_bytes: The highest level that predictions may reach, which is below
                the budget by the margin.
            share: The share of the way from the safest plan to that level.

        Raises:
            InfeasibleBudgetError: No plan keeps the budget.
        """
        model = self.learner.model
        problem = fill_problem(model, step_input, memory, usable_bytes)
        if share < 1.0:
            problem = _tightened(problem, share)
        made = self._made(model, step_input, memory, problem)
        start, room = problem.start_bytes, problem.budget_bytes - problem.start_bytes
        reached = 0.0
        while True:  # each time with at least 1% more headroom
            # By this much the problem's peak is above the plan's prediction: it counts
            # autocast's copies for kept layers twice, a tenth of BERT-large's growth.
            growth = made.growth.bytes(memory.released_bytes)
            beyond = made.plan.peak_bytes - start - growth
            if made.keeps_all or beyond - reached < _SPARE * room:
                return made
            wider = replace(problem, budget_bytes=problem.budget_bytes + beyond)
            other = self._made(model, step_input, memory, wider)
            is_dearer = other.plan.extra_cost > made.plan.extra_cost
            is_same = other.plan.actions == made.plan.actions
            if is_same or is_dearer or other.growth.bytes(memory.released_bytes) > room:
                return made
            made, reached = other, beyond

    def _made(
        self,
        model: CostModel,
        step_input: StepInput,
        memory: Memory,
        problem: PlanningProblem,
    ) -> CachedPlan:
        """Choose the actions; the safest ones if the margin does not fit."""
        try:
            plan = self._planner.plan(problem)
        except _Infeasible as error:
            plan = safest_plan(problem)
            if plan.peak_bytes - self.margin.noise_bytes > memory.budget_bytes:
                raise InfeasibleBudgetError(
                    memory.budget_bytes, plan.peak_bytes, error.holders
                ) from None
        return _cached(model, step_input, memory, problem, plan)

    def least_plan(
        self, step_input: StepInput, memory: Memory, usable_bytes: float
    ) -> CachedPlan:
        """Return the plan with the lowest peak; the arguments are those of `make`."""
        model = self.learner.model
        problem = fill_problem(model, step_input, memory, usable_bytes)
        return _cached(model, step_input, memory, problem, safest_plan(problem))

    def _make_ahead(self, step_input: StepInput, memory: Memory) -> None:
        most = memory.headroom_bytes - self.margin.noise_bytes
        most = self.margin.largest(most) * self._share_with_room(step_input, memory)
        if why_unknown(self.learner.model, step_input):
            return
        try:
            made = self.make(step_input, memory, memory.start_bytes + most)
        except InfeasibleBudgetError:
            return  # its step raises this with its own numbers
        with self._lock:
            if self.peek(step_input, memory) is None:
                self._put(step_input, made)

    # ------------------------------------------------------------------ after a step

    def as_ran(
        self,
        step_input: StepInput,
        decision: Decision,
        counts: tuple[int, ...],
        part: int = 0,
    ) -> Decision | None:
        """Return a planned forward's decision, adjusted to the layers that have run.

        If fewer layer calls ran than planned, the prediction is withdrawn. If more ran,
        that is recorded. In a window of several forwards each must run exactly what was
        planned: calls are counted over the whole window, so it is not known which calls
        a later forward leaves out.

        Args:
            step_input: The window's context and sizes.
            decision: The decision, with a plan.
            counts: How often each layer was called, up to the end of the forward.
            part: The index of the forward in its window.

        Returns:
            None if more layer calls or other layers have run.
        """
        chosen, model = decision.chosen, self.learner.model
        if chosen is None or counts == chosen.counts_until(part):
            return decision
        if chosen.between:
            self.forget(step_input.context)
            return None
        step_input = step_input._replace(counts=counts)
        if any(map(operator.gt, counts, chosen.counts)):
            self.learner.miss(step_input)
            return None
        if step_input.context not in model.patterns:
            return replace(decision, growth_bytes=None)
        names = {call.name for call in model.pattern(step_input).calls}
        ran = [at for at, name in enumerate(chosen.calls) if name in names]
        flops = tuple(chosen.flops[at] for at in ran)
        plan = replace(
            chosen.plan, actions=tuple(chosen.plan.actions[at] for at in ran)
        )
        calls = tuple(chosen.calls[at] for at in ran)
        ran_as = replace(chosen, plan=plan, calls=calls, counts=counts, flops=flops)
        return replace(decision, chosen=ran_as, growth_bytes=None)

    def absorb(self, outcome: StepOutcome) -> None:
        """Learn from the outcome of a step, or of another backward through it."""
        decision, peaks = outcome.decision, outcome.peaks
        chosen, predicted = decision.chosen, decision.growth_bytes
        is_baseline = chosen is None and not decision.is_measured
        if is_baseline or outcome.ended == "unclear":
            return
        is_again = outcome.ended == "again"
        self.windows.absorb(outcome.parts, 2 if is_again else 1)
        last, self._last = self._last, outcome.step_input[:3]
        if not outcome.is_one:
            return
        if is_again:
            self.learner.take_back()
            return
        is_over = peaks is not None and outcome.is_over
        if is_over:
            self.learner.distrust_plans()
        if chosen is None:
            return
        is_repeated = decision.cache_hit and last == self._last
        if is_repeated and peaks is not None and peaks.n_retries:
            # All blocks were there, so it was gaps for which they were freed.
            self.lacked_room(outcome.step_input, outcome.memory, gives_up=True)
        is_within = not is_over
        if predicted is not None and peaks is not None:
            observed = peaks.level_bytes - int(outcome.memory.start_bytes)
            is_within = observed <= self.margin.allowed(predicted)
            if is_over or predicted >= _LARGE * outcome.headroom_bytes:
                self.margin.observe(predicted, observed)
            is_off = abs(observed - predicted) > _OFF * predicted
            if is_off:
                self._n_right = 0
            elif not decision.cache_hit:
                self._n_right += 1
            if decision.is_measured and is_off:
                self.learner.distrust_plans()  # it has just learned better
        # It goes on to the next stage, if this one was checked; the oldest contexts go.
        checked = without_rows(outcome.step_input.context)
        stage = self._stages.get(checked, 0)
        if stage < len(_STAGES) and is_within:
            stage += self.learner.model.menu.first in chosen.plan.actions
        self._stages[checked] = stage

    def forget(self, context: Context) -> None:
        """Forget a context whose steps have run other layers than expected."""
        self.learner.forget(context)
        self._stages.pop(without_rows(context), None)

    # ------------------------------------------------------------------ reporting

    def least_peak_bytes(self, step_input: StepInput, memory: Memory) -> float | None:
        """Return a lower bound of a step's peak under any plan; None if not known.

        It is the prediction of the safest plan, minus the margin.

        Args:
            step_input: Its context and exact sizes.
            memory: What is held, as if the step began now.
        """
        model = self.learner.model
        if why_unknown(model, step_input) or model.pattern(step_input).may_vary:
            return None  # it may run less
        least = safest_plan(fill_problem(model, step_input, memory)).peak_bytes
        growth = (least - memory.start_bytes) * (1.0 - self.margin.share)
        return memory.start_bytes + growth

    def usable_bytes(
        self, step_input: StepInput, memory: Memory, *, is_first: bool = False
    ) -> float:
        """Return the highest level that the prediction of a step may reach.

        Args:
            step_input: The step, of a known context.
            memory: What is held, and the budget.
            is_first: As for `decide`.
        """
        beyond = extrapolation_ratio(self.learner.model, step_input) / (REACH - 1.0)
        headroom = memory.headroom_bytes
        most = self.margin.largest(headroom, 1.0 if is_first else beyond)
        return memory.start_bytes + most * self._share_with_room(step_input, memory)

    def _share_with_room(self, step_input: StepInput, memory: Memory) -> float:
        found = self._found_share(step_input, memory)
        return 1.0 if found is None else found

    def _found_share(self, step_input: StepInput, memory: Memory) -> float | None:
        """Return it as found with as much headroom: another budget shows it anew."""
        with self._lock:
            own, share = self._usable.get(step_input[:3], (0.0, 1.0))
        return share if abs(memory.headroom_bytes - own) <= _SPARE * own else None

    def lacked_room(
        self, step_input: StepInput, memory: Memory, *, gives_up: bool = False
    ) -> None:
        """Plan a shape for less, because its plan left its backward too little room.

        Otherwise the next step would plan the same. (A plan that rebuilds holds little
        as its forward ends, so most of its growth is the backward's.)

        Args:
            step_input: The step.
            memory: What was held, and the budget.
            gives_up: Whether all is planned for again if the least is not enough: then
                the step only frees its cached blocks. (MobileNet-v2 at a third frees
                them in each step, a tenth of its time, but not with 2% less. U-Net at a
                half does in any case.)
        """
        found = self._found_share(step_input, memory)
        if gives_up and found == 1.0:
            return  # it was in vain
        share = (found or 1.0) - _SPARE
        if share < (_LEAST_TRIED if gives_up else _LEAST_USABLE):
            share = 1.0 if gives_up else _LEAST_USABLE
        with self._lock:
            self._usable[step_input[:3]] = memory.headroom_bytes, share
            self._cache.pop(step_input[:3], None)

    def explain(
        self, step_input: StepInput, memory: Memory
    ) -> tuple[PlanningProblem, Plan, str]:
        """Return the exact problem of a shape, the plan it gets, and why.

        Raises:
            InfeasibleBudgetError: No plan keeps the budget.
        """
        model = self.learner.model
        problem = fill_problem(model, step_input, memory)
        why_not = why_unknown(model, step_input)
        if why_not:
            return problem, safest_plan(problem), f"the safest plan, because {why_not}"
        usable = self.usable_bytes(step_input, memory)
        plan = self.make(step_input, memory, usable).plan
        why = f"planner {plan.planner}" + (" (proved optimal)" if plan.optimal else "")
        return problem, plan, f"{why}, with a margin of {self.margin.share:.1%}"

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned as plain JSON data, without plans."""
        return {
            "stages": dict(self._stages),
            "margin": self.margin.state_dict(),
            "windows": self.windows.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace what was learned.

        Args:
            state: What ``state_dict`` returned.
        """
        self._stages.clear()
        self._stages.update(state["stages"])
        if "margin" in state:  # a rehearsal leaves it to the card
            self.margin.load_state_dict(state["margin"])
        self.windows.load_state_dict(state["windows"])
        self._n_right = 0
        with self._lock:
            self._usable.clear()
        self.learner.distrust_plans()

    # ------------------------------------------------------------------ the margin

    def _share(self, context: Context) -> float:
        """Return the share of the way to the whole budget that a plan may use."""
        stage = self._stages.get(without_rows(context), 0)
        return _STAGES[stage] if stage < len(_STAGES) else 1.0

    def _note(self, why_not: str) -> None:
        """Count steps without a plan, and warn after many in a row."""
        self._n_unplanned = self._n_unplanned + 1 if why_not else 0
        if self._n_unplanned == _MEASURED_STEPS:
            _log.warning(
                "mimose: the last %d steps all recomputed everything, because no plan "
                "can be made; the last reason: %s. If the model's arguments differ in "
                "more than their sizes (texts, identifiers, numbers of tensors), "
                "remove what differs. If nothing helps, planner='full' recomputes "
                "everything without the cost of measuring.",
                _MEASURED_STEPS,
                why_not,
            )


def _decision(made: CachedPlan, memory: Memory, *, cache_hit: bool = False) -> Decision:
    growth = made.growth.bytes(memory.released_bytes)
    return Decision("plan", made, growth, cache_hit)
