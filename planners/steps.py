"""Neighbouring events, walked in one step by each combination of their actions."""

from dataclasses import dataclass

import numpy as np

from .base import FloatArray, IntArray
from .limits import Limits
from .prefix import PrefixForm

# Up to this many combinations of actions, neighbouring events are walked in one step.
_STEP_CHOICES = 8


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Steps:
    """Runs of neighbouring events, each with every combination of their actions."""

    held: FloatArray
    """(T, Q, 1) bytes that the combination holds."""

    cost: FloatArray
    """(T, Q, 1) what it costs."""

    limit: FloatArray
    """(T, Q, 1) the most that may be held before it; -inf where it is not allowed."""

    extra: FloatArray
    """(T, Q, 1) what its nets have beyond the least."""

    backward: FloatArray
    """(T, Q, 1) highest level of its backwards, less what is held before it."""

    low_until: FloatArray
    """(T,) the most that may be held before it so that no level of its own matters."""

    low_level: FloatArray
    """(T,) a level behind it that does not matter: there is room for the most that
    later events can leave."""

    n_events: int
    """Events in one step; the last step may be filled up with empty ones. It is one
    where pairs of events share what they hold."""


def join(
    form: PrefixForm, cost: FloatArray, limits: Limits, budget_bytes: float
) -> Steps:
    """Join neighbouring events, so that fewer and longer arrays are handled.

    Args:
        form: The step, in prefix form.
        cost: (E, K) what the action costs.
        limits: The most that may be held.
        budget_bytes: The highest level allowed.
    """
    n_events, n_actions = cost.shape
    limit, together = limits.before, 1
    while n_actions > 1 and n_actions ** (together + 1) <= _STEP_CHOICES:
        together += 1
    if form.has_pairs:
        together = 1
    n_steps = -(-n_events // together)
    filled = np.zeros((5, n_steps * together, n_actions))
    backward = np.where(limit > -np.inf, form.backward_bytes, -np.inf)
    filled[:, :n_events] = form.held_bytes, cost, limit, form.extra_bytes, backward
    filled[2, n_events:], filled[4, n_events:] = np.inf, -np.inf
    events = filled.reshape(5, n_steps, together, n_actions)

    joined = events[:, :, 0]
    for i in range(1, together):
        following = events[:, :, i, None]
        before = joined[..., None]
        held, more, extra = before[[0, 1, 3]] + following[[0, 1, 3]]
        lowest = np.minimum(before[2], following[2] - before[0])
        highest = np.maximum(before[4] + following[3], before[0] + following[4])
        joined = np.stack([held, more, lowest, extra, highest]).reshape(5, n_steps, -1)
    held, more, lowest, extra, backward = joined
    most = extra.max(axis=1, initial=0.0)
    low_level = budget_bytes - (most.sum() - most.cumsum())
    low_until = low_level[:, None] - backward
    low_until[low_until >= lowest] = np.inf
    return Steps(
        held=held[..., None],
        cost=more[..., None],
        limit=lowest[..., None],
        extra=extra[..., None],
        backward=backward[..., None],
        low_until=low_until.min(axis=1, initial=np.inf),
        low_level=low_level,
        n_events=together,
    )


def trace(
    trail: list[tuple[IntArray, int]], at: int, steps: Steps, shape: tuple[int, ...]
) -> IntArray:
    """Read the actions of one of the last walks.

    Args:
        trail: (T,) which of a step's walks stayed, and how many there were before it.
        at: The walk's position behind the last step.
        steps: The steps walked.
        shape: E and K.

    Returns:
        (E,) actions.
    """
    n_events, n_actions = shape
    combinations = np.zeros(len(trail), dtype=np.intp)
    for t in range(len(trail) - 1, -1, -1):
        came, n_walks = trail[t]
        combinations[t], at = divmod(int(came[at]), n_walks)
    powers = n_actions ** np.arange(steps.n_events - 1, -1, -1)
    digits: IntArray = combinations[:, None] // powers % n_actions
    return digits.ravel()[:n_events].astype(np.intp)
