"""Splits a global batch over ranks and micro-batches, so that all ranks end together.

Note: [The balance]
Samples are sorted by length, and a micro-batch is a run of consecutive samples. The
session forecasts which numbers of rows fit at a few lengths, the anchors, and their
seconds. A sample has at most the rows of the next longer anchor; seconds between
anchors are interpolated. A dynamic program finds the runs with the fewest seconds, at a
few prices of a run: fewer runs pad more. Runs are halved until each rank has equally
many, the longest first, and each goes to the rank with the fewest seconds so far
(longest processing time). The price and the number whose slowest rank is fastest win.

A forecast is used again until twice as many steps have run. As long as the session
knows too little, a micro-batch has one sample or two, and no more elements than the
longest sample. It has at most twice the samples, and twice the elements, of the largest
that was trained. A rank trains its micro-batches in random order: so the session sees
soon how sizes follow from different numbers of samples.
"""

from __future__ import annotations

import heapq
import math
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray
from torch import distributed

from mimose.arguments import check_integer
from mimose.budget import format_bytes
from mimose.distributed import ddp_around, most_of_ranks, why_waits
from mimose.distributed import n_ranks as count_ranks
from mimose.exceptions import InfeasibleBudgetError, MimoseError

if TYPE_CHECKING:
    from mimose.forecast import Forecast
    from mimose.session import Session

_Ints: TypeAlias = NDArray[np.int64]
_Floats: TypeAlias = NDArray[np.float64]
_Knots: TypeAlias = Sequence[Sequence[float]]
"""By anchor, the seconds of those of `_GRID` that may run; NaN if not known."""

_GRID: _Ints = np.unique(np.round(2.0 ** (np.arange(21) / 2))).astype(np.int64)
"""Rows of a micro-batch for which there are forecasts: 1, 2, 3, 4, 6, 8, 11, … 1024."""
_OCTAVE = 4
"""Anchors in a factor of two."""
_FEW = 2
_FIXED = 0.05
"""Assumed fixed time of a micro-batch, as a share of the longest sample's time, until
the session forecasts seconds."""
_SINGLE = 3
"""Until then, every third sample is alone."""
_PRICES = np.array([0.0, 0.5, 2.0, 8.0])
"""Prices of a run, as shares of the fewest seconds of one."""
_MORE = 3
"""Numbers of micro-batches a rank that are tried for each price."""
_SAFE = 0.9
"""The share of the budget that rows beyond the measured ones may fill."""
_MOST_KNOTS = 1024
_knots: weakref.WeakKeyDictionary[Any, LRUCache[Any, tuple[int, list[float]]]]
_knots = weakref.WeakKeyDictionary()
"""By session; then by budget, widths and most rows: the step until which an entry is
valid, and the entry."""
_wrappers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""By session: a weak reference to the `DistributedDataParallel` around its model."""


@dataclass(frozen=True, slots=True)
class Balance:
    """A global batch by rank and micro-batch; see `balance`."""

    indices: Sequence[Sequence[Sequence[int]]]
    """By rank and micro-batch, the samples. A sample comes once among the micro-batches
    whose weight is not 0, if something counts in it."""
    weights: Sequence[Sequence[float]]
    """By rank and micro-batch: the share of the whole, times the number of ranks."""
    seconds: Sequence[float] | None
    """By rank, the predicted seconds of its forwards and backwards; None if the session
    cannot predict them yet."""
    _lengths: _Ints = field(repr=False, compare=False)
    _session: Session = field(repr=False, compare=False)

    def of_rank(self, rank: int | None = None) -> Iterator[tuple[list[int], float]]:
        """Yield the samples and the weight of each micro-batch of a rank.

        Train each before you take the next: the session learns from these pairs. Under
        `DistributedDataParallel` all but the last run under ``no_sync``.

        Args:
            rank: The rank; None for that of this process.
        """
        is_one = count_ranks() < 2
        at = (0 if is_one else distributed.get_rank()) if rank is None else rank
        wrapper = None if is_one or rank is not None else self._ddp()
        parts = list(zip(self.indices[at], self.weights[at], strict=True))
        for number, (rows, weight) in enumerate(parts, 1):
            own = self._lengths[list(rows)]
            drawn = len(rows), *own.sum(0).tolist(), *own.max(0).tolist()
            self._session.collation.drew(drawn)
            is_last = number == len(parts)
            with nullcontext() if is_last or wrapper is None else wrapper.no_sync():
                yield list(rows), weight

    def _ddp(self) -> Any:
        if self._session not in _wrappers:
            found = ddp_around(self._session._raise_if_detached())
            _wrappers[self._session] = weakref.ref(found) if found else lambda: None
        return _wrappers[self._session]()


def balance(
    lengths: Sequence[int] | Mapping[str, Sequence[int]],
    session: Session,
    n_ranks: int | None = None,
    *,
    equal: bool | None = None,
    max_rows: int | None = None,
    counts: Sequence[float] | None = None,
) -> Balance:
    """Split a global batch over ranks and micro-batches, so that ranks end together.

    ::

        plan = mimose.balance(lengths, session)      # the same lengths on all ranks
        for rows, weight in plan.of_rank():
            (weight * model(**collate(rows)).loss).backward()
        optimizer.step()

    Each micro-batch is predicted to fit, and the slowest rank has the fewest predicted
    seconds that were found. The gradient, a mean over the ranks as
    `DistributedDataParallel` takes it, is that of the whole batch. Under it ranks have
    different numbers of micro-batches, and all but the last run under ``no_sync``.

    Args:
        lengths: (n_samples,) The length of each sample, or such lengths by name, as
            for `BatchSampler`. On all ranks the same, in the same order.
        session: This rank's session. It learns, as under a `BatchSampler`, how the
            sizes of the inputs follow from the lengths.
        n_ranks: Plan for so many ranks like this one, alone. None: for the ranks of
            ``torch.distributed``, which all must call this at the same place. They
            exchange their forecasts once: the fewest rows and the mean seconds count.
        equal: Whether all ranks have equally many micro-batches; where samples are too
            few for that, one runs again with a weight of 0. None: if ranks wait for
            each other's forwards (FSDP2, experts).
        max_rows: The most samples of a micro-batch.
        counts: (n_samples,) What the loss is a mean over, such as the label tokens of
            each sample; None if it is a mean over samples. Where nothing counts, the
            sample is left out.

    Raises:
        InfeasibleBudgetError: The longest sample does not fit by itself.
        MimoseError: A size of the inputs has no bound; the ranks have other lengths; or
            a rank did not answer.
        OtherRankError: Another rank failed.
        ValueError: A length, a count or a number is not allowed, or there are fewer
            samples than ranks.
    """
    model, columns = session._raise_if_detached(), _columns(lengths)
    count = np.ones(len(columns)) if counts is None else np.asarray(counts, float)
    if count.shape != (len(columns),) or not (np.isfinite(count) & (count >= 0)).all():
        msg = (
            f"counts must be {len(columns)} numbers of at least 0, one for each of the "
            f"lengths, got {counts!r}"
        )
        raise ValueError(msg)
    size = count_ranks() if n_ranks is None else check_integer("n_ranks", n_ranks)
    is_alone = n_ranks is not None or size < 2
    if equal is None:
        why = why_waits(model, (), with_backward=False)
        equal = bool(why) or session._engine.ranks is not None
    limit = int(_GRID[-1]) if max_rows is None else check_integer("max_rows", max_rows)
    kept = np.flatnonzero(count)
    if len(kept) < size:
        msg = (
            f"{len(kept)} samples are too few for {size} ranks, each of which trains "
            f"at least one (those that count 0 are left out): give balance() a larger "
            f"global batch, or fewer ranks"
        )
        raise ValueError(msg)
    widths = np.minimum(_rounded(columns[kept]), columns[kept].max(0))
    order = np.lexsort((columns[kept, -1], *widths[:, -2::-1].T))
    kept, widths = kept[order], widths[order]
    anchors = np.unique(widths, axis=0)  # in the same order

    def find() -> _Knots:
        return _forecasts(session, anchors, limit)

    key = columns.tobytes() + count.tobytes()
    knots = find() if is_alone else _of_all_ranks(find, key)
    runs = _Runs(columns[kept].sum(1), widths, knots)
    draw = np.random.default_rng(zlib.crc32(key))  # another rank has the longest
    ends, parts, seconds = _best(runs, size, draw, equal=equal)
    begins = np.r_[0, ends[:-1]]
    indices = [[kept[begins[i] : ends[i]].tolist() for i in own] for own in parts]
    share, seen = size / count.sum(), set[int]()
    weights: list[list[float]] = []
    for own in parts:
        weights.append([])
        for i in own:
            is_again = i in seen  # it is of no weight then
            found = 0.0 if is_again else count[kept[begins[i] : ends[i]]].sum()
            weights[-1].append(float(share * found))
            seen.add(i)
    known = seconds if runs.is_known else None
    return Balance(indices, weights, known, columns, session)


def _columns(lengths: Sequence[int] | Mapping[str, Sequence[int]]) -> _Ints:
    """Return (n_samples, n_names) lengths."""
    by_name = lengths if isinstance(lengths, Mapping) else {"lengths": lengths}
    columns = [
        [check_integer(f"each of {name}", each) for each in own]
        for name, own in by_name.items()
    ]
    if len({len(column) for column in columns}) != 1:
        msg = (
            f"lengths must have one length of each name for each sample, got "
            f"{[len(column) for column in columns]} of {list(by_name)}"
        )
        raise ValueError(msg)
    return np.array(columns, dtype=np.int64).T


def _rounded(columns: _Ints) -> _Ints:
    steps = np.ceil(_OCTAVE * np.log2(columns) - 1e-9)
    return np.ceil(2.0 ** (steps / _OCTAVE) - 1e-9).astype(np.int64)


def _of_all_ranks(find: Callable[[], _Knots], key: bytes) -> _Knots:
    """Return the fewest rows of all ranks at each anchor, and the mean seconds.

    Raises:
        MimoseError: They have other keys.
    """
    own: list[Any] = [zlib.crc32(key)]

    def ask() -> int:
        own.append(find())
        return 0

    most_of_ranks(ask, distributed.group.WORLD)  # an error on one is one on all
    found: list[Any] = [None] * count_ranks()
    distributed.all_gather_object(found, own)
    if len({each for each, _ in found}) > 1:
        msg = (
            "the ranks gave balance() different lengths or counts, so they would plan "
            "differently: give all ranks those of the whole batch, in the same order"
        )
        raise MimoseError(msg)
    merged = []
    for knots in zip(*(each for _, each in found), strict=True):
        rows = np.array([knot[: min(map(len, knots))] for knot in knots])
        n_known = np.maximum(1, (~np.isnan(rows)).sum(0))
        sums = np.where(np.isnan(rows).all(0), math.nan, np.nansum(rows, axis=0))
        merged.append((sums / n_known).tolist())
    return merged


def _forecasts(session: Session, anchors: _Ints, limit: int) -> _Knots:
    """Return the forecasts at the anchors, or what may be tried without.

    Args:
        session: Makes the forecasts.
        anchors: (n_anchors, n_names) Lengths.
        limit: The most rows.

    Raises:
        InfeasibleBudgetError: A single sample of the longest lengths does not fit.
        MimoseError: A size of the inputs has no bound.
    """
    collation = session.collation
    collation.end_turn()
    try:
        session.forecast({})
    except MimoseError:  # nothing is measured yet
        is_known = False
    else:  # if all had equally many rows, it was not seen what they do
        is_known = _shape(session, 1, anchors[-1]) != _shape(session, 2, anchors[-1])
    samples, elements = (2 * most for most in collation.most)
    sizes = anchors.sum(1)
    few = np.where(_FEW * sizes <= max(elements, sizes.max()), min(_FEW, limit), 1)
    most = np.minimum(min(limit, samples), elements // sizes).clip(1)
    times = session.summary().first_times
    first_seconds = times.seconds if times else 0.0
    entries = _knots.setdefault(session, LRUCache(_MOST_KNOTS))
    found = []
    for widths, n_most, n_few in zip(anchors, most.tolist(), few.tolist(), strict=True):
        key = session.budget, n_most, *widths.tolist()
        until, knot = entries.get(key, (0, [math.nan] * n_few))
        if is_known and until <= collation.n_steps:
            knot = _knot(session, widths, n_most, first_seconds)
            entries[key] = 2 * collation.n_steps, knot
        found.append(knot)
    return found


def _shape(session: Session, n: int, widths: _Ints) -> Mapping[str, int] | None:
    """Return the sizes of n samples of the same lengths; None if not known yet."""
    return session.collation.shape((n, *(n * widths).tolist(), *widths.tolist()))


def _knot(
    session: Session, widths: _Ints, most: int, first_seconds: float
) -> list[float]:
    """Return the seconds of those of `_GRID` that may run at one anchor.

    Args:
        session: Makes the forecasts.
        widths: (n_names,) The anchor.
        most: The most rows.
        first_seconds: What new shapes add to a step in the mean.
    """

    def ask(n: int, budget: int | None = None, share: int = 1) -> Forecast:
        shape = _shape(session, n, np.maximum(1, widths // share))
        return session.forecast(shape, budget, accumulating=True)

    found: list[float] = []
    for n in _GRID.tolist():
        told = ask(n)
        peak = told.peak_bytes or 0.0
        is_too_long = n == 1 and told.fits is False and peak > told.budget_bytes
        if is_too_long and not session._engine.budget.warns:
            raise InfeasibleBudgetError(
                told.budget_bytes,
                peak,
                {"the sample, with everything recomputed": peak},
                f"A sample of length {' and '.join(map(str, widths.tolist()))} does "
                f"not fit by itself. Raise the budget to at least "
                f"{format_bytes(peak)}, or leave such samples out.",
            )
        fits = n == 1 or told.fits
        if n > 1 and (told.fits is None or session.collation.most[0] == 1):
            # Beyond the measured rows everything is recomputed. Peaks grow with rows,
            # and half of a length takes at most half.
            last = int(_GRID[len(found) - 1])
            whole, half = ask(last, 1).peak_bytes, ask(last, 1, 2).peak_bytes or 0.0
            a_row = (2 * (whole - half) or whole) / last if whole else math.inf
            fits = (whole or 0.0) + (n - last) * a_row <= _SAFE * told.budget_bytes
        if n > most or not fits:
            break
        seconds = told.settled_seconds
        found.append(math.nan if seconds is None else seconds + first_seconds)
    return found


class _Runs:
    """The costs of runs of consecutive samples.

    Args:
        elements: (m,) The sum of the lengths of each sample.
        widths: (m, n_names) The anchor of each sample, sorted.
        knots: The forecasts at the anchors.

    Attributes:
        is_known: Whether any seconds are forecast.
    """

    def __init__(self, elements: _Ints, widths: _Ints, knots: _Knots) -> None:
        anchors, first, at = np.unique(
            widths, axis=0, return_index=True, return_inverse=True
        )
        at, sizes = at.ravel(), anchors.sum(1)
        seconds = np.full((len(anchors), len(_GRID)), np.nan)
        for own, knot in zip(seconds, knots, strict=True):
            own[: len(knot)] = knot
            n = int(np.isnan(np.r_[own, np.nan]).argmax())
            own[n:] = own[n - 1] * _GRID[n:] / _GRID[n - 1] if n else np.nan
        known = np.flatnonzero(~np.isnan(seconds[:, 0]))
        self.is_known = len(known) > 0
        for each in np.flatnonzero(np.isnan(seconds[:, 0])):
            if self.is_known:
                near = known[np.abs(known - each).argmin()]
                seconds[each] = seconds[near] * sizes[each] / sizes[near]
            else:
                seconds[each] = sizes[each] * _GRID + _FIXED * sizes.max()
        # Several lengths: no run goes on where one but the last begins to differ.
        is_new = np.r_[True, (np.diff(anchors[:, :-1], axis=0) != 0).any(1)]
        start = np.maximum.accumulate(np.where(is_new, first, 0))[at]
        below = (np.arange(len(anchors)) - ~is_new)[at]
        low, high = sizes[below], sizes[at]
        share = np.where(high > low, (elements - low) / np.maximum(1, high - low), 1.0)
        share = share.clip(0.0, 1.0)[:, None]
        self._seconds = (1 - share) * seconds[below] + share * seconds[at]
        most = np.array([_GRID[len(knot) - 1] for knot in knots])[at]
        if not self.is_known:
            most[::_SINGLE] = 1
        self.begins = np.arange(1, len(at) + 1)[:, None] - _GRID
        may_run = (most[:, None] >= _GRID) & (self.begins >= start[:, None])
        self.cost = np.where(may_run, self._seconds, np.inf)

    def seconds(self, ends: _Ints) -> _Floats:
        """Return the seconds of the runs that end behind these samples."""
        n, rows = np.diff(ends, prepend=0), ends - 1
        above = np.searchsorted(_GRID, n)
        below = np.maximum(0, above - 1)
        share = (_GRID[above] - n) / np.maximum(1, _GRID[above] - _GRID[below])
        found: _Floats = share * self._seconds[rows, below]
        found += (1 - share) * self._seconds[rows, above]
        return found

    def least(self) -> Iterator[_Ints]:
        """Yield the ends of the runs with the fewest seconds, for each price."""
        m, prices = len(self.cost), _PRICES * self.cost[:, 0].min()
        best = np.zeros((len(prices), m + 1))
        chosen = np.zeros((m, len(prices)), np.int64)
        places = np.arange(len(prices))
        cost, begins = self.cost[:, None] + prices[:, None], self.begins.clip(0)
        for end in range(m):
            total = best[:, begins[end]] + cost[end]
            chosen[end] = at = total.argmin(1)
            best[:, end + 1] = total[places, at]
        for rows in _GRID[chosen].T.tolist():
            ends = [m]
            while ends[-1] > rows[ends[-1] - 1]:
                ends.append(ends[-1] - rows[ends[-1] - 1])
            yield np.array(ends[::-1])


def _best(
    runs: _Runs, n_ranks: int, draw: np.random.Generator, *, equal: bool
) -> tuple[_Ints, list[list[int]], list[float]]:
    """Return the ends of runs, the runs of each rank, and each rank's seconds."""
    best: tuple[_Ints, list[list[int]], list[float]] | None = None
    for ends in runs.least():
        fewest = math.ceil(len(ends) / n_ranks)
        targets = [n_ranks * (fewest + more) for more in range(_MORE)]
        for n in targets if equal else [max(n_ranks, len(ends)), *targets]:
            ends = _halved(ends, runs, n)
            n_each = n // n_ranks if equal else None
            ranks, loads = _assigned(runs.seconds(ends), n_ranks, n_each)
            if best is None or max(loads) < max(best[2]):
                best = ends, ranks, loads
    assert best is not None  # there are prices
    ends, ranks, loads = best
    order = draw.permutation(n_ranks).tolist()
    mixed = [draw.permutation(ranks[rank]).tolist() for rank in order]
    return ends, mixed, [loads[rank] for rank in order]


def _halved(ends: _Ints, runs: _Runs, n: int) -> _Ints:
    """Return the ends of n runs, or of as many as there are samples."""
    while len(ends) < n:
        rows = np.diff(ends, prepend=0)
        longest = np.argsort(-runs.seconds(ends), kind="stable")
        longest = longest[rows[longest] > 1][: n - len(ends)]
        if not len(longest):
            break
        ends = np.sort(np.r_[ends, ends[longest] - rows[longest] // 2])
    return ends


def _assigned(
    seconds: _Floats, n_ranks: int, n_each: int | None
) -> tuple[list[list[int]], list[float]]:
    """Return the runs of each rank, by longest processing time, and its seconds.

    Args:
        seconds: (n,) Of the runs.
        n_ranks: The number of ranks.
        n_each: The number of runs of each rank; None if they may differ.
    """
    order = np.argsort(-seconds, kind="stable").tolist()
    if n_each is not None:  # again, with a weight of 0
        order += order[-1:] * (n_ranks * n_each - len(order))
    ranks: list[list[int]] = [[] for _ in range(n_ranks)]
    heap = [(0.0, rank) for rank in range(n_ranks)]
    loads = [0.0] * n_ranks
    for run in order:
        _, rank = heap[0]
        ranks[rank].append(run)
        loads[rank] += float(seconds[run])
        if len(ranks[rank]) == n_each:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (loads[rank], rank))
    return ranks, loads
