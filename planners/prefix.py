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
it, a walk remembers how high its backwards will rise, too; see ``labels.py``.
"""

import math
from dataclasses import dataclass

import numpy as np

from .base import FloatArray, IntArray, PlanningProblem
from .pauses import give_way


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PrefixForm:
    """The peak of a step, split by what the events before hold.

    Needs are infinite where the action is not allowed.
    """

    held_bytes: FloatArray
    """(E, K) bytes held from the event's exit to its backward."""

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
    held = problem.held_bytes
    least = np.where(problem.allowed, nets, np.inf).min(axis=1)
    extra = np.where(problem.allowed, nets - least[:, None], 0.0)
    entered = problem.start_bytes + np.cumsum(gaps)
    gap_excess = np.maximum(problem.gap_excess_bytes, gaps)
    before_gap = entered - gaps
    # Arrival of the gradient, without what the events hold themselves.
    arrived = entered[-1] + (least.sum() - np.cumsum(least))

    gap = (before_gap + gap_excess)[:-1, None]
    forward = entered[:-1, None] + np.maximum(problem.forward_excess_bytes, held)
    forward = np.where(problem.allowed, np.maximum(forward, gap), np.inf)
    backward = arrived[:, None] + np.maximum(held + problem.backward_excess_bytes, nets)
    backward = np.where(problem.allowed, backward, np.inf)
    return PrefixForm(
        held_bytes=held,
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
        (E + 1,) bytes; the first entry is the least peak of the whole step, the
        optimizer's left aside.
    """
    least = form.head_bytes
    backwards = [least]
    rows = list(zip(form.need_bytes.tolist(), form.held_bytes.tolist(), strict=True))
    for needs, holds in reversed(rows):
        give_way()
        after, least = least, math.inf
        for need, hold in zip(needs, holds, strict=True):
            peak = need if need > after + hold else after + hold
            if peak < least:
                least = peak
        backwards.append(least)
    return np.array(backwards[::-1])


def least_peak_choice(form: PrefixForm, cost: FloatArray) -> IntArray:
    """Choose the actions of the least peak, whatever they need on the host.

    Where nets depend on the action it is a guess; see `labels.least_peak`.

    Args:
        form: The step, in prefix form.
        cost: (E, K) what the action costs, in any unit.

    Returns:
        (E,) actions; among equals the one that holds least, then the cheapest.
    """
    least, held = least_suffix(form), form.held_bytes
    peak = np.maximum(form.need_bytes, least[1:, None] + held)
    holds = np.where(peak <= least[:-1, None], held, np.inf)
    holds_least = holds <= holds.min(axis=1, initial=np.inf, keepdims=True)
    choice: IntArray = np.where(holds_least, cost, np.inf).argmin(axis=1)
    return choice
