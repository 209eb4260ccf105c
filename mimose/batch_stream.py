"""Batches that fill the memory budget, of samples that come one after the other.

Note: [Leaders and neighbours]
The buffer is sorted by length. A batch has a leader and its neighbours in the buffer,
first those whose lengths are nearer, as many as the rows allow. Leaders are random,
each as likely as its share of a batch: so the buffer keeps the lengths that the stream
has. But a sample that has waited for as many batches as the buffer has samples leads
the next one. When the stream has ended, the rest is cut into batches. They come in
random order, or the oldest first if one has waited so long.

Note: [Ranks of a stream]
Each rank has other samples. In each round the ranks exchange how many they hold,
quantiles of the predicted seconds of their batches, and, for the report, the seconds of
those of the last round. A random leader is the sample whose batch comes nearest to
seconds that all ranks draw from the mean of the quantiles; when one stream has ended,
so is its next batch; when all have, the n-th batches by seconds go together. A round
has no more batches than any rank holds samples: so each has one for every batch,
whatever its stream does. A stream that fails has ended until the next exchange.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mimose.arguments import check_integer, check_switches
from mimose.budget import format_bytes, parse_budget
from mimose.distributed import exchange, own_rank
from mimose.exceptions import MimoseError, StateMismatchError
from mimose.rows import (
    FIRST_ROWS,
    LONG_ROUND,
    Draws,
    Ints,
    Rows,
    Table,
    free_gaps,
    halved,
    round_length,
    sort_keys,
)

if TYPE_CHECKING:
    from mimose.session import Session

_log = logging.getLogger(__name__)

_QUANTILES = np.linspace(0.0, 1.0, 16)
"""Those that ranks exchange. The seconds drawn from 16 are 0.8% off in the mean for
batches of log-normal lengths (16 to 2,048, deviation 0.7), from 8 2.1%, from 4 5.7%."""
_END = object()
_NUMBER_BYTES = 8
_FIRST_BUFFER, _BATCHES = 1024, 32
"""Samples in the first buffer, and how many batches it is to hold. With 14, 28 and 42
batches of 300 rows BERT-large's texts pad 5.7%, 3.2% and 2.7%, out of 1,024 samples
17%, and with all of an epoch at hand 2.2%."""
_FEWEST = 4
"""Batches before a step without a plan begins another round."""
_AHEAD = 64
"""So many of the last batches may be drawn but not trained when a state is saved: a
`DataLoader` of 32 workers draws two each ahead."""


class BatchStream(Draws):
    """Makes batches from a stream of samples, with as many rows as the budget allows.

    ::

        samples = DataLoader(dataset, batch_size=None, num_workers=4)
        batches = mimose.BatchStream(
            samples, session, length="input_ids", collate_fn=collate
        )

    It is for samples without an index, or whose lengths are not known before they are
    made: streams, a processor's results, completions of a policy. It holds a buffer of
    samples, and draws batches of like lengths from it, with rows as `BatchSampler`
    chooses them: small at first, then as many as train the most tokens a second. The
    buffer grows with the batches.

    Each sample comes once. None waits for more than twice as many batches as the buffer
    has samples: Note: [Leaders and neighbours]. What is longer than any sample before
    is a batch by itself until the next round. The buffer is also all that shuffles.

    A second iteration begins the stream again, after ``set_epoch`` of the samples or
    their dataset, if they have it; samples that are an iterator, such as a generator,
    go on where they were. If a batch does not fit after all, `Session.micro_batches`
    splits it, or `Session.step` repeats its step, as with any loader.

    Several ranks draw equally many batches, each from its part of the stream:
    Note: [Ranks of a stream].

    Attributes:
        n_drawn: Batches drawn in this iteration.
        epoch: The number of this iteration, or of the last one; the first is 0.
        is_settled: Whether the last round changed no number of rows.
        is_expecting: Whether to draw small batches until there is a session. The
            trainers' callbacks set it.
        is_repeated: Whether the last batch is a sample that was trained before, because
            this rank has no more: multiply its loss by 0 to train nothing twice.

    Args:
        samples: Yields single samples; on several ranks, this rank's.
        session: Makes the forecasts. Without a session each batch has `max_rows` rows,
            or as many as `max_tokens` allows, or 8.
        length: The name of a column whose length counts, or that holds it; or a
            function of a sample that returns its length, or several lengths by the
            names of sizes, as `BatchSampler` takes them.
        collate_fn: Makes a batch of a list of samples.
        buffer: The most samples in the buffer, which is full before the first batch.
            Batches with many rows are padded more if it holds few of them. None for
            1,024 at first, and then as many as make 32 batches.
        buffer_bytes: The most bytes of these, up to one sample more. What counts are
            tensors, arrays, texts and numbers, in containers and in attributes.
        seed: Seed of the random order; the same on all ranks.
        max_rows: The most rows of a batch.
        max_tokens: The most tokens of a batch, with padding. A longer sample is a batch
            by itself.
        min_rows: As for `BatchSampler`.
        pad_to_multiple_of: To what your collator rounds padded lengths up, or None.
        even_batches: Whether a rank whose stream has ended repeats one sample a batch
            until all have ended. If False, all ranks stop.
        rank: This process's rank; None to ask `torch.distributed`.
        world_size: The number of ranks; None to ask `torch.distributed`.

    Raises:
        ValueError: An argument is not an integer, a size, a switch, a session, or a
            name or function; or `rank` is not below `world_size`.
    """

    def __init__(
        self,
        samples: Iterable[Any],
        session: Session | None = None,
        *,
        length: str | Callable[[Any], int | Mapping[str, int]],
        collate_fn: Callable[[list[Any]], Any],
        buffer: int | None = None,
        buffer_bytes: int | str = "1GiB",
        seed: int = 0,
        max_rows: int | None = None,
        max_tokens: int | None = None,
        min_rows: int = 1,
        pad_to_multiple_of: int | None = None,
        even_batches: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__(session)
        self._length: Any = length
        if not isinstance(length, str) and not callable(self._length):
            msg = f"length must name a column or be a function, got {length!r}"
            raise ValueError(msg)
        check_switches(even_batches=even_batches)
        self._stream, self._collate = samples, collate_fn
        self._is_growing = buffer is None
        most = _FIRST_BUFFER if buffer is None else buffer
        self._most = check_integer("buffer", most)
        self._most_bytes = parse_budget(buffer_bytes, None)
        self._seed = check_integer("seed", seed, 0)
        self._is_even = bool(even_batches)
        self._rank, self._world_size = own_rank(rank, world_size)
        self._rows = Rows(
            [],
            max_rows=max_rows,
            max_tokens=max_tokens,
            min_rows=min_rows,
            pad_to_multiple_of=pad_to_multiple_of,
        )
        self.is_settled = self.is_expecting = self.is_repeated = False
        self._names: list[str] | None = None
        self._extremes: Ints = np.zeros((0, 0), dtype=np.int64)
        """(n, n_names) The shortest and the longest lengths so far."""
        self._n_asked = self.epoch = self.n_drawn = 0
        self._left = 0
        """Batches that the round still has."""
        self._has_warned = self._has_begun = self._is_within = self._is_dry = False
        self._source: Iterator[Any] = iter(())
        self._untouched: tuple[dict[int, Any], int, Ints, Ints] | None = None
        """The buffer before the first batch, until the second."""
        self._loaded: Mapping[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Yield batches until the stream ends; all ranks yield equally many.

        Raises:
            MimoseError: There is no sample; one has no length; a size of the model's
                inputs has no bound; ranks are not at the same batch.
            OtherRankError: The stream of another rank failed.
        """
        self._begin()
        budget, is_alone, n = 0, self._world_size == 1, 0
        while True:
            is_changed = self._fill() or not len(self._numbers)
            now = self.session.budget if is_alone and self.session else 0
            is_changed = is_changed or now < budget
            is_changed = is_changed or (n >= _FEWEST and self._is_unplanned())
            if not self._left or (is_alone and is_changed):
                self._left, n = self._begin_round(), 0
                if not self._left:
                    break
            budget, n = now, n + 1
            self._left -= 1
            self._untouched = None
            if not self.n_drawn:
                held = dict(self._samples), self._n_bytes
                self._untouched = *held, self._numbers, self._lengths
            samples = self._draw()
            self.n_drawn += 1
            self._n_asked += 1
            yield self._collate(samples)
        self._is_within, self._untouched = False, None

    def _is_unplanned(self) -> bool:
        """Whether the last step had no plan, so that fewer rows may be faster."""
        records: Any = getattr(self.session, "records", ())
        return bool(records) and records[-1].phase == "fallback"

    def _begin(self) -> None:
        """Begin the stream, or go on where a state was saved."""
        state, self._loaded = self._loaded, None
        if state is None:
            self.epoch += self._has_begun
            self.n_drawn = 0
        self._has_begun = True
        source: Iterator[Any] = iter(())
        self._error: Exception | None = None
        try:
            for each in (self._stream, getattr(self._stream, "dataset", None)):
                set_epoch: Any = getattr(each, "set_epoch", None)
                if set_epoch is not None:
                    set_epoch(self.epoch)
            source = iter(self._stream)
        except Exception as failed:  # the first round raises it
            self._error = failed
        goes_on = source is self._stream and source is self._source and state is None
        if not goes_on or (self._is_dry and not self._samples):
            self._source, self._held = source, frozenset[int]()
            self._samples: dict[int, tuple[Any, int, int]] = {}
            """Those in the buffer by their numbers in the stream: with their bytes, and
            how many batches were drawn before."""
            self._numbers: Ints = np.zeros(0, dtype=np.int64)
            self._lengths: Ints = np.zeros((0, 0), dtype=np.int64)
            """(n_held,), (n_held, n_names) Sorted by length, rounded up."""
            self._n_pulled = self._n_bytes = self._n_before = 0
            self._next_state = 1
            self._states: deque[tuple[int, Any]] = deque([(0, None)])
            """States of the source, and how many samples came before each."""
        self._again: int | None = None if state is None else state.get("again")
        if state is not None:  # what was trained of the first `_n_before` is left out
            self._n_before, self._held = state["n_pulled"], frozenset(state["held"])
            self._states[0] = state["n_before"], state["source"]
            self._n_pulled = state["n_before"]
            can_load = hasattr(self._stream, "load_state_dict")
            if not can_load and isinstance(self._stream, Iterator):  # it goes on there
                self._n_pulled = self._n_before
            self._next_state = self._n_pulled + 1
        self._recent: deque[list[int]] = deque(maxlen=_AHEAD)
        """The numbers of the samples of the last batches."""
        self._n_last = 0
        self._is_within, self._left = True, 0
        self._is_dry = self._error is not None
        self._cuts: list[Ints] = []
        """The numbers of batches of all that is held, if the stream has ended."""
        self._seconds: list[float] = []
        """Their predicted seconds, if they are drawn by them."""
        self._are_dry = False
        """Whether the streams of all ranks have ended."""
        self._last: tuple[int, Any, Ints] | None = None
        """A sample of the last batch: its number, itself, and (1, n_names) lengths."""
        self._largest: Ints | None = None
        """The numbers of the largest batch, if what was trained limits it."""
        self._quantiles = np.zeros(0)
        self._taken: list[float] = []
        """Predicted seconds of this round's batches; -1 where not known."""
        self._begin_reports()

    def _take_back(self) -> None:
        """Put an iteration's only batch back; without a state it begins again."""
        if self._untouched is not None:
            self._samples, self._n_bytes, self._numbers, self._lengths = self._untouched
            self._n_asked -= 1
            self._has_begun &= not self.n_drawn

    def _fill(self) -> bool:
        """Fill the buffer; return whether the stream ends, or a sample is too long."""
        pulled: dict[int, tuple[int, ...]] = {}
        was_dry, most = self._is_dry, self._most
        if self._n_last:  # a larger buffer is filled by and by
            most = min(most, len(self._samples) + 2 * self._n_last)
        try:
            while not self._is_dry and len(self._samples) < most:
                if self._n_bytes >= self._most_bytes:
                    self._warn_of_bytes()
                    break
                sample = next(self._source, _END)
                number, self._is_dry = self._n_pulled, sample is _END
                is_new = number >= self._n_before or number in self._held
                if is_new and not self._is_dry:
                    lengths = self._measured(sample, number)
                    n_bytes = _content_bytes(sample)
                    self._samples[number] = sample, n_bytes, self.n_drawn
                    self._n_bytes += n_bytes
                    pulled[number] = lengths
                elif number == self._again and not self._is_dry:
                    own = self._rows.rounded(np.array([self._measured(sample, number)]))
                    self._last = number, sample, own
                self._n_pulled += not self._is_dry
                if self._n_pulled >= self._next_state:
                    self._keep_state()
        except Exception as failed:  # the next round raises it
            self._error, self._is_dry = failed, True
        if not pulled:
            return self._is_dry != was_dry
        new = self._rows.rounded(np.array([*pulled.values()]))
        self._numbers = np.concatenate([self._numbers, [*pulled]])
        self._lengths = np.concatenate([self._lengths.reshape(-1, new.shape[1]), new])
        noise = np.zeros(self._lengths.shape)
        keys = sort_keys(np.log(self._lengths), noise[0, 1:].tolist(), noise[:, 0])
        order = np.lexsort(keys[::-1])
        self._numbers, self._lengths = self._numbers[order], self._lengths[order]
        seen = np.concatenate([self._extremes.reshape(-1, new.shape[1]), new])
        longest = seen.sum(axis=1).argmax()
        self._extremes = seen[[*seen.argmin(axis=0), *seen.argmax(axis=0), longest]]
        is_known = self._rows.table is None or self._rows.knows(new).all()
        return self._is_dry != was_dry or not is_known

    def _warn_of_bytes(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "mimose.BatchStream holds %d samples, not %d, because these take %s: "
                "batches of few samples are less alike in length. Raise buffer_bytes",
                *(len(self._samples), self._most, format_bytes(self._n_bytes)),
            )

    def _measured(self, sample: Any, number: int) -> tuple[int, ...]:
        """Return the lengths of a sample.

        Raises:
            MimoseError: There are none.
            ValueError: They are not integers of at least 1, or have other names.
        """
        what = f"length: that of sample {number} of the stream"
        try:
            is_column = isinstance(self._length, str)
            found = _size(sample[self._length]) if is_column else self._length(sample)
            by_name = dict(found) if isinstance(found, Mapping) else {"": found}
        except Exception as error:
            msg = (
                f"{what} ({type(sample).__name__}) cannot be found, because of "
                f"{type(error).__name__}: {error}. Give the name of a column of one "
                f"dimension, or a function of a single sample"
            )
            raise MimoseError(msg) from error
        names = list(by_name) if isinstance(found, Mapping) else []
        if self._names is None:
            self._names = self._rows.names = names
        if {*names} != {*self._names}:
            msg = (
                f"{what} has the names {names}, those before had {self._names}: return "
                f"the same names for all samples"
            )
            raise ValueError(msg)
        return tuple(check_integer(what, by_name[n]) for n in self._names or [""])

    def _begin_round(self) -> int:
        """Return how many batches the round has; 0 at the end."""
        error, cuts = None, list[Ints]()
        try:
            if self._error is not None:
                raise self._error
            cuts = self._learn()
        except Exception as failed:
            if self._world_size == 1:
                raise
            error = failed
        most = round_length(self._n_asked) if self._largest is None else 1
        n_batches = n_cuts = len(cuts)
        if self._world_size > 1:
            most, n_batches, n_cuts = self._agreed(len(cuts), most, error)
        elif not self._is_dry:
            n_batches = most
        table = self._rows.table
        is_small = table is not None and (not table.rows or self._largest is not None)
        self._cuts, self._seconds = [], []
        if self._is_dry and not is_small:
            halved(cuts, n_cuts)
            places = self._rng(1).permutation(len(cuts)).tolist()
            began = min((began for *_, began in self._samples.values()), default=0)
            n_left = began + 2 * self._most - self.n_drawn
            is_late = n_left < len(self._samples)
            if is_late or (not self.n_drawn and self._world_size == 1):
                places.sort(key=lambda i: -cuts[i].min())
            elif len(self._quantiles):
                own = [self._lengths[np.isin(self._numbers, cut)] for cut in cuts]
                self._seconds = self._rows.seconds(own).tolist()
            if self._seconds and self._are_dry:
                cuts = [cuts[i] for i in np.argsort(self._seconds, kind="stable")]
                self._seconds = []
            self._cuts = [cuts[i] for i in places]
            self._seconds = [self._seconds[i] for i in places if self._seconds]
        return min(most, n_batches)

    def _learn(self) -> list[Ints]:
        """Make a table; return the numbers of batches of all that is held.

        Raises:
            MimoseError: There is no sample, or a size has no bound.
        """
        if not len(self._numbers) and not self.n_drawn:
            msg = (
                "mimose.BatchStream got no sample: the stream is empty. A generator "
                "yields its samples once: give an object whose __iter__ begins anew"
            )
            raise MimoseError(msg)
        before, table, self._largest = self._rows.table, None, None
        if not len(self._numbers):
            return []
        if self.session is not None or self.is_expecting:
            self._rows.cover(np.concatenate([self._lengths, self._extremes]))
            table = Table()
        if self.session is not None:
            table = self._rows.forecast(self.session, self._n_asked, "BatchStream")
        self._rows.table = table
        self.is_settled = (
            table is not None and any(table.rows) and table.is_like(before)
        )
        free_gaps(before, table)
        lengths, numbers = self._lengths[::-1], self._numbers[::-1]
        slices, _ = self._rows.cut(lengths)
        cuts = [numbers[part] for part in slices]
        if self._is_growing:
            self._most = max(self._most, _BATCHES * len(numbers) // len(cuts))
        limited = self._rows.limited([lengths[part] for part in slices])
        self._largest = cuts[limited[0]] if limited else None
        return cuts

    def _agreed(
        self, n_cuts: int, most: int, error: Exception | None
    ) -> tuple[int, int, int]:
        """Return numbers of batches: of a round, that all ranks have, to cut.

        Raises:
            MimoseError: The ranks are not at the same batch.
            OtherRankError: Another rank failed.
        """
        seconds = np.full(len(_QUANTILES), -1.0)
        if error is None and len(self._numbers):
            own = self._rows.seconds_of_full(self._lengths)
            if len(own):
                order = own.argsort(kind="stable")
                places = np.cumsum(1.0 / self._rows.of(self._lengths[order]))
                seconds = np.interp(_QUANTILES, places / places[-1], own[order])
        n_held = len(self._numbers)
        counts = self.epoch, self.n_drawn, self._is_dry, n_held, n_cuts, most
        taken = self._taken + [-1.0] * (LONG_ROUND - len(self._taken))
        found = exchange([*counts, *seconds.tolist(), *taken], error)
        found, taken_by = np.split(found, [-LONG_ROUND], axis=1)
        self._taken.clear()
        for by_rank in taken_by.T:
            if self.session is not None and by_rank.min() >= 0.0:
                self.session.collation.predicted(by_rank.tolist())
        if (found[:, :2] != found[0, :2]).any():
            at = [f"{n:.0f} of iteration {e:.0f}" for e, n in found[:, :2]]
            msg = (
                f"the ranks of mimose.BatchStream do not draw the same batches: by "
                f"rank they are at batch {', '.join(at)}. Begin and end each iteration "
                f"on all ranks, and load states that were saved together"
            )
            raise MimoseError(msg)
        is_dry, (held, cuts, mosts) = found[:, 2] > 0, found[:, 3:6].astype(int).T
        self._are_dry = bool(is_dry.all())
        known = found[found[:, 6] >= 0.0, 6:]
        self._quantiles = known.mean(axis=0) if len(known) else np.zeros(0)
        most = int(mosts.min())
        if not is_dry.any() or (self._is_even and not is_dry.all()):
            return most, int(held[~is_dry].min()), n_cuts
        n = int(cuts[is_dry].max())
        n = n if self._is_even else min(n, int(held.min()))
        if not n and held.any():
            _log.warning(
                "mimose.BatchStream ends on all ranks, because the stream of rank %d "
                "has ended: %d samples in the buffers of other ranks, and what their "
                "streams still have, are not trained. even_batches=True trains them",
                *(int(held.argmin()), held.sum()),
            )
        return most, n, n

    def _draw(self) -> list[Any]:
        """Return the samples of the next batch."""
        self.is_repeated = not len(self._numbers)
        if self.is_repeated:
            assert self._last is not None
            _, sample, lengths = self._last
            self._note(lengths, [])
            return [sample]
        oldest = int(self._numbers.argmin())
        _, _, began = self._samples[int(self._numbers[oldest])]
        if self._cuts:
            at, target = -1, self._target()
            if self._seconds and target is not None:
                at = int(np.abs(np.array(self._seconds) - target).argmin())
                self._seconds.pop(at)
            own = np.flatnonzero(np.isin(self._numbers, self._cuts.pop(at)))
        elif self.n_drawn - began >= self._most:
            own = self._around(oldest)
        elif self._largest is not None:
            own = np.flatnonzero(np.isin(self._numbers, self._largest))
        else:
            own = self._around(self._leader())
        lengths, numbers = self._lengths[own], self._numbers[own].tolist()
        self._note(lengths, numbers)
        samples, sizes, _ = zip(*map(self._samples.pop, numbers), strict=True)
        self._n_bytes -= sum(sizes)
        self._last = numbers[0], samples[0], lengths[:1]
        self._n_last = len(numbers)
        self._numbers = np.delete(self._numbers, own)
        self._lengths = np.delete(self._lengths, own, axis=0)
        return list(samples)

    def _note(self, lengths: Ints, numbers: list[int]) -> None:
        """Report the lengths of a batch, and note its numbers."""
        self._report(lengths)
        self._recent.append(numbers)
        if self._world_size > 1:
            self._taken += self._rows.seconds([lengths]).tolist() or [-1.0]

    def _rng(self, of: int) -> np.random.Generator:
        """Return random numbers of the next batch, the same on all ranks."""
        return np.random.default_rng((self._seed, self.epoch, self.n_drawn, of))

    def _leader(self) -> int:
        """Return the place of a random leader in the buffer."""
        table, (n, n_names) = self._rows.table, self._lengths.shape
        if table is not None and not table.rows and self._n_asked <= 1 + n_names < n:
            if 0 < self._n_asked <= n_names:  # the longest come second
                return int(self._lengths[:, self._n_asked - 1].argmax())
            return 0
        seconds, target = self._rows.seconds_of_full(self._lengths), self._target()
        if len(seconds) and target is not None:
            return int(np.abs(seconds - target).argmin())
        filled = np.cumsum(1.0 / self._rows.of(self._lengths))
        return int(np.searchsorted(filled, self._rng(0).random() * filled[-1]))

    def _target(self) -> float | None:
        """Return seconds that all ranks draw for a batch; None if they know none."""
        if not len(self._quantiles):
            return None
        return float(np.interp(self._rng(0).random(), _QUANTILES, self._quantiles))

    def _around(self, at: int) -> Ints:
        """Return the places of a leader, and of its neighbours."""
        n = most = len(self._lengths)
        table = self._rows.table
        if table is not None and not table.rows:  # costs a row are fitted if rows vary
            most = FIRST_ROWS[-1]
            if self._n_asked > 1 + self._lengths.shape[1]:
                most = FIRST_ROWS[self._rng(2).integers(len(FIRST_ROWS))]
        if self._world_size > 1:  # each other batch of the round has one at least
            most = max(1, min(most, n - self._left))
        distance = np.abs(np.log(self._lengths / self._lengths[at])).sum(axis=1)
        sides = distance[at::-1], distance[at + 1 :]
        nearest = np.concatenate([np.maximum.accumulate(side) for side in sides])
        places = np.concatenate([np.arange(at, -1, -1), np.arange(at + 1, n)])
        places = places[nearest.argsort(kind="stable")]
        return places[: min(most, self._rows.filled(self._lengths[places]))]

    def _keep_state(self) -> None:
        """Keep a state of the source, if it has one."""
        self._next_state = self._n_pulled + max(1, self._most // 4)
        if hasattr(self._stream, "state_dict"):
            self._states.append((self._n_pulled, self._stream.state_dict()))
            oldest = min(self._samples, default=self._n_pulled)
            last = [] if self._last is None else [self._last[0]]
            oldest = min([oldest, *last, *itertools.chain(*self._recent)])
            while len(self._states) > 1 and self._states[1][0] <= oldest:
                self._states.popleft()

    def state_dict(self, n_trained: int | None = None) -> dict[str, Any]:
        """Return the position in the stream, as JSON data if the state of `samples` is.

        If `samples` has `state_dict` and `load_state_dict`, as torchdata's
        `StatefulDataLoader` and the streams of datasets, the state of `samples` before
        the oldest sample in the buffer is kept. Others are read again from their start.
        What was trained is left out, so nothing is lost or repeated if samples come in
        the same order again. On several ranks save each rank's.

        Args:
            n_trained: How many batches of this iteration were trained, if a trainer
                draws ahead: what was drawn but not trained is drawn again after
                loading. None if all were trained.

        Raises:
            ValueError: `n_trained` is larger than `n_drawn`, or more than 64 batches
                smaller.
        """
        if self._loaded is not None:
            return dict(self._loaded)
        n_trained = self.n_drawn if n_trained is None else n_trained
        recent = list(getattr(self, "_recent", ()))
        if not self.n_drawn - len(recent) <= n_trained <= self.n_drawn:
            msg = (
                f"n_trained must be from {self.n_drawn - len(recent)} to "
                f"{self.n_drawn}, the batches drawn in this iteration, got {n_trained}"
            )
            raise ValueError(msg)
        state = {"of": self._description(), "epoch": self.epoch, "held": None}
        if not self._is_within and n_trained == self.n_drawn:
            return {**state, "has_begun": self._has_begun}
        open_ = recent[len(recent) - self.n_drawn + n_trained :]
        to_come = [n for n in self._held if n >= self._n_pulled]
        held = sorted(itertools.chain(self._samples, to_come, *open_))
        again = None  # what is to be repeated
        if not held and self._world_size > 1 and self._last is not None:
            again = self._last[0]
        oldest = min(held[:1] or [self._n_pulled if again is None else again])
        n_before, source = [each for each in self._states if each[0] <= oldest][-1]
        return {
            **state,
            "held": held,
            "again": again,
            "n_drawn": n_trained,
            "n_pulled": max(self._n_pulled, self._n_before),
            "n_before": n_before,
            "source": source,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue in the next iteration where another stream stopped.

        Args:
            state: What `state_dict` returned, also after a way through JSON.

        Raises:
            StateMismatchError: The state belongs to another rank, or another seed.
        """
        own = self._description()
        its = state.get("of") if isinstance(state, Mapping) else None
        if its != own:
            msg = (
                f"the state belongs to another stream, with {its}; this one has {own}. "
                f"Load the state of the same rank, or begin the stream without it"
            )
            raise StateMismatchError(msg)
        self.epoch, held = state["epoch"], state["held"]
        self.n_drawn = state.get("n_drawn", 0)
        self._has_begun, self._loaded = state.get("has_begun", True), None
        if held is None:
            return
        self._loaded, kind = state, type(self._stream).__name__
        if hasattr(self._stream, "load_state_dict"):
            if state["source"] is not None:
                self._stream.load_state_dict(state["source"])
        elif isinstance(self._stream, Iterator):
            _log.warning(
                "mimose.BatchStream cannot resume exactly, because its samples (a %s) "
                "go on where they were and have no load_state_dict: %d samples that "
                "were in the buffer are not trained",
                *(kind, len(held)),
            )
        else:
            _log.warning(
                "mimose.BatchStream reads its samples (a %s without load_state_dict) "
                "again from their start, and leaves out the %d that were trained. That "
                "is exact if they come in the same order",
                *(kind, state["n_pulled"] - len(held)),
            )

    def _description(self) -> dict[str, Any]:
        where = {"rank": self._rank, "world_size": self._world_size}
        return {"version": 2, "seed": self._seed, **where}


def _size(value: Any) -> Any:
    """Return the length of a column's value, or the value if it has none.

    Raises:
        ValueError: It has several dimensions.
    """
    n_dims = getattr(value, "ndim", 1)
    if n_dims > 1:
        msg = f"the column has {n_dims} dimensions"
        raise ValueError(msg)
    return len(value) if n_dims and hasattr(value, "__len__") else value


def _content_bytes(thing: Any, seen: set[int] | None = None) -> int:
    """Return the bytes of the tensors, arrays, texts and numbers in something.

    Args:
        thing: In containers and attributes all is counted, but of a list of numbers
            only how many there are.
        seen: What is counted already.
    """
    if isinstance(thing, (int, float)) or thing is None:
        return _NUMBER_BYTES
    if isinstance(thing, (torch.Tensor, np.ndarray)):
        return int(thing.nbytes)
    if isinstance(thing, (str, bytes, bytearray)):
        return len(thing)
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, (list, tuple, set, frozenset)):
        parts: Iterable[Any] = thing
        if isinstance(next(iter(thing), None), (int, float)):
            return _NUMBER_BYTES * len(thing)
    elif isinstance(thing, Mapping):
        parts = thing.values()
    elif hasattr(thing, "getbands"):  # a picture of PIL, a byte a pixel and band
        return int(np.prod(thing.size)) * len(thing.getbands())
    else:
        parts = [*getattr(thing, "__dict__", {}).values()]
        for kind in type(thing).__mro__:
            slots = vars(kind).get("__slots__", ())
            names = [slots] if isinstance(slots, str) else slots
            parts += [getattr(thing, name) for name in names if hasattr(thing, name)]
    total = 0
    for part in parts:
        total += _content_bytes(part, seen)
    return total
