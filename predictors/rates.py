"""Fits the seconds of steps to their work: the rates of a device, and of its host.

Four rates predict a device's part of a context's steps: seconds for each FLOP of the
layers' forwards, for each byte that these save (which memory-bound operators follow),
for the plan's extra cost, and a fixed time. No rate is negative. On the simulated H100
the median error is 1% for steps with other rows and lengths.

A host that issues kernels more slowly than the device runs them decides instead: such a
step's time does not depend on its size, but grows with the layers that are recomputed.
The rates are fitted to the steps above this floor, the floor to the rest. A step at a
shape that the process never had takes longer, too: libraries choose kernels and build
plans for it (cuDNN's attention, 23 to 37 ms each).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

_Floats: TypeAlias = NDArray[np.float64]
_Flags: TypeAlias = NDArray[np.bool_]

_LEAST, _LEAST_SHAPES = 6, 3
"""With fewer steps or shapes, no rates are fitted."""
_GUESS_WEIGHT = 0.1
"""The weight of a guess; a step has weight 1."""
COST, SECONDS, IS_NEW = 2, 3, 4
"""Places in a row of a timed step, which begins with its work."""
_ROUNDS = 4
"""Of the fit of steps above and below a host's floor."""
_TIMES_NOISE = 3.0
"""First times count from so many times the median error of other steps on: of noise
alone, half of the medians are above 0."""
_GOOD_ERROR = 0.02
"""With a smaller mean error, no floor is looked for: a fit takes some milliseconds."""
_BETTER_SHARE = 2.0 / 3.0
"""A floor is used if the fit's error is below this share, as for a knee of a series."""
_WEIGHTINGS = 5
"""Of a fit, each with less weight on steps with large errors."""


class Rates(NamedTuple):
    """The rates that predict a step's seconds."""

    fixed: float
    """Seconds of every step, with its share of the optimizer step."""
    flop: float
    """Seconds for each FLOP of the layers' forwards, backward included."""
    byte: float
    """Seconds for each byte that these save."""
    extra: float
    """Seconds for each 1 of the plan's cost."""
    floor: float = 0.0
    """Seconds of the host in every step, ..."""
    floor_extra: float = 0.0
    """and for each 1 of the plan's cost."""
    first: tuple[float, float] = (0.0, 0.0)
    """Seconds that the first step at a shape takes beyond, if it keeps all, and if not:
    a recomputation meets the shape on a thread that has not."""
    optimizer: float = 0.0
    """Seconds of a step's share of the optimizer step."""

    def parts(
        self, flops: float, held_bytes: float, cost: float
    ) -> tuple[float, float, float]:
        """Return a step's seconds, the fixed part, and the part for its plan.

        The arguments are what `step_work` returns. A first time is not counted.
        """
        one = np.array([[flops, held_bytes, cost]])
        whole = float(self.kept(one)[0])
        one[0, COST] = 0.0
        extra = whole - float(self.kept(one)[0])
        fixed = max(self.fixed, self.floor)
        return whole + self.optimizer, fixed + self.optimizer, extra

    def device(self, work: _Floats) -> _Floats:
        """Return (n_steps,) the device's seconds for (n_steps, 3) work."""
        rates = np.array([self.flop, self.byte, self.extra])
        seconds: _Floats = self.fixed + work @ rates
        return seconds

    def host(self, work: _Floats) -> _Floats:
        """Return (n_steps,) the host's."""
        seconds: _Floats = self.floor + self.floor_extra * work[:, COST]
        return seconds

    def kept(self, work: _Floats) -> _Floats:
        """Return (n_steps,) the longer of both."""
        longer: _Floats = np.maximum(self.device(work), self.host(work))
        return longer


def fit_rates(known: Sequence[tuple[float, ...]]) -> Rates | None:
    """Fit the rates of steps, without the seconds of optimizer steps.

    Args:
        known: (n_steps,) Work, seconds, and 1 for a new shape.

    Returns:
        None if the steps or their shapes are too few, or if they took no time.
    """
    if len(known) < _LEAST or len({row[0] for row in known}) < _LEAST_SHAPES:
        return None
    rates = _with_first_times(np.array(known))
    has_time = rates.fixed + rates.flop + rates.byte + rates.floor > 0.0
    return rates if has_time else None


def _with_first_times(rows: _Floats) -> Rates:
    """Return the rates of steps at shapes that came before, and what first times add.

    Args:
        rows: (n_steps, 5) Work, seconds, and 1 for a new shape.
    """
    work, seconds, new = rows[:, :SECONDS], rows[:, SECONDS], rows[:, IS_NEW] > 0.0
    if (~new).sum() < 2 * _LEAST or len(np.unique(work[~new, 0])) < _LEAST_SHAPES:
        return _with_floor(work, seconds)  # nothing tells first times apart
    rates = _with_floor(work[~new], seconds[~new])
    beyond = seconds - rates.kept(work)
    noise = _TIMES_NOISE * float(np.median(np.abs(beyond[~new])))
    more = work[:, COST] > 0.0
    first = [
        max(0.0, float(np.median(beyond[kind]))) if kind.sum() >= _LEAST_SHAPES else 0.0
        for kind in (new & ~more, new & more)
    ]
    first = [own if own > noise else 0.0 for own in first]
    return rates._replace(first=(first[0] or first[1], first[1] or first[0]))


def _with_floor(work: _Floats, seconds: _Floats) -> Rates:
    """Return the rates of the device alone, or with a host's floor if it fits better.

    Args:
        work: (n_steps, 3) FLOPs, bytes and cost.
        seconds: (n_steps,) Seconds.
    """
    place = work[:, 0].argsort().argsort()
    best, least = Rates(0.0, 0.0, 0.0, 0.0), np.inf
    for n_below in (0, len(work) // 2, len(work)):
        above = place >= n_below
        for _ in range(_ROUNDS):
            rates, before = _split(work, seconds, above), above
            if n_below:
                above = rates.device(work) >= rates.host(work)
            if (above == before).all():
                break
        error = float(np.abs(rates.kept(work) / seconds - 1.0).mean())
        if error < (_BETTER_SHARE if n_below else 1.0) * least:
            best, least = rates, error
        if least < _GOOD_ERROR:
            break
    return best


def _split(work: _Floats, seconds: _Floats, above: _Flags) -> Rates:
    """Return the rates of the steps above the host's floor, and the floor of the rest.

    Args:
        work: (n_steps, 3) FLOPs, bytes and cost.
        seconds: (n_steps,) Seconds.
        above: (n_steps,) Whether the device decides.
    """
    found: list[float] = []
    for own, columns in ((above, [0, 1, 2]), (~above, [2])):
        if own.sum() < 2:
            found += [0.0] * (1 + len(columns))
            continue
        design = np.column_stack((np.ones(own.sum()), work[own][:, columns]))
        # A guess for when plans differ little: a recomputation takes a third of a
        # layer's time.
        guess = np.zeros(design.shape[1])
        if len(columns) > 1:
            flops = work[own][:, 0].mean()
            guess[1], guess[-1] = -flops / 3.0, flops
        guess *= _GUESS_WEIGHT / seconds[own].mean()
        found += _weighted_rates(design, seconds[own], guess).tolist()
    fixed, flop, byte, extra, floor, floor_extra = found
    return Rates(fixed, flop, byte, extra, floor, floor_extra)


def _weighted_rates(work: ArrayLike, seconds: ArrayLike, guess: ArrayLike) -> _Floats:
    """Fit seconds as a sum of work, each times a non-negative rate.

    It minimizes the squares of relative errors. A step with more than three times the
    median error gets less weight: it may have waited for something else.

    Args:
        work: (n_steps, n_rates) Work of each step, such as 1, FLOPs and bytes. At most
            about six columns.
        seconds: (n_steps,) Positive seconds of each step.
        guess: (n_rates,) A weak prior: the product with the rates should be near 0.

    Returns:
        (n_rates,) The rates, in seconds for each 1 of work.
    """
    values = np.asarray(seconds, dtype=np.float64)[:, None]
    shares = np.vstack((np.asarray(work, dtype=np.float64) / values, guess))
    target = np.append(np.ones(len(values)), 0.0)
    scale = np.linalg.norm(shares, axis=0)
    shares = shares / np.where(scale == 0.0, 1.0, scale)
    weights = np.ones(len(target))
    rates = np.zeros(shares.shape[1])
    for _ in range(_WEIGHTINGS):
        rates = _non_negative(shares * weights[:, None], target * weights)
        off = np.abs(shares @ rates - target)[:-1]
        weights[:-1] = 1.0 / np.sqrt(
            np.maximum(1.0, off / (3.0 * np.median(off) + 1e-4))
        )
    return rates / np.where(scale == 0.0, 1.0, scale)


def _non_negative(design: _Floats, target: _Floats) -> _Floats:
    """Return the non-negative least squares, by trying all subsets of the columns.

    There are about four columns. SciPy's solver would have to be imported in every
    session that makes a report.
    """
    best, least = np.zeros(design.shape[1]), float(target @ target)
    for used in itertools.product((True, False), repeat=design.shape[1]):
        columns = np.flatnonzero(used)
        found = np.linalg.lstsq(design[:, columns], target, rcond=None)[0]
        rest = target - design[:, columns] @ found
        if (found >= 0.0).all() and rest @ rest < least:
            best, least = np.zeros(design.shape[1]), float(rest @ rest)
            best[columns] = found
        if all(used) and best.any():
            break
    return best
