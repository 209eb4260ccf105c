"""The search of the planners: the timeline rearranged, and one dynamic program.

Note: [Prefix form]. Let P[c] be the bytes held by the calls before call c. The gap
before c, the forward of c and the backward of c all start from the same P[c], because
what later calls hold is freed before the backward of c begins. Everything else on the
level (gaps, what backwards retain) is the same in every plan. So a plan keeps the
budget exactly if

    P[c] + need_bytes[c, a]  <= budget    for every call c under its action a,
    P[C] + head_bytes        <= budget.

So a partial plan, a walk over the first calls, only has to remember how many bytes it
holds, and fewer bytes are never worse: a knapsack with a limit at every item. Of the
walks over the same calls the search keeps those that no other walk beats in both bytes
and cost.

If the host budget limits the plan, a walk remembers its host bytes too. They are
divided into a few classes of equal width, and walks are compared within their class.
"""

import numpy as np

from .problem import BoolArray, FloatArray, IntArray, PlanningProblem

_HOST_CLASSES = 16


class PrefixForm:
    """The peaks of a step without what earlier calls hold: Note: [Prefix form].

    Args:
        problem: The step.

    Attributes:
        need_bytes: (C, K) The peak of the gap before each call, its forward and its
            backward, without what earlier calls hold; infinite if the action is not
            allowed.
        head_bytes: The peak of the head, without what the calls hold.
    """

    def __init__(self, problem: PlanningProblem) -> None:
        self._problem = problem
        held, retained = problem.held_bytes, problem.backward_retained_bytes
        gaps = problem.gap_bytes
        entered = problem.start_bytes + np.cumsum(gaps)
        gap_peak = entered - gaps + np.maximum(problem.gap_transient_bytes, gaps)
        # The level when the gradient arrives, without what the calls hold.
        arrived = entered[-1] + retained.sum() - np.cumsum(retained)

        forward = np.maximum(problem.forward_transient_bytes, held)
        forward = np.maximum(entered[:-1, None] + forward, gap_peak[:-1, None])
        risen = np.maximum(held + problem.backward_transient_bytes, retained[:, None])
        need = np.maximum(forward, arrived[:, None] + risen)
        self.need_bytes: FloatArray = np.where(problem.allowed, need, np.inf)
        self.head_bytes = float(gap_peak[-1])

    def least_suffix(self) -> FloatArray:
        """Return (C + 1,) the lowest peak from each call on, with nothing held before.

        The first entry is the lowest peak of the step.
        """
        held = self._problem.held_bytes
        least = np.full(len(held) + 1, self.head_bytes)
        for call in range(len(least) - 2, -1, -1):
            after = least[call + 1] + held[call]
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
        """Find the cheapest actions within a budget, or almost the cheapest.

        Args:
            cost: (C, K) The costs of the actions.
            budget_bytes: The highest level allowed.
            width: How many walks to keep, in each class of host bytes. If there are
                more, the range of their held bytes is divided into this many equal
                parts, and the cheapest walk of each part is kept.
            counts_host: Whether to keep the host budget.

        Returns:
            (C,) The index of each call's action, and whether the search dropped no walk
            that might be cheaper; None if no choice keeps the budget. Rounding may put
            it slightly over, because the timeline adds the numbers in another order.
        """
        # The most that may be held before each call, so that the rest is possible.
        problem, held_bytes = self._problem, self._problem.held_bytes
        rest = budget_bytes - self.least_suffix()[1:, None] - held_bytes
        limits = np.minimum(budget_bytes - self.need_bytes, rest)[:, :, None]
        steps = held_bytes[:, :, None], cost[:, :, None], limits
        host_bytes, host_budget = problem.host_bytes, problem.host_budget_bytes
        least_host = np.where(problem.allowed, host_bytes, np.inf).min(axis=1)
        host_limits = host_budget - least_host.sum() + least_host.cumsum()
        class_bytes = host_budget / _HOST_CLASSES or 1.0
        # No two walks differ by more in cost.
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
                used = (host + host_bytes[call][:, None]).ravel()
                paid[used > host_limits[call]] = np.inf
                group = used // class_bytes
                order = np.lexsort((grown, group))
                # With this offset every class is cheaper than the classes before it, so
                # walks of different classes do not beat each other.
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
    """Return (n,) whether a walk costs less than all walks with fewer bytes."""
    is_cheaper = np.empty(len(cost), np.bool_)
    is_cheaper[:1] = cost[:1] < np.inf
    lowest = np.minimum.accumulate(cost)
    np.less(cost[1:], lowest[:-1], out=is_cheaper[1:])
    return is_cheaper


def _spread(held: FloatArray, group: FloatArray | None, width: int) -> BoolArray:
    """Choose walks that are spread over the held bytes: the cheapest of each part.

    Args:
        held: (n,) Held bytes, by class, then ascending; costs descend.
        group: (n,) The classes; None for a single one.
        width: The number of parts.

    Returns:
        (n,) Whether a walk stays: the last of each part, and the first of each class,
        which holds least.
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
    """Return the (C,) actions of one of the final walks.

    Args:
        trail: For each call the walks kept, each as ``action * n_before + index of the
            walk before``, and ``n_before``, the number of walks before.
        at: The index of the final walk.
    """
    actions = np.zeros(len(trail), dtype=np.intp)
    for call in range(len(trail) - 1, -1, -1):
        kept, n_before = trail[call]
        actions[call], at = divmod(int(kept[at]), n_before)
    return actions
