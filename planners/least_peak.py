"""The actions of the least peak, also where what a backward leaves depends on them.

There (see Note: [Prefix form] in ``prefix.py``) a walk over the events has to remember
three numbers: the bytes held, the level, which is the highest that the backwards of its
events will reach if those of later events leave the least they can, and the highest
peak of its forwards. Of two walks that have come equally far, the one that is no larger
in any of the three is at least as good, and the other is dropped, unless the next event
may share what the last one has saved, and only the first has. Where too many are left,
those of the least bound on the final peak stay.
"""

from typing import NamedTuple

import numpy as np

from .base import BoolArray, FloatArray, IntArray
from .prefix import PrefixForm, least_peak_choice, least_suffix, prefix_peak
from .trails import Trail, read_trail

# The sums of a search and those of `prefix_peak` come in another order.
_ROUNDING = 2.0**-45
_WIDTH = 256


class _Labels(NamedTuple):
    """(n,) walks that have come equally far."""

    held: FloatArray
    level: FloatArray
    peak: FloatArray
    """Of their forwards."""
    saved: BoolArray
    """Whether their last event saved an output that the next one may share."""

    def picked(self, at: IntArray) -> "_Labels":
        """Read some of them, of (K, n) or (n,) arrays."""
        held, level, peak = (numbers.ravel()[at] for numbers in self[:3])
        return _Labels(held, level, peak, self.saved.ravel()[at])

    def bound(self, suffix_bytes: FloatArray) -> FloatArray:
        """Return (n,) the least that they can end with.

        Args:
            suffix_bytes: (2,) what the rest needs, by whether its input is saved.
        """
        rest = suffix_bytes[self.saved.astype(np.intp)]
        peak = np.maximum(self.peak, self.held + rest)
        least: FloatArray = np.maximum(peak, self.level)
        return least


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
    suffix, peak = least_suffix(form), prefix_peak(form, guess)
    if peak <= max(float(suffix[0, 0]), form.step_bytes):
        return guess
    choice = _search(form, suffix, peak * (1 + _ROUNDING))
    if choice is None or prefix_peak(form, choice) > peak:
        return guess
    return choice


def _search(form: PrefixForm, suffix: FloatArray, highest: float) -> IntArray | None:
    """Walk the events once, below a peak; carry on the labels that none other beats."""
    none = np.zeros(1, dtype=np.bool_)
    labels = _Labels(np.zeros(1), np.full(1, form.step_bytes), np.zeros(1), none)
    trail: Trail = []
    for event, suffix_bytes in enumerate(suffix.T[1:]):
        n_before = len(labels.held)
        grown = _grown(labels, form, event)
        bound = grown.bound(suffix_bytes).ravel()
        stay = (bound <= highest).nonzero()[0]
        stay = stay[_undominated(grown.picked(stay))]
        if len(stay) > _WIDTH:
            stay = stay[_lowest(bound[stay], grown.level.ravel()[stay])]
        if not len(stay):
            return None
        trail.append((stay, n_before))
        labels = grown.picked(stay)
    peaks = labels.bound(suffix[:, -1])
    lowest = (peaks <= peaks.min()).nonzero()[0]
    return read_trail(trail, int(lowest[labels.held[lowest].argmin()]))


def _grown(labels: _Labels, form: PrefixForm, event: int) -> _Labels:
    """Walk one more event, by each action: (K, n) numbers."""
    forward = labels.held + form.forward_bytes[event][:, None]
    backward = labels.held + form.backward_bytes[event][:, None]
    shared = form.shared_bytes[event][:, None]
    saves = form.saves_output[event][:, None]
    return _Labels(
        held=labels.held
        + form.held_bytes[event][:, None]
        + np.where(labels.saved, shared, 0.0),
        level=np.maximum(labels.level + form.extra_bytes[event][:, None], backward),
        peak=np.maximum(labels.peak, forward),
        saved=np.broadcast_to(saves, forward.shape),
    )


def _lowest(bound: FloatArray, level: FloatArray) -> IntArray:
    """Positions of `_WIDTH` labels, the one that holds least among them.

    Half of them by their bound, which sees nothing of the levels to come; the others
    are those of the lowest levels.
    """
    chosen = np.zeros(len(bound), dtype=np.bool_)
    chosen[0] = True
    chosen[bound.argsort(kind="stable")[: _WIDTH // 2]] = True
    others = level.argsort(kind="stable")
    others = others[~chosen[others]]
    chosen[others[: _WIDTH - np.count_nonzero(chosen)]] = True
    return chosen.nonzero()[0]


def _undominated(labels: _Labels) -> IntArray:
    """Positions of the labels that no other beats, those that hold least first."""
    order: IntArray = np.lexsort((labels.saved, labels.peak, labels.level, labels.held))
    level, peak, saved = labels.level[order], labels.peak[order], labels.saved[order]
    beats = (level[:, None] <= level) & (peak[:, None] <= peak)
    beats &= saved[:, None] <= saved
    # Who comes before in the order holds no more; of equals the first stays.
    is_beaten = np.triu(beats, 1).any(axis=0)
    return order[~is_beaten]
