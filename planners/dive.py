"""A first walk over the events: cheap to find, and mostly within percents of the best.

It is what a search measures itself by: whatever cannot end cheaper is left out.
"""

from collections.abc import Sequence

import numpy as np

from .base import FloatArray, IntArray
from .limits import Limits
from .prefix import PrefixForm
from .relaxed import Rest


def dive(
    form: PrefixForm,
    cost: FloatArray,
    limits: Limits,
    budget_bytes: float,
    rests: Sequence[Rest],
) -> IntArray | None:
    """Take, event by event, what costs least with what the rest then costs at least.

    Args:
        form: The step, in prefix form.
        cost: (E, K) what the action costs.
        limits: The most that may be held.
        budget_bytes: The highest level allowed.
        rests: (E + 1,) what the rest costs at least, by the number of events behind.

    Returns:
        (E,) actions. None where it ends before the last event: with nets that depend
        on the action it may.
    """
    held, level, is_saved = 0.0, form.step_bytes, False
    choice = []
    tables = (
        form.held_bytes,
        form.shared_bytes,
        form.saves_output,
        cost,
        limits.before,
        limits.behind,
        form.extra_bytes,
        form.backward_bytes,
    )
    rows = zip(*(table.tolist() for table in tables), rests[1:], strict=True)
    for holds, shares, saves, costs, before, behind, extras, backwards, rest in rows:
        if is_saved:
            holds = [sum(both) for both in zip(holds, shares, strict=True)]
        hopes = [
            (spent + rest.at(held + holds[action]), action)
            for action, spent in enumerate(costs)
            if held <= before[action]
            and held + holds[action] <= behind[action]
            and level + extras[action] <= budget_bytes
            and held + backwards[action] <= budget_bytes
        ]
        if not hopes:
            return None
        _, action = min(hopes)
        level = max(level + extras[action], held + backwards[action])
        held, is_saved = held + holds[action], saves[action]
        choice.append(action)
    return np.array(choice, dtype=np.intp)
