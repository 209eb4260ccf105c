"""The timeline, rearranged for searching, and the search: one dynamic programme.

Note: [Prefix form]. Let P[e] be the bytes held by the calls before call e. The
gap before e, e's forward and e's backward all rise over the same P[e]: what later
calls held is released before e's backward begins. Everything else on the level (gaps,
what backwards leave for good) is the same in every plan. So the budget is kept exactly
if

    P[e] + need_bytes[e, a]  <= budget    for every call under its action,
    P[E] + head_bytes        <= budget.

A plan then is a walk over the calls in order that only has to remember how many bytes
it holds, and fewer is never worse: a knapsack with a limit at every item. So of walks
that have come equally far those are carried on that no other matches in bytes and cost.

Where the budget of host memory binds, a walk remembers its host bytes, too. They are
cut into a few classes of equal width, and walks are matched within their class.
"""

from dataclasses import dataclass

import numpy as np

from .problem import BoolArray, FloatArray, IntArray, PlanningProblem

_HOST_CLASSES = 16


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PrefixForm:
    """The peak of a step, split by what the calls before hold."""

    held_bytes: FloatArray
    """(C, K) bytes held from the call's exit to its backward."""

    need_bytes: FloatArray
    """(C, K) peak of the gap before it, its forward and its backward, less what the
    calls before hold; infinite where the action is not allowed."""

    head_bytes: float
    """Peak of the head, less what all calls hold."""

    host_bytes: FloatArray
    """(C, K) bytes of host memory."""

    host_budget_bytes: float
    """The most that all calls together may need of it."""

    @classmethod
    def of(cls, problem: PlanningProblem) -> "PrefixForm":
        """Rearrange a problem, see Note: [Prefix form]."""
        held, retained, gaps = (
            problem.held_bytes,
            problem.backward_retained_bytes,
            problem.gap_bytes,
        )
        entered = problem.start_bytes + np.cumsum(gaps)
        gap_peak = entered - gaps + np.maximum(problem.gap_transient_bytes, gaps)
        # Arrival of the gradient, without what the calls hold themselves.
        arrived = entered[-1] + retained.sum() - np.cumsum(retained)

        forward = np.maximum(problem.forward_transient_bytes, held)
        forward = np.maximum(entered[:-1, None] + forward, gap_peak[:-1, None])
        risen = np.maximum(held + problem.backward_transient_bytes, retained[:, None])
        need = np.maximum(forward, arrived[:, None] + risen)
        return cls(
            held_bytes=held,
            need_bytes=np.where(problem.allowed, need, np.inf),
            head_bytes=float(gap_peak[-1]),
            host_bytes=problem.host_bytes,
            host_budget_bytes=problem.host_budget_bytes,
        )

    def least_suffix(self) -> FloatArray:
        """Return the least peak of the calls from each one on, with nothing before.

        Returns:
            (C + 1,) bytes; the first is the least peak of the step.
        """
        least = np.full(len(self.held_bytes) + 1, self.head_bytes)
        for call in range(len(least) - 2, -1, -1):
            after = least[call + 1] + self.held_bytes[call]
            least[call] = np.maximum(self.need_bytes[call], after).min()
        return least

    def cheapest_walk(
        self,
        cost: FloatArray,
        budget_bytes: float,
        width: int,
        *,
        counts_host: bool = False,
    ) -> tuple[IntArray, bool] | None:
        """Find the cheapest actions within a budget, or nearly.

        Args:
            cost: (C, K) what the actions cost.
            budget_bytes: The highest level allowed.
            width: Walks carried on, of each class of host bytes. Where there are more,
                the bytes between the least and the most that any holds are cut in so
                many equal parts, and the cheapest of each part goes on.
            counts_host: Whether the host budget is to be kept.

        Returns:
            (C,) index of each call's action, and whether no walk was left out that
            might be cheaper; None where no choice keeps the budget. It keeps the budget
            but for rounding: the timeline adds the same numbers in another order.
        """
        # The most that may be held before each call, so that the rest can be walked.
        rest = budget_bytes - self.least_suffix()[1:, None] - self.held_bytes
        limits = np.minimum(budget_bytes - self.need_bytes, rest)[:, :, None]
        steps = self.held_bytes[:, :, None], cost[:, :, None], limits
        is_allowed = self.need_bytes < np.inf
        least_host = np.where(is_allowed, self.host_bytes, np.inf).min(axis=1)
        host_limits = self.host_budget_bytes - least_host.sum() + least_host.cumsum()
        class_bytes = self.host_budget_bytes / _HOST_CLASSES or 1.0
        # Costs of walks differ by less.
        dearest = 2.0 * float(np.abs(cost).sum()) + 1.0

        held, spent, host = np.zeros((3, 1))
        group: FloatArray | None = None
        trail: list[tuple[IntArray, int]] = []
        is_optimal = not counts_host
        for call, (hold, price, limit) in enumerate(zip(*steps, strict=True)):
            n_before = len(held)
            grown = (held + hold).ravel()
            costs = spent + price
            costs[held > limit] = np.inf
            paid = costs.ravel()
            if counts_host:
                used = (host + self.host_bytes[call][:, None]).ravel()
                paid[used > host_limits[call]] = np.inf
                group = used // class_bytes
                order = np.lexsort((grown, group))
                # Every class is cheaper than those before it, so none matches another.
                kept = order[_undominated((paid - dearest * group)[order])]
                host, group = used[kept], group[kept]
            else:
                order = grown.argsort(kind="stable")
                kept = order[_undominated(paid[order])]
            if not len(kept):
                return None
            held, spent = grown[kept], paid[kept]
            if len(kept) > width:
                is_optimal = False
                stay = _spread(held, group, width)
                kept, held, spent = kept[stay], held[stay], spent[stay]
                host = host[stay] if counts_host else host
            trail.append((kept, n_before))
        return _read(trail, int(spent.argmin())), is_optimal


def _undominated(cost: FloatArray) -> BoolArray:
    """Mark the walks, least bytes first, that cost less than all before them."""
    is_cheaper = np.empty(len(cost), np.bool_)
    is_cheaper[:1] = cost[:1] < np.inf
    lowest = np.minimum.accumulate(cost)
    np.less(cost[1:], lowest[:-1], out=is_cheaper[1:])
    return is_cheaper


def _spread(held: FloatArray, group: FloatArray | None, width: int) -> BoolArray:
    """Choose walks that are spread over the bytes held: the cheapest of each part.

    Args:
        held: (n,) by class, then ascending, as costs descend.
        group: (n,) the classes; None for a single one.
        width: Parts.

    Returns:
        (n,) whether a walk stays: the last of each part, and the first of each class,
        who holds least and can walk on longest.
    """
    stay = np.ones(len(held), np.bool_)
    low, high = held.min(), held.max()
    part = ((held - low) * (width / (high - low or 1.0))).astype(np.intp)
    np.not_equal(part[1:-1], part[2:], out=stay[1:-1])
    if group is not None:
        is_end = group[1:] != group[:-1]
        stay[1:-1] |= is_end[1:] | is_end[:-1]
    return stay


def _read(trail: list[tuple[IntArray, int]], at: int) -> IntArray:
    """Read the (C,) actions of one of the last walks, from the last to the first.

    Args:
        trail: By call the walks carried on, each as ``action * n_before + walk
            before``, and how many there were before.
        at: The walk's position among the last.
    """
    actions = np.zeros(len(trail), dtype=np.intp)
    for call in range(len(trail) - 1, -1, -1):
        kept, n_before = trail[call]
        actions[call], at = divmod(int(kept[at]), n_before)
    return actions
