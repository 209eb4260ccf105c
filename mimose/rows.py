"""Chooses how many rows a batch has, so that it fits and trains the most tokens.

Note: [Rows by a table]
A sampler asks `Session.forecast` at a few lengths, the anchors, how many rows train
the most tokens a second. Between two anchors it interpolates the inverse of the rows,
one row's share of a batch, by a line. The true share is a convex function of the
length, so the line gives too few rows rather than too many. It makes a new table in
each round, and cuts the remaining samples into new batches if the table has changed.

Note: [Twice what was trained]
The sampler tells `session.collation` what it draws, and that learns which sizes of the
model's inputs follow. Whatever it has learned, a batch of several samples has at most
twice the samples, and twice the tokens, of the largest batch that was trained. While
that limits the rows, a round has one batch, one of the largest.

Note: [A ladder of rows]
With `pad_to_multiple_of` lengths are taken as the collator rounds them up, and numbers
of rows from a ladder. So a padded length has one number of rows, which rarely changes
with the table. The ladder has twice each of its numbers: where twice what was trained
limits a batch, it costs nothing.

Note: [Rows that were asked for]
With `min_rows` the table also knows how many rows fit at each anchor, up to four times
as many as were asked for, interpolated as above. A batch has that many, if these are
more than train the most tokens a second and not more than were asked for.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from mimose.arguments import check_integer
from mimose.exceptions import MimoseError

if TYPE_CHECKING:
    from mimose.forecast import Forecast
    from mimose.session import Session

_log = logging.getLogger(__name__)

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

_FEW = 8
"""Rows of a batch without a limit and a session; the most rows of the first batches."""
FIRST_ROWS = (1, 2, 4, 8)
"""Rows of the first batches, in turn: costs per row are fitted only if rows vary."""
_DOUBLING, _DOUBLING_OF_SEVERAL, _DOUBLING_UNPADDED = 0.03, 0.05, 0.005
"""By this share a batch twice as large must raise the tokens a second. Padding of
several lengths costs the second: 5% of T5-large's tokens at 6,400 tokens a batch, 8% at
13,000 and 11% at 17,000, but 0.4% to 0.7% of BERT-large's."""
_SAME = 0.002
"""By this share another number of rows must raise the tokens a second."""
_WORTH = 0.01
"""By this share another number of rows must be better, or the old one stays: what is
left of an epoch pads more each time that it is cut into batches anew."""
_UNFIT = -1e9
_ROOM = 0.95
"""The share of the budget for which rows are chosen. What the allocator wastes differs
by shape, and rows that fill the budget soon fit no more: then steps recompute all, and
are measured. BERT-large in 16 GiB (seed 3) trained 96,200 tokens a second with 9 of 150
steps run again, with this share 108,400 with 1."""
_SAFE = 0.75
"""Share of the budget that a batch may be predicted to take if it is half as large
again as the largest known one."""
_APART, _APART_OF_SEVERAL = 2.0, 4.0
"""The largest factor between two anchors."""
_STILL_SMALL = 64
"""If batches are still small after this many, a warning gives the reason."""
_GRID = sorted({round(1.03**k) for k in range(400)})
"""Numbers of rows that are considered."""
_LADDER = np.array([*range(1, 6), *(m << k for k in range(20) for m in range(6, 12))])
"""Numbers of rows with `pad_to_multiple_of`, six a doubling. With multiples of 8,
BERT-large in 16 GiB had 79 and 73 shapes in 300 batches (seeds 1 and 2), and 97.3% and
96.9% of the tokens a second without; with four a doubling 79 and 80 shapes, 96.9% and
97.0%, with eight 75 and 84, 97.1% and 98.1% (`python -m benchmarks.fill`)."""
_NEARLY = 0.9
"""Rows are limited by twice what was trained from this share of it on."""
_ROUND, LONG_ROUND = 4, 64
"""The fewest and the most batches in a round."""
_OF_DRAWN = 4
"""A round has this fraction of all batches drawn so far: forecasts change less and
less, and each table takes time of the host."""
LIKE, _LIKE_OF_SEVERAL = 1.015, 1.08
"""Lengths that differ by less than this factor are alike. With several lengths the
first ones are compared with the second factor, the last one with the first."""
_NO_LIMIT = 2**53
_MORE, _SAME_FIT = 4, 1.1
"""What fits is known up to so many times the least rows. It counts as the same if it is
larger by less than the second factor."""


class Table(NamedTuple):
    """What a round knows; without rows, nothing."""

    rows: Sequence[int] = ()
    """At each anchor, 0 where not known yet."""
    samples: int = _NO_LIMIT
    """The most samples of a batch: Note: [Twice what was trained]."""
    tokens: int = _NO_LIMIT
    """The most tokens of a batch."""
    is_padded: bool = True
    """Whether short samples are padded."""
    paces: Sequence[float] = ()
    """Seconds a token at each anchor, of the fastest rank; 0 where not known yet."""
    delays: Sequence[float] = ()
    """By rank: its seconds over those of the fastest. Empty if they are alike."""
    fits: Sequence[float] = ()
    """The rows that fit at each anchor, 0 where not known. Empty without least rows."""

    def saved(self) -> list[Any]:
        """Return the table as plain JSON data, without a class of mimose."""
        return [[*each] if isinstance(each, tuple) else each for each in self]

    @classmethod
    def loaded(cls, table: Any) -> Table | None:
        """Return a table after its way through JSON."""
        if table is None:
            return None
        return cls._make(tuple(e) if isinstance(e, list) else e for e in table)

    def is_like(self, other: Table | None) -> bool:
        """Whether two tables cut the same batches, and know as many seconds."""
        if other is None:
            return False
        is_known, was_known = ([p > 0.0 for p in e.paces] for e in (self, other))
        same = self._replace(paces=()) == other._replace(paces=())
        return same and is_known == was_known


class Rows:
    """Numbers of rows by length.

    Args:
        names: The names of the lengths; none for a single length without a name.
        max_rows: The most rows of a batch; None for no limit.
        max_tokens: The most tokens of a batch, with padding; None for no limit.
        pad_to_multiple_of: To what the collator rounds padded lengths up, or None.
        min_rows: The least rows where so many fit: Note: [Rows that were asked for].

    Attributes:
        names: As given.
        limits: The other arguments.
        has_least: Whether batches may have to have several rows.
        anchors: For each name, its anchors.
        at_anchors: (n_anchors, n_names) Every combination of the anchors.
        table: What the round knows; None if all batches have the rows that the
            arguments say.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        max_rows: int | None,
        max_tokens: int | None,
        pad_to_multiple_of: int | None,
        min_rows: int,
    ) -> None:
        self.limits = {
            name: number if number is None else check_integer(name, number)
            for name, number in (
                ("max_rows", max_rows),
                ("max_tokens", max_tokens),
                ("pad_to_multiple_of", pad_to_multiple_of),
                ("min_rows", min_rows),
            )
        }
        self._max_rows, self._max_tokens, self._multiple, _ = self.limits.values()
        self._least = min(min_rows, self._max_rows or min_rows)
        self.has_least = self._least > 1
        self.names = names
        self.anchors: Sequence[Ints] = ()
        self.table: Table | None = None
        self._first_seconds = 0.0
        """What new shapes add to a step in the mean: more rows share it."""
        self._has_warned = False

    def rounded(self, lengths: Ints) -> Ints:
        """Return lengths as the collator rounds them up."""
        multiple = self._multiple or 1
        return -(-lengths // multiple) * multiple

    def cover(self, lengths: Ints) -> None:
        """Lay anchors over lengths; where they move, the table knows no rows any more.

        Args:
            lengths: (n_samples, n_names) Rounded.
        """
        anchors = [_anchors(own, lengths.shape[1] > 1) for own in lengths.T]
        is_same = len(anchors) == len(self.anchors) and all(
            map(np.array_equal, anchors, self.anchors)
        )
        if self.table is not None and not is_same:
            self.table = self.table._replace(rows=(), paces=())
        self.anchors = anchors
        self.at_anchors = np.array(list(itertools.product(*self.anchors)))
        tokens = lengths.sum(axis=1)
        self._most_tokens, self._half_tokens = tokens.max(), np.median(tokens)

    def knows(self, lengths: Ints) -> NDArray[np.bool_]:
        """Return (n_samples,) which lengths are not beyond the longest anchors.

        Args:
            lengths: (n_samples, n_names)
        """
        tops = [own[-1] for own in self.anchors]
        found: NDArray[np.bool_] = np.all(lengths <= tops, axis=1)
        return found

    def of(self, lengths: Ints) -> Floats:
        """Return (n_batches,) the rows of batches, before they are rounded down.

        Args:
            lengths: (n_batches, n_names) The longest sample of each batch.
        """
        tokens = lengths.sum(axis=1)
        limit, least = _NO_LIMIT, np.ones(len(lengths))
        if self.table is None:
            is_bounded = self._max_rows is not None or self._max_tokens is not None
            rows = np.full(len(lengths), math.inf if is_bounded else _FEW)
        else:
            # No more tokens than the longest sample has, or two rows.
            two = np.where(tokens <= self._half_tokens, 2, 1)
            rows = (self._most_tokens / tokens).clip(two, _FEW)
            limit = self.table.samples
            if any(self.table.rows):
                found = np.array(self.table.rows, dtype=float)
                there = self.at_anchors.sum(axis=1)
                fewest = (found * there)[found > 0.0].min()  # tokens of a known batch
                first = (fewest / there).clip(1.0, max(_FEW, found.max()))
                rows = _between(self.anchors, np.where(found, found, first), lengths)
                if self.table.fits:
                    fits = np.maximum(1.0, np.array(self.table.fits))
                    fit = np.floor(_between(self.anchors, fits, lengths))
                    least = np.minimum(self._least, fit)
                    rows = np.maximum(rows, least)
            rows = np.minimum(rows, self.table.tokens / tokens)
            rows = np.where(self.knows(lengths), rows, 1.0)
        if self._max_tokens is not None:
            rows = np.minimum(rows, self._max_tokens / tokens)
        most = min(self._max_rows or math.inf, limit)
        limited: Floats = rows.clip(1.0, most)
        if self._multiple is not None:
            rungs = _LADDER[np.searchsorted(_LADDER, limited, "right") - 1]
            rungs = np.maximum(rungs, np.minimum(limited, least))
            limited = np.where(limited < most, rungs, limited)
        return limited

    def cut(
        self, lengths: Ints, sizes: Sequence[int] | None = None
    ) -> tuple[list[slice], int]:
        """Return batches of consecutive samples, and how many the last one lacks.

        Args:
            lengths: (n_samples, n_names) The longest first.
            sizes: The most rows of each batch.
        """
        rows, n_samples = self.of(lengths), len(lengths)
        is_padded = self.table is None or self.table.is_padded
        filled = np.concatenate([[0.0], np.cumsum(1.0 / rows)])
        """How many batches the samples before fill, if each takes its share of one."""
        is_first = self.table is not None and not self.table.rows
        first = FIRST_ROWS if is_first else (n_samples,)
        turns = itertools.cycle(first) if sizes is None else iter(sizes)
        batches, at, lacks = [], 0, 0
        while at < n_samples:
            turn = next(turns, n_samples)
            most = min(int(rows[at]), turn)
            end = min(at + most, n_samples)
            if not is_padded:
                full = filled[at] + 1.0 + 1e-9
                fits = int(np.searchsorted(filled, full, "right")) - 1 - at
                spare = int((full - filled[-1]) * rows[-1]) if full > filled[-1] else 0
                most = min(fits + spare, turn)
            elif lengths.shape[1] > 1:
                most = min(most, int(self.of(lengths[at:end].max(0)[None])[0]))
            else:
                most = min(most, int(rows[at:end].min()))
            end = min(n_samples, at + most)
            batches.append(slice(at, end))
            lacks = at + most - end
            at = end
        return batches, lacks

    def filled(self, lengths: Ints) -> int:
        """Return how many of the first samples fill one batch, at least one.

        Args:
            lengths: (n_samples, n_names) In any order.
        """
        if self.table is None or self.table.is_padded:
            lengths = lengths[: int(self.of(lengths[:1])[0])]
            rows = self.of(np.maximum.accumulate(lengths))
            fits = np.minimum.accumulate(rows) >= np.arange(1, len(rows) + 1)
        else:
            fits = np.cumsum(1.0 / self.of(lengths)) <= 1.0 + 1e-9
        return len(fits) if fits.all() else max(1, int(fits.argmin()))

    def seconds_of_full(self, lengths: Ints) -> Floats:
        """Return (n_samples,) the predicted seconds of full batches of like samples.

        Args:
            lengths: (n_samples, n_names) Of one sample of each.
        """
        return self._seconds(lengths, lengths.sum(axis=1) * np.floor(self.of(lengths)))

    def seconds(self, batches: Sequence[Ints]) -> Floats:
        """Return (n_batches,) the predicted seconds of the fastest rank.

        None at all if nothing is known: the seconds a token at the anchors,
        interpolated, times the tokens.

        Args:
            batches: For each, (n_samples, n_names) lengths.
        """
        if self.table is None or not any(self.table.paces) or not batches:
            return np.zeros(0)
        if self.table.is_padded:
            longest = np.array([own.max(axis=0) for own in batches])
            elements = longest.sum(axis=1) * [len(own) for own in batches]
        else:
            longest = np.array([own.mean(axis=0) for own in batches])
            elements = np.array([own.sum() for own in batches])
        return self._seconds(longest, elements)

    def _seconds(self, lengths: Floats | Ints, elements: Floats | Ints) -> Floats:
        """Return (n_batches,) seconds; none at all if nothing is known.

        Args:
            lengths: (n_batches, n_names)
            elements: (n_batches,) The tokens of each.
        """
        if self.table is None or not any(self.table.paces):
            return np.zeros(0)
        paces = np.array(self.table.paces)
        paces[paces == 0.0] = paces[paces > 0.0].mean()
        found: Floats = elements / _between(self.anchors, 1.0 / paces, lengths)
        return found

    def limited(self, batches: Sequence[Ints]) -> list[int]:
        """Return the batches that what was trained limits, the largest first.

        Args:
            batches: For each, (n_samples, n_names) lengths.
        """
        table = self.table or Table()
        if table.samples == _NO_LIMIT == table.tokens:
            return []
        size: dict[int, int] = {}
        for i, batch in enumerate(batches):
            tokens = batch.sum(axis=1)
            n, total = len(batch), tokens.sum()
            shares = (n + 1) / table.samples, (total + tokens.max()) / table.tokens
            if n > 1 and max(shares) > _NEARLY:
                size[i] = int(total) * n
        return sorted(size, key=size.__getitem__, reverse=True)

    def forecast(self, session: Session, n_drawn: int, who: str) -> Table:
        """Return a table with today's knowledge; the last one if nothing is known.

        Args:
            session: Makes the forecasts.
            n_drawn: How many batches were drawn.
            who: Who draws, for a warning that batches are still small.

        Raises:
            MimoseError: A size of the model's inputs has no bound, or there is no size
                of a given name.
        """
        known, shape = self.table or Table(), None
        why = "too few of its steps could be paired with batches that were drawn"
        session.collation.end_turn()
        try:
            session.forecast({})
        except MimoseError as error:  # nothing is measured yet, or it was detached
            known, why = Table(), str(error)
        else:
            shape = session.collation.shape(_drawn(1, self.at_anchors[0]))
        if shape is None:
            if n_drawn >= _STILL_SMALL and not known.rows and not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "mimose.%s still draws small batches after %d of them, "
                    "because the session cannot forecast: %s. See session.report()",
                    *(who, n_drawn, why),
                )
            return known
        session.forecast(dict.fromkeys(self.names, 1))
        times = session.summary().first_times
        self._first_seconds = times.seconds if times else 0.0
        is_known = len(known.rows) == len(self.at_anchors)
        before = known.rows if is_known else [0] * len(self.at_anchors)
        fitted = known.fits if is_known and known.fits else before
        rows, paces, fits, fastest = zip(
            *(
                self._best(session, *at_one)
                for at_one in zip(self.at_anchors, before, fitted, strict=True)
            ),
            strict=True,
        )
        if all(paces) and self.has_least:
            session.collation.least_rows_share = 1.0 - sum(fastest) / sum(paces)
        tokens = self.at_anchors.sum(axis=1)
        samples, elements = (2 * most for most in session.collation.most)
        most = np.minimum(samples, elements / tokens)
        needs_rows = max(_FEW, *rows)
        needs_tokens = max(self._most_tokens, 2 * self._half_tokens, *(rows * tokens))
        is_padded = session.collation.pads(self.at_anchors.shape[1])
        is_near = (np.array(rows) > 1) & (np.array(rows) > _NEARLY * most - 1.0)
        binds = is_near.any() or samples < needs_rows or elements < needs_tokens
        limits = (samples, elements) if binds else (_NO_LIMIT, _NO_LIMIT)
        return Table(rows, *limits, is_padded, paces, (), fits if any(fits) else ())

    def _best(
        self, session: Session, lengths: Ints, old: int, fitted: float
    ) -> tuple[int, float, float, float]:
        """Return the rows that train the most tokens a second, and seconds a token.

        The third is how many rows fit, if it matters; the fourth the seconds a token
        without least rows. Each is 0 if not known.

        Args:
            session: Makes the forecasts.
            lengths: (n_names,) The lengths of the batch.
            old: The rows of the last table; 0 for none.
            fitted: How many fitted in it; 0 for none.
        """
        tokens = int(lengths.sum())
        collation = session.collation
        doubling = _DOUBLING_OF_SEVERAL if len(lengths) > 1 else _DOUBLING
        doubling = doubling if collation.pads(len(lengths)) else _DOUBLING_UNPADDED
        samples, elements = (2 * most for most in collation.most)
        room = int(_ROOM * session.budget)
        most = min(self._max_rows or _GRID[-1], (self._max_tokens or math.inf) / tokens)
        most = max(1, min(most, samples, elements / tokens))

        def ask(n: int, budget: int | None = None, share: int = 1) -> Forecast:
            own = np.maximum(1, lengths // share)
            return session.forecast(collation.shape(_drawn(n, own)), budget or room)

        def score(at: int) -> float:
            """Return the logarithm of rows a second, less the gain that is required."""
            n = _GRID[at]
            found = ask(n)
            if not found.fits or found.plan is None or n > most:
                return _UNFIT - n
            if found.settled_seconds is None:  # recomputation costs more than rows gain
                return math.log(n) * (1.0 if found.plan.extra_cost == 0.0 else -1.0)
            seconds = found.settled_seconds + self._first_seconds
            return math.log(n / max(1e-9, seconds)) - doubling * math.log2(n)

        def pace(n: int) -> float:
            seconds = ask(n).settled_seconds
            total = 0.0 if seconds is None else seconds + self._first_seconds
            return total / (n * tokens)

        def paced(n: int, known: int) -> tuple[int, float, float, float]:
            return n, pace(known), 0.0, pace(known)

        old = min(old, int(most))
        start = int(np.searchsorted(_GRID, old)) if old else 0
        at = _climb(score, start, (8, 4, 2, 1))
        n = _GRID[at]
        if not ask(n).fits:
            return paced(0 if ask(n).fits is None else 1, 1)
        if n < most and ask(_GRID[at + 1]).fits is None:
            # A step beyond the measured rows recomputes everything. Its peak grows
            # linearly with rows, and half a row takes at most half.
            more, n_half = max(1, n // 2), n // 2 or 0.5
            whole = ask(n, 1).peak_bytes
            half = (ask(n // 2, 1) if n > 1 else ask(1, 1, 2)).peak_bytes
            if half is None:  # rows have not varied: a row takes at most its share
                n_half = half = 0
            if whole is not None:
                a_row = (whole - half) / (n - n_half)
                if whole + more * a_row < _SAFE * session.budget:
                    return paced(min(n + more, int(most)), n)
        best = n if not old or score(at) > score(start) + _WORTH else old
        if not self.has_least:
            return paced(best, best)

        def fits(eighths: int) -> bool | None:
            own = lengths * (fit + eighths / 8.0) / fit
            shape = collation.shape(_drawn(fit, own.astype(int)))
            return session.forecast(shape, room).fits

        grid = _GRID[: bisect.bisect_right(_GRID, _MORE * self._least)]
        fit = grid[max(1, bisect.bisect(grid, 0, key=lambda n: not ask(n).fits)) - 1]
        fastest, best = best, max(best, min(self._least, fit, int(most)))
        # If so many longer samples fit, the share of another one does.
        part = fit + bisect.bisect(range(1, 8), 0, key=lambda at: not fits(at)) / 8.0
        is_same = fitted <= part < _SAME_FIT * fitted
        return best, pace(best), fitted if is_same else part, pace(fastest)


class Draws:
    """Draws batches for a session, and reports to it what it draws.

    Args:
        session: Makes the forecasts; None if it comes later, or never.
    """

    def __init__(self, session: Session | None) -> None:
        if session is not None and not hasattr(session, "forecast"):
            msg = f"session must be what mimose.attach returned, got {session!r}"
            raise ValueError(msg)
        self._session = session
        self._unreported: list[tuple[int, ...]] = []
        """What was drawn in this iteration while there was no session."""

    @property
    def session(self) -> Session | None:
        """The session that makes the forecasts.

        You can set it later; it is used from the next round on.
        """
        return self._session

    @session.setter
    def session(self, session: Session | None) -> None:
        """Report to it what was drawn before."""
        self._session = session
        self._report()

    def _begin_reports(self) -> None:
        """Begin to draw anew."""
        self._unreported.clear()
        if self._session is not None:
            self._session.collation.begin()

    def _report(self, *batches: Ints) -> None:
        """Report batches that are drawn, and those that were not reported before.

        Args:
            batches: For each, (n_samples, n_names) lengths.
        """
        for own in batches:
            drawn = len(own), *own.sum(axis=0).tolist(), *own.max(axis=0).tolist()
            self._unreported.append(drawn)
        if self._session is not None:
            for drawn in self._unreported:
                self._session.collation.drew(drawn)
            self._unreported.clear()


def halved(batches: list[Ints], n: int) -> None:
    """Halve the largest batches until there are so many, or all have one sample."""
    while len(batches) < n:
        at = max(range(len(batches)), key=lambda i: len(batches[i]), default=0)
        if not batches or not (half := len(batches[at]) // 2):
            return
        batches[at : at + 1] = [batches[at][:half], batches[at][half:]]


def round_length(n_drawn: int) -> int:
    """Return how many batches a round has after so many."""
    return min(max(_ROUND, n_drawn // _OF_DRAWN), LONG_ROUND)


def sort_keys(logs: Floats, shifts: Sequence[float], noise: Floats) -> list[Floats]:
    """Return (n_samples,) keys that sort like samples together, the first one first.

    Args:
        logs: (n_samples, n_names) Logarithms of lengths.
        shifts: Where the bands of all lengths but the last begin, from 0 to 1.
        noise: (n_samples,) Is added to the last logarithm.
    """
    keys, sign = [], np.ones(len(logs))
    for column, shift in zip(logs.T[:-1], shifts, strict=True):
        band = np.floor(column / math.log(_LIKE_OF_SEVERAL) + shift)
        keys.append(sign * band)  # the next length up and down by turns
        sign = np.where(band % 2, -sign, sign)
    keys.append(sign * (logs[:, -1] + noise))
    return keys


def free_gaps(before: Table | None, table: Table | None) -> None:
    """Free the allocator's blocks of smaller batches, if batches become larger."""
    known, old = (sum(each.rows) if each else 0 for each in (table, before))
    if known > 1.25 * old > 0 and torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def checked(name: str, column: Sequence[int]) -> Ints:
    """Return lengths as an array.

    Raises:
        ValueError: They are not integers of at least 1.
    """
    found = np.asarray(column)
    is_listed = found.ndim == 1 and found.size > 0 and found.dtype.kind in "iu"
    if not is_listed or found.min() < 1:
        msg = (
            f"{name} must be a list of integers of at least 1, one for each sample, "
            f"got {found.dtype} of shape {found.shape}. Leave empty samples out"
        )
        raise ValueError(msg)
    return found.astype(np.int64)


def _drawn(n: int, lengths: Ints) -> tuple[int, ...]:
    """Return a batch of n samples of the same lengths, as `Collation.shape` takes it.

    Args:
        n: The samples.
        lengths: (n_names,) The lengths of each.
    """
    return n, *(n * lengths).tolist(), *lengths.tolist()


def _climb(score: Callable[[int], float], start: int, steps: Sequence[int]) -> int:
    """Return the index of the highest score; near the start if the score is flat.

    The score must have one maximum.

    Args:
        score: Takes an index of the grid.
        start: The first index.
        steps: Step widths. Each is repeated as long as the score rises.
    """

    @functools.cache
    def of(at: int) -> float:
        return score(at) if 0 <= at < len(_GRID) else -math.inf

    at = start
    for step in steps:
        to = max(at + step, at - step, key=of)
        while of(to) > of(at) + _SAME:
            at, to = to, 2 * to - at
    return at


def _anchors(column: Ints, is_one_of_several: bool) -> Ints:
    """Return lengths from the shortest to the longest, at most a factor apart.

    Args:
        column: (n_samples,) Lengths.
        is_one_of_several: Whether other lengths vary too: then anchors are coarser.
    """
    low, high = float(column.min()), float(column.max())
    factor = _APART_OF_SEVERAL if is_one_of_several else _APART
    n = 1 + math.ceil(math.log(high / low) / math.log(factor))
    return np.unique(np.geomspace(low, high, n).round().astype(np.int64))


def _between(anchors: Sequence[Ints], rows: Floats, lengths: Ints | Floats) -> Floats:
    """Return (n_batches,) rows, interpolated: Note: [Rows by a table].

    Args:
        anchors: For each name, its anchors.
        rows: (n_anchors,) at every combination, the last name fastest.
        lengths: (n_batches, n_names) Those beyond the anchors count as the last ones.
    """
    corners = [(np.zeros(len(lengths), dtype=np.int64), np.ones(len(lengths)))]
    for axis, own in zip(anchors, lengths.T, strict=True):
        column = own.clip(axis[0], axis[-1])
        left = np.clip(np.searchsorted(axis, column, "right") - 1, 0, len(axis) - 1)
        right = np.minimum(left + 1, len(axis) - 1)
        share = (column - axis[left]) / np.maximum(axis[right] - axis[left], 1)
        corners = [
            (at * len(axis) + side, weight * part)
            for at, weight in corners
            for side, part in ((left, 1.0 - share), (right, share))
        ]
    total = np.zeros(len(lengths))
    for at, weight in corners:
        total += weight / rows[at]
    return 1.0 / total + 1e-9
