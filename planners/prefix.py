"""The timeline, rearranged for searching.

Note: [Prefix form]. Let P[e] be the bytes held by the events before event e. The
gap before e, e's forward and e's backward all rise over the same P[e]: what later
events held is released before e's backward begins. A backward also changes the level
for good, for all backwards that follow, those of the events before; let every event's
net count as the least that any of its actions has, x[e, a] >= 0 be what its own has
beyond that, and L[e] the sum of the later events' x. Everything else on the level
(gaps, the least nets) is the same in every plan. So the budget is kept exactly if

    P[e] + forward_bytes[e, a]         <= budget    for every event under its action,
    P[e] + backward_bytes[e, a] + L[e] <= budget    for every event under its action,
    P[E] + head_bytes                  <= budget,
    step_bytes + the sum of all x      <= budget.

Where nets do not depend on the action, x is zero everywhere, and one number an event
is enough: ``need_bytes``, the larger of the two. A plan then is a walk over the events
in order that only has to remember how many bytes it holds: fewer is never worse. This
is a knapsack with a limit at every item; see ``frontier.py``. Where they do depend on
it, a walk remembers how high its backwards will rise, too; see ``least_peak.py``.

What an event holds may depend on the action of the one before (Note: [Boundaries] in
``timeline.py``): where it lets its input go, it holds that much less, unless the other
has saved it. Its own needs do not. So ``held_bytes`` counts the input as gone, and
``shared_bytes`` is what is held on top if the event before ``saves_output``. A walk
remembers one more bit, whether its last event has done so, and not having done so is
never worse. Where the event before has no choice about it, nothing is left to remember.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from .base import BoolArray, FloatArray, IntArray, PlanningProblem


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PrefixForm:
    """The peak of a step, split by what the events before hold.

    Needs are infinite where the action is not allowed.
    """

    held_bytes: FloatArray
    """(E, K) bytes held from the event's exit to its backward, at the least."""

    shared_bytes: FloatArray
    """(E, K) bytes held on top where the event before has saved its output."""

    saves_output: BoolArray
    """(E, K) whether the event saves its output, where the next one may share it."""

    has_pairs: bool
    """Whether what any event holds depends on the action of the one before."""

    forward_bytes: FloatArray
    """(E, K) peak of the gap before it and of the forward, less what the events before
    hold."""

    backward_bytes: FloatArray
    """(E, K) peak of the backward, less what the events before hold, and less what the
    nets of those behind have beyond their least."""

    need_bytes: FloatArray
    """(E, K) the larger of the two."""

    extra_bytes: FloatArray
    """(E, K) the action's net beyond the least of the event's; zero where it is not
    allowed."""

    has_extra: bool
    """Whether any net depends on the action."""

    head_bytes: float
    """Peak of the head, less what all events hold."""

    step_bytes: float
    """Peak of the optimizer step, less what nets have beyond their least."""

    def level_is_scarce(self, budget_bytes: float) -> bool:
        """Tell whether some nets would take the optimizer step over the budget."""
        most = float(self.extra_bytes.max(axis=1, initial=0.0).sum())
        return self.has_extra and self.step_bytes + most > budget_bytes


def prefix_form(problem: PlanningProblem) -> PrefixForm:
    """Rearrange a problem, see Note: [Prefix form].

    Args:
        problem: The step.

    Returns:
        What each event needs over the bytes held by the events before it.
    """
    nets, gaps = problem.backward_net_bytes, problem.gap_bytes
    held, shared, saves = _boundaries(problem)
    least = np.where(problem.allowed, nets, np.inf).min(axis=1)
    extra = np.where(problem.allowed, nets - least[:, None], 0.0)
    entered = problem.start_bytes + np.cumsum(gaps)
    gap_excess = np.maximum(problem.gap_excess_bytes, gaps)
    before_gap = entered - gaps
    # Arrival of the gradient, without what the events hold themselves.
    arrived = entered[-1] + (least.sum() - np.cumsum(least))

    gap = (before_gap + gap_excess)[:-1, None]
    stated = problem.held_bytes
    forward = entered[:-1, None] + np.maximum(problem.forward_excess_bytes, stated)
    forward = np.where(problem.allowed, np.maximum(forward, gap), np.inf)
    risen = np.maximum(stated + problem.backward_excess_bytes, nets)
    backward = arrived[:, None] + risen
    backward = np.where(problem.allowed, backward, np.inf)
    return PrefixForm(
        held_bytes=held,
        shared_bytes=shared,
        saves_output=saves,
        has_pairs=bool(np.count_nonzero(shared)),
        forward_bytes=forward,
        backward_bytes=backward,
        need_bytes=np.maximum(forward, backward),
        extra_bytes=extra,
        has_extra=bool(extra.any()),
        head_bytes=float(before_gap[-1] + gap_excess[-1]),
        step_bytes=float(entered[-1] + least.sum())
        + problem.optimizer_state_bytes
        + problem.step_excess_bytes,
    )


def _boundaries(problem: PlanningProblem) -> tuple[FloatArray, FloatArray, BoolArray]:
    """Return (E, K) held at the least, shared on top, and who saves what is shared."""
    held, allowed = problem.held_bytes, problem.allowed
    shared = np.zeros(held.shape)
    if not np.count_nonzero(problem.releases_input):
        return held, shared, np.zeros(held.shape, np.bool_)
    releases = np.logical_and(problem.releases_input, allowed)
    saves = np.logical_and(problem.saves_output, allowed)
    goes = np.where(releases, problem.input_bytes[:, None], 0.0)
    goes[1:][np.logical_and.reduce(saves[:-1] == allowed[:-1], axis=1)] = 0.0
    may_save = np.logical_or.reduce(saves[:-1], axis=1)
    shared[1:] = np.where(may_save[:, None], goes[1:], 0.0)
    is_shared = np.append(np.logical_or.reduce(shared[1:] > 0, axis=1), False)
    return held - goes, shared, saves & is_shared[:, None]


def prefix_peak(form: PrefixForm, choice: IntArray) -> float:
    """Peak of one plan, equal to the timeline's but for rounding.

    Args:
        form: The step, in prefix form.
        choice: (E,) index of each event's action.

    Returns:
        Bytes.
    """
    events = np.arange(len(choice))
    holds = form.held_bytes[events, choice]
    if form.has_pairs:
        saves = form.saves_output[events, choice][:-1]
        holds[1:] += np.where(saves, form.shared_bytes[events, choice][1:], 0.0)
    before = holds.cumsum() - holds
    extra = form.extra_bytes[events, choice]
    total = float(extra.sum())
    later = total - extra.cumsum()
    forward = before + form.forward_bytes[events, choice]
    backward = before + form.backward_bytes[events, choice] + later
    needs = np.maximum(forward, backward)
    head = form.head_bytes + float(holds.sum())
    return max(float(needs.max(initial=0.0)), head, form.step_bytes + total)


def least_suffix(form: PrefixForm) -> FloatArray:
    """Least peak of the events from each one on, were nothing held before it.

    Walks the events backwards: what event e and its successors need is either the
    peak of e's own segments or its successors' need on top of what e holds. Where nets
    depend on the action, every event is taken to have its least: a lower bound.

    Args:
        form: The step, in prefix form.

    Returns:
        (2, E + 1) bytes, where the event before has not saved its output and where it
        has; the first entry is the least peak of the whole step, the optimizer's left
        aside.
    """
    free = shared = form.head_bytes
    backwards = [(free, shared)]
    for needs, holds, shares, saves in reversed(_rows(form)):
        if not form.has_pairs:
            free = shared = _least_need(needs, holds, repeat(free))
        else:
            behind = [shared if is_saved else free for is_saved in saves]
            free = _least_need(needs, holds, behind)
            holds = [hold + share for hold, share in zip(holds, shares, strict=True)]
            shared = _least_need(needs, holds, behind)
        backwards.append((free, shared))
    return np.array(backwards[::-1]).T


def _least_need(
    needs: Sequence[float], holds: Sequence[float], behind: Iterable[float]
) -> float:
    """Return what an event and those behind it need, by the best of its actions."""
    least = math.inf
    for need, hold, after in zip(needs, holds, behind, strict=False):
        peak = need if need > after + hold else after + hold
        if peak < least:
            least = peak
    return least


def least_peak_choice(form: PrefixForm, cost: FloatArray) -> IntArray:
    """Choose the actions of the least peak, whatever they need on the host.

    Where nets depend on the action it is a guess; see `least_peak.least_peak`.

    Args:
        form: The step, in prefix form.
        cost: (E, K) what the action costs, in any unit.

    Returns:
        (E,) actions; among equals the one that holds least, then the cheapest.
    """
    least: list[list[float]] = least_suffix(form).tolist()
    is_saved = False
    choice = []
    rows = zip(_rows(form), cost.tolist(), strict=True)
    for event, ((needs, holds, shares, saves), costs) in enumerate(rows):
        own = [h + s if is_saved else h for h, s in zip(holds, shares, strict=True)]
        best = min(
            (own[action], costs[action], action)
            for action, need in enumerate(needs)
            if max(need, least[saves[action]][event + 1] + own[action])
            <= least[is_saved][event]
        )
        choice.append(best[-1])
        is_saved = saves[best[-1]]
    return np.array(choice, dtype=np.intp)


def _rows(
    form: PrefixForm,
) -> list[tuple[list[float], list[float], list[float], list[bool]]]:
    """Return (E,) needs, bytes held, bytes shared and who saves, (K,) each."""
    tables = form.need_bytes, form.held_bytes, form.shared_bytes, form.saves_output
    return list(zip(*(table.tolist() for table in tables), strict=True))
