"""Walks over the events where what a backward leaves depends on the action.

There (see Note: [Prefix form] in ``prefix.py``) a walk has to remember two numbers:
the bytes held, and the level, the highest that the backwards of its events will reach
if those of later events leave the least they can. So walks are carried as labels of
three numbers, held bytes, level, and a value that is to be small. Of two labels that
have come equally far, the one that is no larger in any of the three is at least as
good, and the other is dropped. Where too many are left, those of the lowest bound on
the final value stay.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from .base import FloatArray, IntArray
from .frontier import Walk, relaxed_rests
from .prefix import PrefixForm, least_peak_choice, least_suffix, prefix_peak

# The sums of a search and those of `prefix_peak` come in another order.
_ROUNDING = 2.0**-45
_LEAST_PEAK_WIDTH = 256


class _Labels(NamedTuple):
    """(n,) walks that have come equally far."""

    held: FloatArray
    level: FloatArray
    value: FloatArray


_Grow: TypeAlias = Callable[[_Labels, int], FloatArray]
"""(K, n) values of the labels behind one more event, by its action."""
_Bound: TypeAlias = Callable[[_Labels, int], FloatArray]
"""(n,) least values that the labels can end with, by the number of events behind."""


class _Found(NamedTuple):
    """The walks that came to the end, and how the search went."""

    last: _Labels
    trail: list[tuple[IntArray, int]]
    left_out: float
    """The lowest bound of those that were dropped for want of room."""

    def choice(self, best: int) -> IntArray:
        """Read the (E,) actions of one of the walks."""
        actions = np.zeros(len(self.trail), dtype=np.intp)
        for event in range(len(self.trail) - 1, -1, -1):
            came, n_before = self.trail[event]
            actions[event], best = divmod(int(came[best]), n_before)
        return actions


def cheapest_walk(
    form: PrefixForm,
    cost: FloatArray,
    room: FloatArray,
    budget_bytes: float,
    width: int,
) -> Walk | None:
    """Find the cheapest choice of actions; arguments are as for the frontier's walk.

    Returns:
        The cheapest walk found. None where none was: no walk keeps the budget, or none
        of those that were carried on.
    """
    rests = relaxed_rests(form, cost, room)

    def grow(before: _Labels, event: int) -> FloatArray:
        value: FloatArray = before.value + cost[event][:, None]
        return value

    def bound(labels: _Labels, n_behind: int) -> FloatArray:
        value: FloatArray = labels.value + rests[n_behind].at(labels.held)
        return value

    found = _search(form, room, budget_bytes, width, grow, bound)
    values = found.last.value
    if not len(values):
        return None
    best = int(values.argmin())
    proved = bool(values[best] <= found.left_out)
    return Walk(choice=found.choice(best), exact=proved)


def least_peak(form: PrefixForm, cost: FloatArray) -> IntArray:
    """Choose the actions of the least peak, whatever they need on the host.

    Args:
        form: The step, in prefix form.
        cost: (E, K) what the action costs, in any unit.

    Returns:
        (E,) actions. Where nets depend on the action and more walks than can be
        carried on are undecided for long, the least peak may be missed.
    """
    guess = least_peak_choice(form, cost)
    if not form.has_extra:
        return guess
    highest = prefix_peak(form, guess) * (1 + _ROUNDING)
    suffix = least_suffix(form)

    def grow(before: _Labels, event: int) -> FloatArray:
        forward = before.held + form.forward_bytes[event][:, None]
        value: FloatArray = np.maximum(before.value, forward)
        return value

    def bound(labels: _Labels, n_behind: int) -> FloatArray:
        ends = np.maximum(labels.value, labels.held + suffix[n_behind])
        value: FloatArray = np.maximum(ends, labels.level)
        return value

    room = highest - suffix
    found = _search(form, room, highest, _LEAST_PEAK_WIDTH, grow, bound)
    if not len(found.last.value):
        return guess
    peaks = bound(found.last, len(suffix) - 1)
    lowest = (peaks <= peaks.min()).nonzero()[0]
    choice = found.choice(int(lowest[found.last.held[lowest].argmin()]))
    if prefix_peak(form, choice) > prefix_peak(form, guess):
        return guess
    return choice


def _search(
    form: PrefixForm,
    room: FloatArray,
    budget_bytes: float,
    width: int,
    grow: _Grow,
    bound: _Bound,
) -> _Found:
    """Walk the events once, and carry on the labels that none other beats."""
    labels = _Labels(np.zeros(1), np.full(1, form.step_bytes), np.zeros(1))
    trail: list[tuple[IntArray, int]] = []
    left_out = np.inf
    for event in range(len(form.held_bytes)):
        n_before = len(labels.held)
        grown = _Labels(
            labels.held + form.held_bytes[event][:, None],
            np.maximum(
                labels.level + form.extra_bytes[event][:, None],
                labels.held + form.backward_bytes[event][:, None],
            ),
            grow(labels, event),
        )
        forward = labels.held + form.forward_bytes[event][:, None]
        fits = (forward <= budget_bytes) & (grown.level <= budget_bytes)
        fits &= grown.held <= room[event + 1]
        stay = fits.ravel().nonzero()[0]
        stay = stay[_undominated(_picked(grown, stay))]
        if len(stay) > width:
            kept, dropped = _spread(_picked(grown, stay), bound, event + 1, width)
            left_out = min(left_out, dropped)
            stay = stay[kept]
        trail.append((stay, n_before))
        labels = _picked(grown, stay)
    return _Found(labels, trail, left_out)


def _spread(
    labels: _Labels, bound: _Bound, n_behind: int, width: int
) -> tuple[IntArray, float]:
    """Positions of at most `width` labels, and the lowest bound left out.

    Half of them by their bound, which sees nothing of the levels to come; the others
    are those of the lowest levels, and the one that holds least.
    """
    hope = bound(labels, n_behind)
    chosen = np.zeros(len(hope), dtype=np.bool_)
    chosen[0] = True  # holds least
    chosen[hope.argsort(kind="stable")[: width // 2]] = True
    for position in labels.level.argsort(kind="stable").tolist():
        if np.count_nonzero(chosen) >= width:
            break
        chosen[position] = True
    return chosen.nonzero()[0], float(hope[~chosen].min(initial=np.inf))


def _picked(labels: _Labels, at: IntArray) -> _Labels:
    """Read some of the labels, of (K, n) or (n,) arrays."""
    return _Labels(*(numbers.ravel()[at] for numbers in labels))


def _undominated(labels: _Labels) -> IntArray:
    """Positions of the labels that no other beats, those that hold least first."""
    order: IntArray = np.lexsort((labels.value, labels.level, labels.held))
    level, value = labels.level[order], labels.value[order]
    beats = (level[:, None] <= level) & (value[:, None] <= value)
    # Who comes before in the order holds no more; of equals the first stays.
    is_beaten = np.triu(beats, 1).any(axis=0)
    return order[~is_beaten]
