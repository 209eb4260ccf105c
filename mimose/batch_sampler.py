"""Batches whose rows follow their lengths, as many as the budget pays for.

Note: [Rows by a table]
How many rows train the most tokens a second is asked of `Session.forecast` at anchors,
a few lengths that cover all. Between them what a row takes, its share of a batch, is
taken to follow a line. It grows faster than any line where lengths grow, so that there
are rather too few rows than too many. A table is asked for anew in each round; where it
has changed, the samples that are left are cut into batches anew. So tables, and how
many batches were drawn by each, are all that it takes to draw an epoch again.

Note: [The longest come second]
A session knows nothing of sizes far beyond those measured, nor of other rows where they
did not vary. So the longest samples of each size are drawn as soon as a step teaches
something, which the first does not, and then a batch of the most rows.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed
from torch.utils.data import Sampler

from mimose.exceptions import MimoseError, StateMismatchError

if TYPE_CHECKING:
    from mimose.forecast import Forecast
    from mimose.session import Session

_log = logging.getLogger(__name__)

_FEW = 8
"""Rows without a limit and a session, and the most before anything is known."""
_FIRST_ROWS = (1, 2, 4, 8)
"""Rows by turns until something is known: what follows rows shows where they vary."""
_ROUND, _LONG_ROUND = 4, 64
"""Batches between two tables, at least and at most."""
_OF_DRAWN = 4
"""Tables are as many batches apart as this part of those that were drawn: what is known
changes ever less, and to ask takes the host's time."""
_DOUBLING = 0.03
"""What a batch twice as large has to bring, at least, as a share of tokens a second. So
much its padding costs of pairs of lengths: T5-large's is 5.0% at 6,400 tokens a batch
and 7.1% at 12,000, BERT-large's 0.4% and 0.7%."""
_SAME = 0.002
"""The same of another number of rows than before."""
_NEAR = 0.08
"""By such a share rows differ too little to cut what is left anew."""
_UNFIT = -1e9
_SAFE = 0.75
"""Of the budget, what a batch half as large again as those known may take."""
_LIKE, _LIKE_OF_SEVERAL = 1.015, 1.08
"""Lengths within such a factor come in random order; of several, the last decides."""
_APART, _APART_OF_SEVERAL = 2.0, 4.0
"""Between anchors, at most."""
_STILL_SMALL = 64
"""Batches before anything is known, after which a warning says why."""
_GRID = sorted({round(1.03**k) for k in range(400)})
"""Numbers of rows that are asked for."""

_Ints: TypeAlias = NDArray[np.int64]
_Table: TypeAlias = list[int] | None
"""Rows at the anchors, 0 where none is known; empty before anything is known; None
where rows are fixed."""


class BatchSampler(Sampler[list[int]]):
    """Draws batches of like lengths, each sample once an epoch.

    ::

        sampler = mimose.BatchSampler(lengths, session)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)

    Of each length it draws as many rows as train the most tokens a second under the
    plan that `session` would make, the optimizer's step included; a batch twice as
    large has to bring 3% more. While the session knows nothing, batches are small: up
    to 8 rows, and no more tokens than the longest sample. They grow as it learns. With
    a session that has loaded a state they are full from the first on.

    Rows vary, and with them what a gradient is the mean of: a learning rate means
    something else than with fixed rows. `max_rows` and `max_tokens` bound them, and
    accumulating until a number of tokens is reached holds the batch of an optimizer's
    step fixed.

    Batches are drawn in rounds. Once a round ranks exchange what their sessions
    forecast, and take the smallest, so that all have as many batches: a few are halved
    for that, or, where all have one row, the shortest are drawn twice. What a loader's
    workers have drawn ahead keeps its rows; where a budget that was lowered meanwhile
    does not hold such a batch, `Session.micro_batches` splits it.

    Attributes:
        session: Who forecasts; may be set later, and counts from the next round on.
        n_drawn: Batches of the running epoch drawn so far, by this rank.
        epoch: The number of the running epoch, or of the last one.
        is_settled: Whether the last round changed nothing: then ``len`` is known.

    Args:
        lengths: Of all samples: integers, or by name (as `Session.forecast` has it,
            ``{"input_ids.1": …, "labels.1": …}``) where several vary. Tokens are
            counted over all of them.
        session: Forecasts what batches take. None for fixed rows: `max_rows`, so many
            as `max_tokens` allow, or 8.
        shuffle: Whether batches, and samples of nearly equal lengths, come in another
            random order each epoch. Otherwise the longest come first.
        seed: Of the random order; the same on all ranks.
        max_rows: Of a batch, at most.
        max_tokens: Of a batch, padding included, at most; a sample that has more comes
            alone.
        drop_last: Whether batches are left out that are not full, or that not every
            rank would get.
        rank: Which of the ranks this is; None for `torch.distributed`'s.
        world_size: How many there are; None likewise.

    Raises:
        ValueError: A length is no integer of at least 1, there are none, or fewer than
            ranks; a limit is not positive; or there is no such rank.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Mapping[str, Sequence[int]],
        session: Session | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        max_rows: int | None = None,
        max_tokens: int | None = None,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        by_name = lengths if isinstance(lengths, Mapping) else {"lengths": lengths}
        self._names = list(lengths) if isinstance(lengths, Mapping) else None
        for name in self._names or ():
            if not name.rpartition(".")[2].isdigit():
                msg = (
                    f"lengths: {name!r} names no size; give the model's argument and "
                    f"the dimension, such as 'input_ids.1'"
                )
                raise ValueError(msg)
        columns = [_checked(name, column) for name, column in by_name.items()]
        if len({len(column) for column in columns}) != 1:
            told = {name: len(column) for name, column in by_name.items()}
            msg = f"lengths must be as many of each name, got {told}"
            raise ValueError(msg)
        self._lengths: _Ints = np.stack(columns, axis=1)
        for name, limit in (("max_rows", max_rows), ("max_tokens", max_tokens)):
            if limit is not None and limit < 1:
                msg = f"{name} must be at least 1, got {limit}"
                raise ValueError(msg)
        is_distributed = distributed.is_available() and distributed.is_initialized()
        if world_size is None:
            world_size = distributed.get_world_size() if is_distributed else 1
        if rank is None:
            rank = distributed.get_rank() if is_distributed else 0
        if not 0 <= rank < world_size:
            msg = f"there is no rank {rank} among {world_size}"
            raise ValueError(msg)
        if len(self._lengths) < world_size:
            msg = f"{len(self._lengths)} samples are fewer than {world_size} ranks"
            raise ValueError(msg)
        self.session = session
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self._rank, self._world_size = rank, world_size
        self._anchors = [_anchors(column, len(columns) > 1) for column in columns]
        self._at_anchors = np.array(list(itertools.product(*self._anchors)))
        """The lengths of all, (A, K)."""
        tokens = self._lengths.sum(axis=1)
        self._most_tokens, self._half_tokens = tokens.max(), np.median(tokens)
        self.epoch = 0
        self._table: _Table = None
        self.is_settled = self._is_expecting = False
        self._warned = False
        self._n_asked = 0
        """Batches of all epochs that this sampler was asked for."""
        self._reset()

    # ------------------------------------------------------------------ an epoch

    def _reset(self) -> None:
        """Go to the start of the epoch."""
        self.n_drawn = 0
        self._is_resumed = self._is_over = self._is_frozen = False
        self._history: list[tuple[int, _Table]] = []
        """Each table, and how many batches were drawn before it."""
        self._order = self._sorted()
        self._is_longest = np.isin(self._order, self._lengths.argmax(axis=0))
        """Of places in the order, which hold a longest sample."""
        self._is_left = np.ones(len(self._order), dtype=bool)
        self._steps: list[list[_Ints]] = []
        """Batches to come, one a rank, as places in the order; the next comes last."""

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of each batch of an epoch, or of what is left of it.

        An epoch that was drawn to its end is followed by the next one; one that was not
        begins anew, unless a state of it was loaded.
        """
        if self._is_over:
            self.epoch += 1
            self._reset()
        elif self.n_drawn and not self._is_resumed:
            self._reset()
        self._is_resumed = False
        left = 0
        while self._steps or not self._history:
            if not left and not self._is_frozen:
                self._renew()
                left = min(max(_ROUND, self._n_asked // _OF_DRAWN), _LONG_ROUND)
            left -= 1
            self._n_asked += 1
            if self._steps:  # none are left where those that are not full are dropped
                batch = self._draw()[self._rank]
                self._is_over = not self._steps
                yield self._order[batch].tolist()
        self._is_over = True

    def __len__(self) -> int:
        """Return how many batches the running epoch has, to whose end rows stay so.

        Raises:
            TypeError: That is not known between epochs, nor while rows change as the
                session learns, nor where ranks agree on them: one that asks alone
                would wait for the others. An estimate is no answer: trainers that know
                a length leave out what is behind it.
        """
        is_alone = self._world_size == 1 or self.session is None
        if is_alone and not self._history:
            self._renew()
            self._renew()
        if not is_alone or self._is_over or not self.is_settled:
            msg = (
                "how many batches mimose.BatchSampler draws in an epoch is known in "
                "it, by one rank alone, once the session has learned; a trainer needs "
                "max_steps"
            )
            raise TypeError(msg)
        self._is_frozen = True
        return self.n_drawn + len(self._steps)

    def expect_session(self) -> None:
        """Draw small batches until `session` is set, by whoever calls this."""
        self._is_expecting = True

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; nothing happens if it is the running one.

        Args:
            epoch: Its number; the first is 0.

        Raises:
            MimoseError: It would undo a state that was just loaded.
        """
        if self._is_resumed and epoch < self.epoch:
            msg = (
                f"set_epoch({epoch}) would undo the state of epoch {self.epoch} that "
                f"was loaded into mimose.BatchSampler: count on from sampler.epoch; a "
                f"loader that accelerate prepared does so after "
                f"loader.set_epoch(sampler.epoch)"
            )
            raise MimoseError(msg)
        if epoch != self.epoch:
            self.epoch = epoch
            self._reset()

    @property
    def batch_size(self) -> int:
        """There is none: rows vary.

        Raises:
            MimoseError: Batches are shared among ranks already, and who asks would
                share them once more.
            AttributeError: Otherwise.
        """
        if self._world_size > 1:
            msg = (
                f"mimose.BatchSampler gives each of the {self._world_size} ranks its "
                f"own batches already: leave the loader out of accelerator.prepare; "
                f"with Lightning, pass use_distributed_sampler=False to the Trainer"
            )
            raise MimoseError(msg)
        msg = "mimose.BatchSampler has no batch_size: rows vary"
        raise AttributeError(msg)

    def state_dict(self, n_trained: int | None = None) -> dict[str, Any]:
        """Return where the epoch stands, ready for JSON; the same on all ranks.

        Args:
            n_trained: Batches of it that this rank has trained, where a loader has
                drawn more; None for all that were drawn. Those that were not trained
                are drawn again.

        Raises:
            ValueError: `n_trained` is negative, or more than were drawn.
        """
        n_trained = self.n_drawn if n_trained is None else n_trained
        if not 0 <= n_trained <= self.n_drawn:
            msg = f"n_trained must be from 0 to {self.n_drawn} (drawn), got {n_trained}"
            raise ValueError(msg)
        epoch = self.epoch
        if self._is_over and n_trained == self.n_drawn:
            epoch, n_trained = epoch + 1, 0
        used = [list(entry) for entry in self._history if entry[0] < n_trained]
        return {
            "of": self._description(),
            "epoch": epoch,
            "n_trained": n_trained,
            "history": used,
            "table": self._table,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another sampler of the same samples stood.

        Args:
            state: What `state_dict` returned, or what came back from JSON.

        Raises:
            StateMismatchError: It is of other samples, ranks, or arguments that settle
                the order. Nothing has changed then.
        """
        own = self._description()
        if state["of"] != own:
            msg = f"the state is of a sampler with {state['of']}; this one has {own}"
            raise StateMismatchError(msg)
        self.epoch = state["epoch"]
        self._reset()
        ends = [*(n for n, _ in state["history"]), state["n_trained"]][1:]
        for (_, table), end in zip(state["history"], ends, strict=False):
            self._take(table)
            while self.n_drawn < end:
                self._draw()
        self._is_over = bool(self._history) and not self._steps
        if not self._history:
            self._table = state["table"]
        self._is_resumed = True

    def _description(self) -> dict[str, Any]:
        return {
            "samples": len(self._lengths),
            "tokens": int(self._lengths.sum()),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "drop_last": self._drop_last,
            "max_rows": self._max_rows,
            "max_tokens": self._max_tokens,
            "world_size": self._world_size,
        }

    # ------------------------------------------------------------------ batches

    def _sorted(self) -> _Ints:
        """Return all samples with like lengths together, the longest first."""
        rng = np.random.default_rng((self._seed, self.epoch))
        logs = np.log(self._lengths)
        n, several = len(logs), logs.shape[1] > 1
        jitter = math.log(_LIKE_OF_SEVERAL if several else _LIKE)
        keys, sign = [], np.ones(n)
        for column in logs.T[:-1]:  # the next one up and down by turns
            shift = rng.random() if self._shuffle else 0.0
            band = np.floor(column / jitter + shift)
            keys.append(sign * band)
            sign = np.where(band % 2, -sign, sign)
        noise = rng.random(n) if self._shuffle else np.zeros(n)
        keys.append(sign * (logs[:, -1] + math.log(_LIKE) * noise))
        return np.lexsort([-key for key in reversed(keys)])

    def _take(self, table: _Table) -> None:
        """Cut what is left of the epoch into batches by a table."""
        self._table = table
        self._history.append((self.n_drawn, table))
        batches, n = self._cut(), self._world_size
        if self._drop_last:
            batches = batches[: len(batches) // n * n]
        while len(batches) % n:  # no rank may get more than another
            at = max(range(len(batches)), key=lambda i: len(batches[i]))
            half = len(batches[at]) // 2
            if half:
                batches[at : at + 1] = [batches[at][:half], batches[at][half:]]
            else:
                batches.append(batches[-1])
        if self._shuffle:
            rng = np.random.default_rng((self._seed, self.epoch, self.n_drawn))
            batches = [batches[i] for i in rng.permutation(len(batches))]
        if table == []:
            batches = [batches[i] for i in self._telling(batches)]
        steps = [batches[i : i + n] for i in range(0, len(batches), n)]
        self._steps = steps[::-1]

    def _telling(self, batches: Sequence[_Ints]) -> list[int]:
        """Return the order that teaches most: see Note: [The longest come second].

        Args:
            batches: In random order.
        """
        n, places = self._world_size, range(len(batches))
        longest = [i for i in places if self._is_longest[batches[i]].any()]
        others = [i for i in places if i not in longest]
        widest = sorted(others[n:], key=lambda i: -len(batches[i]))[:n]
        rest = [i for i in others[n:] if i not in widest]
        return [*others[:n], *longest, *widest, *rest]

    def _cut(self) -> list[_Ints]:
        """Return batches of samples that follow each other in the order."""
        places = np.flatnonzero(self._is_left)
        lengths = self._lengths[self._order[places]]
        rows = self._rows(lengths)
        turns = itertools.cycle(_FIRST_ROWS if self._table == [] else (len(places),))
        batches, at = [], 0
        while at < len(places):
            most = min(int(rows[at]), next(turns))
            end = min(at + most, len(places))
            if lengths.shape[1] > 1:
                most = min(most, int(self._rows(lengths[at:end].max(0)[None])[0]))
            else:
                most = min(most, int(rows[at:end].min()))
            end = min(end, at + most)
            is_full = end - at == most
            if is_full or not self._drop_last:
                batches.append(places[at:end])
            at = end
        return batches

    def _draw(self) -> list[_Ints]:
        """Return the next batch of each rank."""
        step = self._steps.pop()
        for batch in step:
            self._is_left[batch] = False
        self.n_drawn += 1
        return step

    def _rows(self, lengths: _Ints) -> NDArray[np.float64]:
        """Return how many rows batches of such lengths have.

        Args:
            lengths: (M, K), the longest of each batch.
        """
        tokens = lengths.sum(axis=1)
        if self._table is None:
            is_bounded = self._max_rows is not None or self._max_tokens is not None
            rows = np.full(len(lengths), math.inf if is_bounded else _FEW)
        else:
            rows = self._first_rows(tokens)
            if any(self._table):
                known = np.array(self._table, dtype=float)
                there = self._at_anchors.sum(axis=1)
                least = (known * there)[known > 0.0].min()  # tokens where some are
                first = (least / there).clip(1.0, max(_FEW, known.max()))
                known = np.where(known, known, first)
                rows = _between(self._anchors, known, lengths)
        if self._max_tokens is not None:
            rows = np.minimum(rows, self._max_tokens / tokens)
        whole: NDArray[np.float64] = np.floor(
            rows.clip(1.0, self._max_rows or math.inf)
        )
        return whole

    def _first_rows(self, tokens: _Ints) -> NDArray[np.float64]:
        """Return rows of batches that hold no more than the longest sample, or two."""
        least = np.where(tokens <= self._half_tokens, 2, 1)
        rows: NDArray[np.float64] = (self._most_tokens / tokens).clip(least, _FEW)
        return rows

    # ------------------------------------------------------------------ tables

    def _renew(self) -> None:
        """Begin a round: ask for a table, and take it if it is another one."""
        before, table = self._table, self._agreed(self._forecast_or_none())
        is_same = bool(self._history) and table == before
        self.is_settled = is_same and any(table or ())
        if not is_same:
            self._take(table)
            has_grown = np.sum(table or 0) > 1.25 * np.sum(before or 0)
            if has_grown and before and torch.accelerator.is_available():
                torch.accelerator.empty_cache()  # blocks of smaller batches are gaps

    def _forecast_or_none(self) -> _Table:
        if self.session is None:
            return [] if self._is_expecting else None
        return self._forecast(self.session)

    def _agreed(self, own: _Table) -> _Table:
        """Return the fewest rows of all ranks."""
        if self._world_size == 1 or self.session is None:
            return own
        if not (distributed.is_available() and distributed.is_initialized()):
            msg = (
                f"the {self._world_size} ranks of mimose.BatchSampler cannot tell each "
                f"other how many rows fit: call torch.distributed.init_process_group "
                f"before the first batch is drawn"
            )
            raise MimoseError(msg)
        tables: list[_Table] = [None] * self._world_size
        distributed.all_gather_object(tables, own)
        if not all(tables):
            return []
        return [
            min(rows) for rows in zip(*(table or [] for table in tables), strict=True)
        ]

    def _forecast(self, session: Session) -> list[int]:
        """Return the best rows at each anchor by what the session knows now."""
        known = self._table or []
        try:
            shape = session.forecast().shape
            why = f"of the sizes {', '.join(shape)}, rows or lengths have not varied"
        except MimoseError as error:  # nothing is known yet, or any more: detached
            shape, known, why = {}, [], str(error)
        rows = [name for name in shape if name.endswith(".0")]
        names = self._names or self._only_name(shape)
        if not rows or (not names and np.ptp(self._lengths)):
            if self.n_drawn >= _STILL_SMALL and not known and not self._warned:
                self._warned = True
                _log.warning(
                    "mimose.BatchSampler draws small batches still, after %d: %s",
                    *(self.n_drawn, why),
                )
            return known
        before = known or [0] * len(self._at_anchors)
        return [
            self._best_rows(session, rows, dict(zip(names, lengths, strict=False)), old)
            for lengths, old in zip(self._at_anchors.tolist(), before, strict=True)
        ]

    def _only_name(self, shape: Mapping[str, int]) -> list[str]:
        """Return the name of the lengths, if they vary in the shapes seen."""
        names = [name for name in shape if not name.endswith(".0")]
        if len(names) > 1:
            msg = (
                f"mimose.BatchSampler: lengths are integers, but {', '.join(names)} "
                f"vary in the model's inputs; give {{name: lengths}} of these"
            )
            raise MimoseError(msg)
        return names

    def _best_rows(
        self, session: Session, rows: list[str], lengths: Mapping[str, int], old: int
    ) -> int:
        """Return the rows that train the most tokens a second; 0 for not known.

        Args:
            session: Forecasts.
            rows: The names of the batch's size.
            lengths: Of the batch, by name.
            old: The rows until now; 0 for none.
        """
        tokens = sum(lengths.values()) or 1
        most = min(self._max_rows or _GRID[-1], (self._max_tokens or math.inf) / tokens)

        def ask(n: int, budget: int | None = None, share: int = 1) -> Forecast:
            own = {name: max(1, size // share) for name, size in lengths.items()}
            return session.forecast({**dict.fromkeys(rows, n), **own}, budget)

        def score(at: int) -> float:
            """Return the logarithm of rows a second, less what they have to bring."""
            n = _GRID[at]
            found = ask(n)
            if not found.fits or found.plan is None or n > most:
                return _UNFIT - n
            if found.seconds is None:  # recomputing costs more than rows bring
                return math.log(n) * (1.0 if found.plan.extra_cost == 0.0 else -1.0)
            return math.log(n / found.seconds) - _DOUBLING * math.log2(n)

        start = int(np.searchsorted(_GRID, old)) if old else 0
        at = _climb(score, start, (4, 2, 1) if old else (8, 4, 2, 1))
        n = _GRID[at]
        if not ask(n).fits:
            return 0 if ask(n).fits is None else 1
        if n < most and ask(_GRID[at + 1]).fits is None:
            # All is recomputed where more rows were not measured: that grows by a line,
            # and half of a row takes no more than half.
            more, whole = max(1, n // 2), ask(n, 1).peak_bytes
            half = ask(n // 2, 1).peak_bytes if n > 1 else ask(1, 1, 2).peak_bytes
            if whole is not None and half is not None:
                a_row = (whole - half) / (n - n // 2 if n > 1 else 0.5)
                if whole + more * a_row < _SAFE * session.budget:
                    return min(n + more, int(most))
        is_near = abs(n - old) < _NEAR * old and score(start) > _UNFIT
        return old if is_near else n


def _climb(score: Callable[[int], float], start: int, steps: Sequence[int]) -> int:
    """Return where a score that has one hill is highest, near the start if it is flat.

    Args:
        score: Of a place on the grid.
        start: The first place.
        steps: How far to go at once, as long as that is higher; then the next.
    """
    scores: dict[int, float] = {}

    def of(at: int) -> float:
        if not 0 <= at < len(_GRID):
            return -math.inf
        if at not in scores:
            scores[at] = score(at)
        return scores[at]

    at = start
    for step in steps:
        to = max(at + step, at - step, key=of)
        while of(to) > of(at) + _SAME:
            at, to = to, 2 * to - at
    return at


def _checked(name: str, column: Sequence[int]) -> _Ints:
    """Return lengths as an array, or raise what is wrong with them."""
    found = np.asarray(column)
    if found.ndim != 1 or not found.size or not np.issubdtype(found.dtype, np.integer):
        msg = (
            f"{name} must be a list of integers, one a sample, got "
            f"{found.dtype} of shape {found.shape}"
        )
        raise ValueError(msg)
    if found.min() < 1:
        at = int(found.argmin())
        msg = f"{name}: sample {at} has length {found[at]}, less than 1"
        raise ValueError(msg)
    return found.astype(np.int64)


def _anchors(column: _Ints, is_one_of_several: bool) -> _Ints:
    """Return lengths from the shortest to the longest, at most a factor apart."""
    low, high = float(column.min()), float(column.max())
    factor = _APART_OF_SEVERAL if is_one_of_several else _APART
    n = 1 + math.ceil(math.log(high / low) / math.log(factor))
    return np.unique(np.geomspace(low, high, n).round().astype(np.int64))


def _between(
    anchors: Sequence[_Ints], rows: NDArray[np.float64], lengths: _Ints
) -> NDArray[np.float64]:
    """Return rows between anchors: what a row takes follows a line along each axis.

    Args:
        anchors: Along each axis.
        rows: (A,) at all of them, the last axis fastest.
        lengths: (M, K), within.
    """
    corners = [(np.zeros(len(lengths), dtype=np.int64), np.ones(len(lengths)))]
    for axis, column in zip(anchors, lengths.T, strict=True):
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
