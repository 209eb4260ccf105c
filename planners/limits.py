"""The most that walks over the events may hold."""

from typing import NamedTuple

import numpy as np

from .base import FloatArray
from .prefix import PrefixForm


class Limits(NamedTuple):
    """The most that may be held, so that the rest of a walk keeps the budget."""

    before: FloatArray
    """(E, K) before the event under the action; -inf where it is not allowed."""

    behind: FloatArray
    """(E, K) behind it; infinite where what may be held before it says it all."""


def limits_of(form: PrefixForm, headroom: FloatArray, budget_bytes: float) -> Limits:
    """Find the limits of a step.

    Where an event's bytes depend on the event before, the limit before it counts the
    least of them, and the other limit, which depends on whether the event itself saves
    its output, counts what it does hold.

    Args:
        form: The step, in prefix form.
        headroom: (2, E + 1) the most that may be held before each event, and at the
            end: where the event before has not saved its output, and where it has.
        budget_bytes: The highest level allowed.
    """
    before = np.minimum(
        budget_bytes - form.need_bytes, headroom[0, 1:, None] - form.held_bytes
    )
    if not form.has_pairs:
        return Limits(before, np.broadcast_to(np.inf, before.shape))
    saved, free = headroom[1, 1:, None], headroom[0, 1:, None]
    return Limits(before, np.where(form.saves_output, saved, free))
