"""Batches that fill the memory budget, of samples that come one after the other.

Note: [Leaders and neighbours]
The buffer is sorted by length. A batch has a leader and its neighbours in the buffer,
first those whose lengths are nearer, as many as the rows allow. Every second leader is
the oldest sample. The others are random, each as likely as its share of a batch: so the
buffer keeps the lengths that the stream has. When the stream has ended, the rest is cut
into batches, and every second one of these is that with the oldest sample.

Note: [Ranks of a stream]
Each rank has other samples. In each round the ranks exchange how many they hold, and
quantiles of the predicted seconds of their batches. A random leader is the sample whose
batch comes nearest to seconds that all ranks draw from the mean of the quantiles. No
rank draws more batches in a round than each other one holds samples: so each has a
sample for every step of the round, whatever its stream does in the meantime. A failing
stream is an ended one until the next exchange.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from mimose.arguments import check_integer, check_session, check_switches
from mimose.budget import format_bytes, parse_budget
from mimose.distributed import Exchange, own_rank
from mimose.exceptions import MimoseError, StateMismatchError
from mimose.rows import Floats, Ints, Rows, Table, free_gaps, round_length, sort_keys

if TYPE_CHECKING:
    from mimose.session import Session

_log = logging.getLogger(__name__)

_FIRST_ROWS = (8, 4, 2, 1)
"""The most rows of batches before anything is known."""
_QUANTILES = np.linspace(0.0, 1.0, 16)
"""Of predicted seconds."""
_NUMBER_BYTES = 8
_END = object()


class _Held(NamedTuple):
    """A sample in the buffer; sorted by what comes first."""

    key: tuple[float, ...]
    number: int
    """How many samples came before it in the stream."""
    lengths: tuple[int, ...]
    n_bytes: int
    sample: Any


class BatchStream:
    """Makes batches of as many rows as the budget allows from a stream of samples.

    ::

        samples = DataLoader(dataset, batch_size=None, num_workers=4)
        stream = mimose.BatchStream(
            samples, session, length="input_ids", collate_fn=collate
        )
        for batch in stream:

    For samples without an index, or whose lengths are known only once they are made:
    streams, the results of a processor, completions of a policy. It holds a buffer of
    samples, and draws batches of like lengths from it, with rows as `BatchSampler`
    chooses them: small at first, then as many as train the most tokens a second.

    Each sample comes once. None waits for more than twice as many batches as the buffer
    has samples: Note: [Leaders and neighbours]. What is longer than anything before is a
    batch by itself until the next round. The buffer is also what shuffles: samples that
    lie far apart in the stream do not meet in a batch.

    A second iteration begins the stream again. An iterator, such as a generator's, goes
    on where it was. A batch that does not fit in the end is one for
    `Session.micro_batches` or `Session.step`, as with any loader.

    On several ranks each one has its own part of the stream:
    Note: [Ranks of a stream]. All ranks draw equally many batches.

    Attributes:
        n_drawn: Batches drawn in this iteration.
        is_settled: Whether the last round changed no number of rows.
        is_expecting: Whether to draw small batches until there is a session. The
            trainers' callbacks set it.
        is_repeated: Whether the last batch is a sample that was trained before, because
            this rank has no more: multiply its loss by 0 to train nothing twice.
        session: Makes the forecasts. You can set it later.

    Args:
        samples: Yields single samples; on several ranks, this rank's.
        session: Makes the forecasts. Without a session each batch has `max_rows` rows,
            or as many as `max_tokens` allows, or 8.
        length: The name of a column whose length counts, or that holds the length; or a
            function of a sample that returns its length, or several by the names of the
            sizes that follow from them, as the lengths of `BatchSampler`.
        collate_fn: Makes a batch of a list of samples.
        buffer: The most samples in the buffer.
        buffer_bytes: The most bytes of these, up to one sample more: ``"1GiB"``. Counted
            are tensors, arrays, texts and numbers, in containers and in attributes.
        seed: Seed of the random order; the same on all ranks.
        max_rows: The most rows of a batch.
        max_tokens: The most tokens of a batch, with padding. A longer sample is a batch
            by itself.
        pad_to_multiple_of: To what your collator rounds padded lengths up, or None.
        even_batches: What happens where a rank's stream ends first. If True, it repeats
            one sample a batch until all have ended. If False, all ranks stop.
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
        buffer: int = 1024,
        buffer_bytes: int | str = "1GiB",
        seed: int = 0,
        max_rows: int | None = None,
        max_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        even_batches: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if not isinstance(length, str) and not callable(length):
            msg = f"length must name a column or be a function, got {length!r}"
            raise ValueError(msg)
        check_session(session)
        check_switches(even_batches=even_batches)
        self._samples, self._length, self._collate = samples, length, collate_fn
        self._most, self._seed = check_integer("buffer", buffer), seed
        self._most_bytes = parse_budget(buffer_bytes, None)
        check_integer("seed", seed, 0)
        self._is_even = bool(even_batches)
        self._rank, self._world_size = own_rank(rank, world_size)
        self._rows = Rows(
            [],
            max_rows=max_rows,
            max_tokens=max_tokens,
            pad_to_multiple_of=pad_to_multiple_of,
        )
        self._session = session
        self._unreported: list[tuple[int, ...]] = []
        """What was drawn in this iteration while there was no session."""
        self.is_settled = self.is_expecting = self.is_repeated = False
        self._names: list[str] | None = None
        self._extremes: Ints = np.zeros((0, 0), dtype=np.int64)
        """(n_samples, n_names) The shortest and the longest lengths of all samples."""
        self._n_asked = self._epoch = self.n_drawn = 0
        self._has_warned = self._is_within = False
        self._held: list[_Held] = []
        self._source: Iterator[Any] | None = None
        self._loaded: Mapping[str, Any] | None = None

    @property
    def session(self) -> Session | None:
        """The session that makes the forecasts; used from the next round on."""
        return self._session

    @session.setter
    def session(self, session: Session | None) -> None:
        """Report to it what was drawn before."""
        self._session = session
        self._report()

    def _report(self) -> None:
        if self._session is not None:
            for drawn in self._unreported:
                self._session.collation.drew(drawn)
            self._unreported.clear()

    # ------------------------------------------------------------------ the stream

    def _begin(self) -> None:
        """Begin the stream, or go on where a state was saved."""
        state, self._loaded = self._loaded, None
        source = iter(self._samples)
        if source is not self._source or state is not None:
            self._source, at, before = source, 0, None
            self._held, self._n_pulled, self._n_bytes = [], 0, 0
            self._skipped: range | frozenset[int] = frozenset()
            if state is not None and hasattr(self._samples, "load_state_dict"):
                at, before = state["at"], state["source"]
                self._n_pulled = at
                self._skipped = frozenset(range(at, state["n_pulled"])).difference(
                    state["held"]
                )
            self._sources = deque([(at, before)])
            """States of the source, and how many samples came before each."""
        self._epoch = self._epoch + 1 if state is None else state["epoch"]
        self.n_drawn = 0 if state is None else state["n_drawn"]
        self._is_dry, self._is_within, self._left = False, True, 0
        self._error: Exception | None = None
        self._cuts: list[Sequence[_Held]] = []
        """Batches of all that is held, if the stream has ended."""
        self._repeated: _Held | None = None
        self._limited: int | None = None
        """The number of a sample in one of the largest batches that are allowed."""
        self._quantiles: Floats = np.zeros(0)
        self._unreported.clear()
        if self._session is not None:
            self._session.collation.begin()

    def __iter__(self) -> Iterator[Any]:
        """Yield batches until the stream ends, on several ranks all equally many.

        Raises:
            MimoseError: There is no sample; one has no length; a size of the model's
                inputs has no bound; ranks are not at the same batch.
            OtherRankError: Another rank failed.
        """
        self._begin()
        budget = 0
        while True:
            self._fill()
            alone = self._session if self._world_size == 1 else None
            now = 0 if alone is None else alone.budget
            if not self._left or now < budget:
                self._left = self._begin_round()
                if not self._left:
                    break
            budget = now
            self._left -= 1
            batch = self._draw()
            self.n_drawn += 1
            self._n_asked += 1
            own = np.array([held.lengths for held in batch])
            drawn = len(own), *own.sum(axis=0).tolist(), *own.max(axis=0).tolist()
            self._unreported.append(drawn)
            self._report()
            yield self._collate([held.sample for held in batch])
        self._is_within = False

    def _fill(self) -> None:
        """Pull samples until the buffer is full."""
        assert self._source is not None
        pulled: list[tuple[int, tuple[int, ...], int, Any]] = []
        was_dry = self._is_dry
        while not self._is_dry and len(self._held) + len(pulled) < self._most:
            if self._n_bytes >= self._most_bytes:
                self._warn_of_bytes(len(self._held) + len(pulled))
                break
            try:
                sample = next(self._source, _END)
                self._is_dry = sample is _END
                if self._is_dry:
                    break
                number = self._n_pulled
                self._n_pulled += 1
                if number not in self._skipped:
                    size = _n_bytes(sample, set())
                    pulled.append((number, self._measured(sample, number), size, sample))
                    self._n_bytes += size
                self._keep_state()
            except Exception as failed:
                if self._world_size == 1:
                    raise
                self._error, self._is_dry = failed, True
        if pulled:
            numbers, measured, sizes, samples = zip(*pulled, strict=True)
            lengths = self._rows.rounded(np.array(measured, dtype=np.int64))
            n_names = lengths.shape[1]
            keys = sort_keys(np.log(lengths), [0.0] * (n_names - 1), np.zeros(len(lengths)))
            columns = zip(*(own.tolist() for own in keys), strict=True)
            rounded = map(tuple, lengths.tolist())
            for each in zip(columns, numbers, rounded, sizes, samples, strict=True):
                insort(self._held, _Held(*each))
            seen = np.concatenate([self._extremes.reshape(-1, n_names), lengths])
            ends = seen.argmin(axis=0), seen.argmax(axis=0), [seen.sum(axis=1).argmax()]
            self._extremes = seen[np.concatenate(ends)]
            is_new = self._rows.table is not None and not self._rows.knows(lengths).all()
            if is_new and self._world_size == 1:
                self._left = 0
        if self._world_size == 1 and (self._is_dry != was_dry or not self._held):
            self._left = 0

    def _warn_of_bytes(self, n_samples: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "mimose.BatchStream holds %d samples, not %d, because these take %s: "
                "batches of few samples are less alike in length. Raise buffer_bytes",
                *(n_samples, self._most, format_bytes(self._n_bytes)),
            )

    def _measured(self, sample: Any, number: int) -> tuple[int, ...]:
        """Return the lengths of a sample.

        Raises:
            MimoseError: There are none.
            ValueError: They are not integers of at least 1, or have other names.
        """
        try:
            by_name = isinstance(self._length, str)
            found = _size(sample[self._length]) if by_name else self._length(sample)
        except Exception as error:
            kind = type(sample).__name__
            msg = (
                f"length: sample {number} of the stream ({kind}) has none, because "
                f"{type(error).__name__}: {error}. Give the name of a column with one "
                f"dimension, or a function of a single sample"
            )
            raise MimoseError(msg) from error
        mapping = found if isinstance(found, Mapping) else {"": found}
        names = list(found) if isinstance(found, Mapping) else []
        if self._names is None:
            self._names = self._rows.names = names
        if sorted(names) != sorted(self._names):
            msg = (
                f"length: sample {number} of the stream has lengths {names}, those "
                f"before had {self._names}: return the same names for all samples"
            )
            raise ValueError(msg)
        what = f"length: that of sample {number} of the stream"
        return tuple(check_integer(what, mapping[n]) for n in self._names or [""])

    # ------------------------------------------------------------------ rounds

    def _begin_round(self) -> int:
        """Make a table, and return how many batches are drawn by it; 0 at the end."""
        error = self._error
        try:
            if error is None:
                self._look()
        except Exception as failed:
            if self._world_size == 1:
                raise
            error = failed
        cuts = [] if error is not None else self._cut()
        lengths = [np.array([held.lengths for held in cut]) for cut in cuts]
        limited = self._rows.limited(lengths)
        self._limited = None
        if limited:
            largest = cuts[limited[0]]
            self._limited = largest[len(largest) // 2].number
        most = 1 if limited else round_length(self._n_asked)
        if self._world_size == 1:
            total = most = min(most, len(cuts)) if self._is_dry else most
        else:
            most, total = self._agree(len(cuts), error, most)
        table = self._rows.table
        self._cuts = []
        if self._is_dry and (table is None or (table.rows and not limited)):
            self._cuts = _halved(cuts, total)
            rng = np.random.default_rng((self._seed, self._epoch, self.n_drawn, 1))
            self._cuts = [self._cuts[i] for i in rng.permutation(len(self._cuts))]
        return min(most, total)

    def _look(self) -> None:
        """Make a table for the lengths in the buffer, and the extremes.

        Raises:
            MimoseError: There is no sample, or what `Rows.forecast` raises.
        """
        if not self._held and not self.n_drawn:
            msg = (
                "mimose.BatchStream got no sample: the stream is empty. A generator "
                "yields its samples once: give an object whose __iter__ begins anew"
            )
            raise MimoseError(msg)
        before, table = self._rows.table, None
        if self._session is not None or self.is_expecting:
            own = [held.lengths for held in self._held]
            self._rows.cover(np.array([*own, *self._extremes.tolist()]))
            table = Table()
        if self._session is not None:
            table = self._rows.forecast(self._session, self.n_drawn, "BatchStream")
        self._rows.table = table
        self.is_settled = table is not None and any(table.rows) and table.is_like(before)
        free_gaps(before, table)

    def _cut(self) -> list[Sequence[_Held]]:
        """Return batches of all that is held."""
        if not self._held:
            return []
        lengths = np.array([held.lengths for held in reversed(self._held)])
        n, (slices, _) = len(lengths), self._rows.cut(lengths)
        return [self._held[n - part.stop : n - part.start] for part in slices]

    def _agree(self, n_cuts: int, error: Exception | None, most: int) -> tuple[int, int]:
        """Return how many batches come in this round, and at most in all.

        Raises:
            MimoseError: The ranks are not at the same batch.
            OtherRankError: Another rank failed.
        """
        seconds = np.full(len(_QUANTILES), -1.0)
        if error is None and self._held:
            seconds = self._seconds(seconds)
        counts = self._epoch, self.n_drawn, self._is_dry, len(self._held), n_cuts, most
        found = Exchange([*counts, *seconds.tolist()], error).wait()
        if (found[:, :2] != found[0, :2]).any():
            at = [f"{n:.0f} of iteration {e:.0f}" for e, n in found[:, :2]]
            msg = (
                f"the ranks of mimose.BatchStream do not draw the same batches: by rank "
                f"they are at batch {', '.join(at)}. Begin and end each iteration on all "
                f"ranks, with the states that were saved together"
            )
            raise MimoseError(msg)
        is_dry, (held, cuts, mosts) = found[:, 2] > 0, found[:, 3:6].astype(int).T
        known = found[:, 6:][(found[:, 6:] >= 0.0).all(axis=1)]
        self._quantiles = known.mean(axis=0) if len(known) else known
        if is_dry.all() and self._is_even:
            total = cuts.max()
        elif is_dry.any() and not self._is_even:
            total = min(cuts[is_dry].max(), held.min())
            if not total and held.any():
                _log.warning(
                    "mimose.BatchStream ends on all ranks, because the stream of rank "
                    "%d has ended: %d samples in the buffers of the others, and what "
                    "their streams still have, are not trained. even_batches=True goes "
                    "on with them",
                    *(int(held.argmin()), held.sum()),
                )
        else:
            total = held[~is_dry].min()
        return int(mosts.min()), int(total)

    def _seconds(self, unknown: Floats) -> Floats:
        """Return quantiles of the predicted seconds of this rank's batches."""
        lengths = np.array([held.lengths for held in self._held])
        seconds = self._rows.seconds_of_full(lengths)
        if not len(seconds):
            return unknown
        order = seconds.argsort(kind="stable")
        shares = 1.0 / self._rows.of(lengths[order])
        places = (np.cumsum(shares) - shares / 2.0) / shares.sum()
        return np.interp(_QUANTILES, places, seconds[order])

    # ------------------------------------------------------------------ batches

    def _draw(self) -> Sequence[_Held]:
        """Return the next batch."""
        self.is_repeated = not self._held
        if not self._held:
            assert self._repeated is not None
            return [self._repeated]
        if self._cuts:
            at = len(self._cuts) - 1
            if self._is_oldest:
                at = min(range(at + 1), key=lambda i: min(h.number for h in self._cuts[i]))
            batch = self._cuts.pop(at)
        else:
            batch = self._around()
        at = bisect_left(self._held, batch[0])
        del self._held[at : at + len(batch)]
        self._n_bytes -= sum(held.n_bytes for held in batch)
        self._repeated = batch[0]
        return batch

    @property
    def _is_oldest(self) -> bool:
        """Whether the oldest sample leads the next batch."""
        return self.n_drawn % 2 == 0

    def _around(self) -> Sequence[_Held]:
        """Return a leader and its neighbours: Note: [Leaders and neighbours]."""
        rng = np.random.default_rng((self._seed, self._epoch, self.n_drawn))
        lengths = np.array([held.lengths for held in self._held])
        at = self._leader(lengths, rng)
        most, table = len(lengths), self._rows.table
        if table is not None and not table.rows:  # costs a row are fitted if rows vary
            most = _FIRST_ROWS[0 if self.n_drawn <= 2 else rng.integers(len(_FIRST_ROWS))]
        if self._world_size > 1:  # the batches of the round have one each
            most = max(1, min(most, len(lengths) - self._left))
        distance = np.abs(np.log(lengths / lengths[at])).sum(axis=1)
        sides = distance[:at][::-1], distance[at + 1 :]
        nearest = np.concatenate([[0.0], *map(np.maximum.accumulate, sides)])
        places = np.concatenate([np.arange(at, -1, -1), np.arange(at + 1, len(lengths))])
        places = places[nearest.argsort(kind="stable")]
        own = places[: min(most, self._rows.filled(lengths[places]))]
        return self._held[own.min() : own.max() + 1]

    def _leader(self, lengths: Ints, rng: np.random.Generator) -> int:
        """Return the place of a leader in the buffer.

        Args:
            lengths: (n_held, n_names)
            rng: The same on all ranks.
        """
        numbers = [held.number for held in self._held]
        if self._is_oldest:
            return numbers.index(min(numbers))
        table, turn = self._rows.table, self.n_drawn // 2
        if table is not None and not table.rows and turn < lengths.shape[1]:
            return int(lengths[:, turn].argmax())  # the longest come second
        if self._limited in numbers:
            return numbers.index(self._limited)
        share = rng.random()
        if len(self._quantiles):
            seconds = self._rows.seconds_of_full(lengths)
            if len(seconds):
                target = np.interp(share, _QUANTILES, self._quantiles)
                return int(np.abs(seconds - target).argmin())
        filled = np.cumsum(1.0 / self._rows.of(lengths))
        return int(np.searchsorted(filled, share * filled[-1], "right"))

    # ------------------------------------------------------------------ state

    def _keep_state(self) -> None:
        """Keep a state of the source now and then."""
        if hasattr(self._samples, "state_dict"):
            n_since = self._n_pulled - self._sources[-1][0]
            if n_since >= max(1, self._most // 4) or self._n_pulled == 1:
                self._sources.append((self._n_pulled, self._samples.state_dict()))

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream, as JSON data if the state of `samples` is.

        It has the state of `samples` before the oldest sample in the buffer, and which
        samples after it were not trained. So nothing is lost or repeated, if `samples`
        has `state_dict` and `load_state_dict`, as torchdata's `StatefulDataLoader` and
        the streams of datasets have. On several ranks, save each rank's.
        """
        state = {"of": self._description(), "epoch": self._epoch, "n_drawn": self.n_drawn}
        if not self._is_within:
            return {**state, "held": None}
        held = sorted(each.number for each in self._held)
        oldest = held[0] if held else self._n_pulled
        while len(self._sources) > 1 and self._sources[1][0] <= oldest:
            self._sources.popleft()
        at, source = self._sources[0]
        numbers = {"n_pulled": self._n_pulled, "at": at, "source": source}
        return {**state, **numbers, "held": held}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another stream stopped, in the next iteration.

        Args:
            state: What `state_dict` returned, also after a way through JSON.

        Raises:
            StateMismatchError: The state belongs to another rank, or other arguments.
        """
        own = self._description()
        its = state.get("of") if isinstance(state, Mapping) else None
        if its != own:
            msg = (
                f"the state belongs to another stream, with {its}; this one has {own}. "
                f"Load the state of the same rank, or begin the stream without it"
            )
            raise StateMismatchError(msg)
        self._epoch = state["epoch"]
        if state["held"] is None:
            return
        self._loaded = state
        if not hasattr(self._samples, "load_state_dict"):
            n_held, n_pulled = len(state["held"]), state["n_pulled"]
            _log.warning(
                "mimose.BatchStream cannot resume exactly, because its samples (%s) "
                "have no load_state_dict: if they go on where they were, the %d samples "
                "of the buffer are not trained; if they begin again, %d samples are "
                "trained again",
                *(type(self._samples).__name__, n_held, n_pulled - n_held),
            )
        elif state["source"] is not None:
            self._samples.load_state_dict(state["source"])

    def _description(self) -> dict[str, Any]:
        where = {"rank": self._rank, "world_size": self._world_size}
        return {"version": 1, "seed": self._seed, **where}


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


def _halved(batches: list[Sequence[_Held]], n: int) -> list[Sequence[_Held]]:
    """Return at least so many batches, if they have the samples: the largest halved."""
    while len(batches) < n:
        at = max(range(len(batches)), key=lambda i: len(batches[i]), default=0)
        if not batches or not (half := len(batches[at]) // 2):
            break
        batches[at : at + 1] = [batches[at][:half], batches[at][half:]]
    return batches


def _n_bytes(thing: Any, seen: set[int]) -> int:
    """Return the bytes of a sample's contents.

    Args:
        thing: The sample, or a part of it.
        seen: The parts that are counted.
    """
    if isinstance(thing, (torch.Tensor, np.ndarray)):
        return int(thing.nbytes)
    if isinstance(thing, (str, bytes, bytearray)):
        return len(thing)
    if isinstance(thing, (int, float)) or id(thing) in seen:
        return _NUMBER_BYTES
    seen.add(id(thing))
    if isinstance(thing, Mapping):
        return sum(_n_bytes(part, seen) for part in thing.values())
    if isinstance(thing, (list, tuple, set, frozenset, deque)):
        first = next(iter(thing), None)
        if isinstance(first, (int, float)):
            return _NUMBER_BYTES * len(thing)
        return sum(_n_bytes(part, seen) for part in thing)
    return sum(_n_bytes(part, seen) for part in getattr(thing, "__dict__", {}).values())
