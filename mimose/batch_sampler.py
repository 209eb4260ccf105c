"""Batches whose number of rows follows their lengths, to fill the memory budget.

Note: [Rows by a table]
The sampler asks `Session.forecast` at a few lengths, the anchors, how many rows train
the most tokens a second. Between two anchors it interpolates the inverse of the rows,
one row's share of a batch, by a line. The true share is a convex function of the
length, so the line gives too few rows rather than too many. The sampler makes a new
table in each round. If the table has changed, it cuts the remaining samples into new
batches. The tables, and the number of batches drawn with each, reproduce an epoch.

Note: [The longest come second]
A session cannot predict sizes far beyond the measured ones, nor other numbers of rows
before they have varied. So the sampler draws the longest samples early, between two
batches of the most rows. They come second because the first step of a session is not
measured.

Note: [Twice what was trained]
The sampler tells `session.collation` what it draws, and that learns which sizes of the
model's inputs follow. Whatever it has learned, a batch of several samples has at most
twice the samples, and twice the tokens, of the largest batch that was trained. While
that limits the rows, a round has one batch, one of the largest.

Note: [A ladder of rows]
With `pad_to_multiple_of` the sampler takes lengths as the collator rounds them up, and
numbers of rows from a ladder. So a padded length has one number of rows, which rarely
changes with the table. The ladder has twice each of its numbers: where twice what was
trained limits a batch, it costs nothing.

Note: [Steps of like seconds]
In a step all ranks wait for the slowest. So the batches of one step are those next to
each other by predicted seconds: the seconds a token at the anchors, interpolated, times
the tokens. Steps come in random order, and so do the ranks in a step. Ranks that
predict other seconds get other batches: the fastest begins with the longest, and each
other one gets the longest that takes it no longer.

Note: [Rounds of several ranks]
At the begin of a round the ranks exchange their tables: the fewest rows count. A
loader with workers draws ahead. Then a rank without workers cannot begin the round
before the others have trained what they drew. So the exchange begins with the round,
and its result counts as many batches later as one rank draws further ahead than
another. An iteration that was stopped may leave exchanges that other ranks never
began: they are recognized by the number of the iteration, and repeated.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed
from torch.utils.data import Sampler

from mimose.arguments import check_integer, check_switches
from mimose.distributed import Exchange, n_ranks
from mimose.exceptions import MimoseError, StateMismatchError
from mimose.torch_private import draws_ahead

if TYPE_CHECKING:
    from mimose.forecast import Forecast
    from mimose.session import Session

_log = logging.getLogger(__name__)

_FEW = 8
"""Rows of a batch without a limit and a session; the most rows of the first batches."""
_FIRST_ROWS = (1, 2, 4, 8)
"""Rows of the first batches, in turn: costs per row are fitted only if rows vary."""
_ROUND, _LONG_ROUND = 4, 64
"""The fewest and the most batches in a round."""
_OF_DRAWN = 4
"""A round has this fraction of all batches drawn so far: forecasts change less and
less, and each table takes time of the host."""
_DOUBLING, _DOUBLING_OF_SEVERAL, _DOUBLING_UNPADDED = 0.03, 0.05, 0.005
"""By this share a batch twice as large must raise the tokens a second. Padding of
several lengths costs the second: 5% of T5-large's tokens at 6,400 tokens a batch, 8% at
13,000 and 11% at 17,000, but 0.4% to 0.7% of BERT-large's."""
_SAME = 0.002
"""By this share another number of rows must raise the tokens a second."""
_WORTH = 0.01
"""By this share another number of rows must be better, or the sampler keeps the old
one: what is left of an epoch pads more each time that it is cut into batches anew."""
_UNFIT = -1e9
_SAFE = 0.75
"""Share of the budget that a batch may be predicted to take if it is half as large
again as the largest known one."""
_LIKE, _LIKE_OF_SEVERAL = 1.015, 1.08
"""Lengths that differ by less than this factor are shuffled. With several lengths the
first ones are compared with the second factor, the last one with the first."""
_APART, _APART_OF_SEVERAL = 2.0, 4.0
"""The largest factor between two anchors."""
_STILL_SMALL = 64
"""If batches are still small after this many, a warning gives the reason."""
_GRID = sorted({round(1.03**k) for k in range(400)})
"""Numbers of rows that the sampler considers."""
_LADDER = np.array([*range(1, 6), *(m << k for k in range(20) for m in range(6, 12))])
"""Numbers of rows with `pad_to_multiple_of`, six a doubling. With multiples of 8,
BERT-large in 16 GiB had 79 and 73 shapes in 300 batches (seeds 1 and 2), and 97.3% and
96.9% of the tokens a second without; with four a doubling 79 and 80 shapes, 96.9% and
97.0%, with eight 75 and 84, 97.1% and 98.1% (`python -m benchmarks.fill`)."""

_Ints: TypeAlias = NDArray[np.int64]
_NEARLY = 0.9
"""Rows are limited by twice what was trained from this share of it on."""
_NO_LIMIT = 2**53
_SPEEDS_A_DOUBLING = 8
"""Speeds of ranks are rounded to such steps of 9%, so that what two sessions of equal
devices learned differently makes no difference."""


class _Table(NamedTuple):
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


_FIXED = None
"""In place of a table: all batches have the rows that the arguments say."""


class _Step(NamedTuple):
    """One batch for each rank, as positions in the order."""

    batches: Sequence[_Ints]
    seconds: Sequence[float]
    """Predicted seconds of each rank; empty if they are not known."""


class BatchSampler(Sampler[list[int]]):
    """Draws batches of similar lengths with as many rows as the budget allows.

    ::

        sampler = mimose.BatchSampler(lengths, session)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)

    Each sample comes once an epoch. For each length the sampler chooses the number of
    rows that trains the most tokens a second, under the plan that `session` would make
    and with the time of the optimizer step. It takes a batch twice as large only if
    that raises the tokens a second by 3%, with several lengths, which pad more, by 5%,
    or where nothing is padded by 0.5%. (A step has a fixed time that more rows share:
    the line of PAPAYA.)

    The first batches are small, because the session has measured nothing yet: up to 8
    rows, and at most as many tokens as the longest sample. They grow as the session
    learns, and at most to twice the samples and the tokens of the largest batch that
    was trained. If the session has loaded a state, batches are full from the start.

    It does not matter how your loader makes a batch of samples: padded, one after the
    other (graphs, texts without padding), or with time first. The session finds out
    how the sizes of the model's inputs follow from the samples.

    The number of rows varies, so gradients are means over different numbers of rows,
    and a learning rate tuned for fixed rows may not fit. `max_rows` and `max_tokens`
    limit a batch. To fix the batch of an optimizer step, accumulate gradients up to a
    number of tokens.

    The sampler draws batches in rounds. In each round the ranks exchange their
    forecasts and use the smallest number of rows. All ranks get the same number of
    batches: some batches are halved for that, or, if all have one row, the shortest are
    drawn twice. If you lower the budget, one rank begins a round at once. But batches
    that a loader's workers drew ahead keep their rows, and several ranks end the round:
    `Session.micro_batches` splits a batch that does not fit any more.

    In a step all ranks wait for the slowest. So their batches of one step have like
    predicted seconds: Note: [Steps of like seconds]. The samples of a step have like
    lengths on all ranks then.

    Attributes:
        n_drawn: Batches that this rank has drawn in the current epoch.
        epoch: The number of the current epoch, or of the last one; the first is 0.
        is_settled: Whether the last round changed no number of rows.
        is_expecting: Whether to draw small batches until there is a session. The
            trainers' callbacks set it.

    Args:
        lengths: (n_samples,) The length of each sample in tokens, integers of at least
            1. If several lengths matter, a mapping from the name of a size (as in
            `Session.forecast`) to the lengths that it follows from, as their largest or
            their sum: ``{"input_ids.1": …, "labels.1": …}``, or
            ``{"x.0": nodes, "edge_index.1": edges}``. The tokens of a sample are the
            sum of its lengths.
        session: Makes the forecasts. Without a session each batch has `max_rows` rows,
            or as many as `max_tokens` allows, or 8.
        shuffle: Whether each epoch has a new random order of batches, and of samples
            with nearly equal lengths. If False, the longest samples come first.
        seed: Seed of the random order; the same on all ranks.
        max_rows: The most rows of a batch.
        max_tokens: The most tokens of a batch, with padding. A longer sample is a batch
            by itself.
        drop_last: Whether all batches are full, and as many on each rank. The samples
            that are left out for that are drawn anew in each epoch.
        pad_to_multiple_of: To what your collator rounds padded lengths up. Then batches
            have few different shapes: Note: [A ladder of rows]. None if it does not, or
            nothing is padded.
        balance: Whether the batches that the ranks train in one step have like
            predicted seconds. If False, they are drawn at random.
        rank: This process's rank; None to ask `torch.distributed`.
        world_size: The number of ranks; None to ask `torch.distributed`.

    Raises:
        ValueError: A length is not an integer of at least 1; the columns of `lengths`
            differ in size; another argument is not an integer, a switch or a session;
            or `rank` is not below `world_size`.
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
        pad_to_multiple_of: int | None = None,
        balance: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        by_name = lengths if isinstance(lengths, Mapping) else {"lengths": lengths}
        self._names = list(lengths) if isinstance(lengths, Mapping) else []
        columns = [_checked(name, column) for name, column in by_name.items()]
        self._max_rows, self._max_tokens, self._multiple = (
            number if number is None else check_integer(name, number)
            for name, number in (
                ("max_rows", max_rows),
                ("max_tokens", max_tokens),
                ("pad_to_multiple_of", pad_to_multiple_of),
            )
        )
        multiple = self._multiple or 1
        found = np.stack(columns, axis=1)
        self._elements: _Ints = found.sum(axis=1)
        """(n_samples,) Of each sample, without padding."""
        self._lengths: _Ints = -(-found // multiple) * multiple
        """(n_samples, n_names) As the collator rounds them up."""
        check_switches(shuffle=shuffle, drop_last=drop_last, balance=balance)
        if session is not None and not hasattr(session, "forecast"):
            msg = f"session must be what mimose.attach returned, got {session!r}"
            raise ValueError(msg)
        if rank is None:
            rank = distributed.get_rank() if n_ranks() > 1 else 0
        size = n_ranks() if world_size is None else world_size
        world_size = check_integer("world_size", size)
        if check_integer("rank", rank, 0) >= world_size:
            msg = f"rank must be at least 0 and below {world_size} ranks, got {rank}"
            raise ValueError(msg)
        if len(self._lengths) < world_size:
            msg = f"{len(self._lengths)} samples are too few for {world_size} ranks"
            raise ValueError(msg)
        self._session = session
        self._unreported: list[tuple[int, ...]] = []
        """What was drawn in this iteration while there was no session."""
        self._seed = check_integer("seed", seed, 0)
        self._shuffle, self._drop_last = bool(shuffle), bool(drop_last)
        self._balance = bool(balance)
        self._rank, self._world_size = rank, world_size
        self._anchors = [_anchors(own, len(columns) > 1) for own in self._lengths.T]
        self._at_anchors = np.array(list(itertools.product(*self._anchors)))
        """(n_anchors, n_names) Every combination of the anchors."""
        tokens = self._lengths.sum(axis=1)
        self._most_tokens, self._half_tokens = tokens.max(), np.median(tokens)
        self.epoch = 0
        self._table: _Table | None = _FIXED
        self.is_settled = self.is_expecting = False
        self._warned = False
        self._first_seconds = 0.0
        """What new shapes add to a step in the mean: more rows share it."""
        self._n_asked = 0
        """Batches drawn in all epochs."""
        self._n_iterations = self._lag = 0
        self._exchanges: deque[tuple[int, Exchange]] = deque()
        """Exchanges of tables, and at which batch each counts."""
        self._reset()

    @property
    def session(self) -> Session | None:
        """The session that makes the forecasts.

        You can set it later; it is used from the next round on.
        """
        return self._session

    @session.setter
    def session(self, session: Session | None) -> None:
        """Tell it what was drawn before."""
        self._session = session
        self._report()

    # ------------------------------------------------------------------ an epoch

    def _reset(self) -> None:
        """Go to the start of the epoch."""
        self.n_drawn = 0
        self._loaded: Mapping[str, Any] | None = None
        """The state that was loaded in this epoch."""
        self._is_begun = self._is_over = self._is_frozen = self._grows = False
        self._is_exhausted, self._n_before = False, 0
        self._history: list[tuple[int, _Table | None]] = []
        """Each table, and the number of batches drawn before it."""
        self._order = self._sorted()
        self._is_longest = np.isin(self._order, self._lengths.argmax(axis=0))
        """(n_samples,) Which positions of the order hold a longest sample."""
        self._is_left = np.ones(len(self._order), dtype=bool)
        self._steps: list[_Step] = []
        """The remaining ones. The next one is the last item."""
        self._shares: list[tuple[float, float]] = []
        """Of each step: this rank's share of its samples, and of their elements."""

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the sample indices of each batch of an epoch.

        If the epoch is complete, the next one begins. If it was stopped in the middle,
        it starts again: from its beginning, or from where a state was loaded.

        Raises:
            MimoseError: What iterates skips batches by their number, which loses
                samples; or a size of the model's inputs has no bound.
        """
        _raise_if_skipping()
        for _, exchange in self._exchanges:  # of an iteration that was stopped
            exchange.wait()
        self._exchanges.clear()
        self._n_iterations += 1
        self._n_ahead, self._lag = _drawn_ahead(), 0
        is_look = self._loaded and self._is_begun and not self._was_trained()
        if self._is_over and not is_look:
            self.epoch += 1
            self._reset()
        elif self._is_begun:
            self._restart(self._loaded)
        self._is_begun = True
        self._unreported.clear()
        if self._session is not None:
            self._session.collation.begin()
            self._n_before = self._session.collation.n_steps
        left, budget = 0, 0
        while self._steps or not self._history:
            alone = self.session if self._world_size == 1 else None
            now = 0 if alone is None else alone.budget
            is_due = (not left or now < budget) and not self._is_frozen
            if is_due:
                self._begin_round()
            while self._exchanges and self._exchanges[0][0] <= self._n_asked:
                self._use(self._agreed(self._exchanges.popleft()[1]))
            if is_due:
                left = min(max(_ROUND, self._n_asked // _OF_DRAWN), _LONG_ROUND)
            left = 1 if self._grows else left
            budget = now
            left -= 1
            self._n_asked += 1
            if self._steps:  # with drop_last there may be no full batch left
                step = self._draw()
                batch = self._order[step.batches[self._rank]]
                if self._session is not None and step.seconds:
                    self._session.collation.predicted(step.seconds)
                self._is_over = not self._steps
                own = self._lengths[batch]
                drawn = len(batch), *own.sum(axis=0).tolist(), *own.max(axis=0).tolist()
                self._unreported.append(drawn)
                self._report()
                yield batch.tolist()
        self._is_over = self._is_exhausted = True

    def _was_trained(self) -> bool:
        """Whether the last iteration was more than a look, which may draw all."""
        if self._session is None:
            return self._is_exhausted
        return self._session.collation.n_steps > self._n_before

    def _report(self) -> None:
        """Tell the session what was drawn."""
        if self._session is not None:
            for drawn in self._unreported:
                self._session.collation.drew(drawn)
            self._unreported.clear()

    def __len__(self) -> int:
        """Return the number of batches of the current epoch.

        The numbers of rows then stay fixed until the end of the epoch.

        Raises:
            TypeError: The number is not known: between two epochs, while the session
                still learns, and where several ranks agree on the rows (a rank that
                asked alone would wait for the others). An estimate would be wrong,
                because trainers skip the batches after it.
        """
        is_alone = self._world_size == 1 and self.session is not None
        if is_alone and not self._history:
            self._begin_round()
            self._begin_round()
        if not is_alone or self._is_over or not self.is_settled:
            msg = (
                "the length of mimose.BatchSampler is not known: the rows of its "
                "batches still change, or several ranks agree on them. Give your "
                "trainer max_steps"
            )
            raise TypeError(msg)
        self._is_frozen = True
        return self.n_drawn + len(self._steps)

    def weight(self, number: int, of: str = "samples") -> float:
        """Return the factor for the loss of a batch, a mean, on several ranks.

        With it the mean over the ranks of a step, as `DistributedDataParallel` takes
        it, is the mean over all samples of the step. One rank has factors of 1.

        Args:
            number: Which batch of this epoch, 0 for the first.
            of: What the loss is a mean over: ``"samples"``, or ``"elements"`` for the
                sum of the lengths, without padding.

        Raises:
            IndexError: This rank has not drawn that batch in this epoch.
            ValueError: `of` is something else.
        """
        if of not in (kinds := ("samples", "elements")):
            msg = f"of must be one of {kinds}, got {of!r}"
            raise ValueError(msg)
        if not 0 <= number < self.n_drawn:
            msg = f"number must be from 0 to below {self.n_drawn}, got {number}"
            raise IndexError(msg)
        return self._world_size * self._shares[number][kinds.index(of)]

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch. In that epoch already, change nothing.

        Args:
            epoch: Its number; the first is 0.

        Raises:
            MimoseError: A state of a later epoch was just loaded.
        """
        if self._loaded is not None and epoch < self.epoch:
            msg = (
                f"set_epoch({epoch}) would undo the state of epoch {self.epoch} that "
                f"was loaded into mimose.BatchSampler: start your loop at "
                f"sampler.epoch. A loader that accelerate prepared does so after "
                f"loader.set_epoch(sampler.epoch)"
            )
            raise MimoseError(msg)
        if epoch != self.epoch:
            self.epoch = epoch
            self._reset()

    @property
    def batch_size(self) -> int:
        """There is no batch size: the number of rows varies.

        Raises:
            MimoseError: There are several ranks. The sampler already gives each rank
                its own batches, and a caller that needs this number would split them
                again.
            AttributeError: There is one rank.
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
        """Return the position in the epoch as plain JSON data, the same on all ranks.

        Args:
            n_trained: How many batches of this epoch this rank has trained. A loader
                with workers draws ahead; batches that were drawn but not trained are
                drawn again after loading. None if all drawn batches were trained.

        Raises:
            ValueError: `n_trained` is negative, or larger than `n_drawn`.
        """
        n_trained = self.n_drawn if n_trained is None else n_trained
        if not 0 <= n_trained <= self.n_drawn:
            msg = (
                f"n_trained must be from 0 to {self.n_drawn}, the batches drawn in "
                f"this epoch, got {n_trained}"
            )
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
        """Continue an epoch where another sampler with the same arguments stopped.

        Args:
            state: What `state_dict` returned, also after a way through JSON.

        Raises:
            StateMismatchError: The state belongs to other samples, another number of
                ranks, or other arguments that decide the order. The sampler is
                unchanged.
        """
        own = self._description()
        its = state.get("of") if isinstance(state, Mapping) else None
        if isinstance(its, Mapping):  # an older one has no multiple
            its = {"pad_to_multiple_of": None, **its}
        if its != own:
            msg = (
                f"the state belongs to another sampler, with {its}; this one has "
                f"{own}. Make the sampler with the same samples, arguments and number "
                f"of ranks (a version 1, or none, is an older mimose's, which drew in "
                f"another order), or start the epoch again without the state"
            )
            raise StateMismatchError(msg)
        self._restart(state)

    def _restart(self, state: Mapping[str, Any] | None) -> None:
        """Go to where a state was saved, or to the start of the epoch."""
        if state is None:
            self._reset()
            return
        self.epoch = state["epoch"]
        self._reset()
        ends = [*(n for n, _ in state["history"]), state["n_trained"]][1:]
        for (_, table), end in zip(state["history"], ends, strict=False):
            self._take(_loaded(table))
            while self.n_drawn < end:
                self._draw()
        self._is_over = bool(self._history) and not self._steps
        if not self._history:
            self._table = _loaded(state["table"])
        self._loaded = state

    def _description(self) -> dict[str, Any]:
        return {
            "version": 3,
            "samples": len(self._lengths),
            "tokens": int(self._lengths.sum()),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "drop_last": self._drop_last,
            "balance": self._balance,
            "max_rows": self._max_rows,
            "max_tokens": self._max_tokens,
            "pad_to_multiple_of": self._multiple,
            "world_size": self._world_size,
        }

    # ------------------------------------------------------------------ batches

    def _sorted(self) -> _Ints:
        """Return the samples sorted by length, similar ones shuffled, longest first."""
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

    def _take(self, table: _Table | None) -> None:
        """Cut the remaining samples into batches by a table."""
        self._table = table
        self._history.append((self.n_drawn, table))
        n = self._world_size
        left = np.flatnonzero(self._is_left)
        batches = self._full(left) if self._drop_last else self._cut(left)[0]
        while len(batches) % n:  # all ranks get the same number
            at = max(range(len(batches)), key=lambda i: len(batches[i]))
            half = len(batches[at]) // 2
            if half:
                batches[at : at + 1] = [batches[at][:half], batches[at][half:]]
            else:
                batches.append(batches[-1])
        rng = np.random.default_rng((self._seed, self.epoch, self.n_drawn))
        if self._shuffle:
            batches = [batches[i] for i in rng.permutation(len(batches))]
        if table is not None and not table.rows:
            batches = [batches[i] for i in self._first_order(batches)]
        limited = self._limited(batches)[:n]
        self._grows = bool(limited)
        batches = [batches[i] for i in dict.fromkeys([*limited, *range(len(batches))])]
        seconds = self._seconds(batches) if n > 1 else np.zeros(0)
        steps = np.arange(len(batches)).reshape(-1, n)
        if len(seconds) and self._shuffle and self._balance:
            first = int(self._grows)
            steps[first:] = rng.permutation(self._alike(seconds, first * n, rng))
        delays = np.array((table and table.delays) or [1.0] * n)
        self._steps = [
            _Step(
                [batches[i] for i in step],
                (seconds[step] * delays).tolist() if len(seconds) else (),
            )
            for step in steps[::-1]
        ]

    def _seconds(self, batches: Sequence[_Ints]) -> NDArray[np.float64]:
        """Return (n_batches,) the predicted seconds of the fastest rank.

        None at all if nothing is known: Note: [Steps of like seconds].
        """
        if self._table is None or not any(self._table.paces):
            return np.zeros(0)
        paces = np.array(self._table.paces)
        paces[paces == 0.0] = paces[paces > 0.0].mean()
        found = [self._lengths[self._order[batch]] for batch in batches]
        if self._table.is_padded:
            longest = np.array([own.max(axis=0) for own in found])
            elements = longest.sum(axis=1) * [len(own) for own in found]
        else:
            longest = np.array([own.mean(axis=0) for own in found])
            elements = np.array([own.sum() for own in found])
        seconds: NDArray[np.float64] = elements / _between(
            self._anchors, 1.0 / paces, longest
        )
        return seconds

    def _alike(
        self, seconds: NDArray[np.float64], first: int, rng: np.random.Generator
    ) -> _Ints:
        """Return (n_steps, n_ranks) batches of like seconds: see the note.

        Args:
            seconds: (n_batches,) Of the fastest rank.
            first: The first batch that has no step yet.
            rng: Draws the ranks of equal speed.
        """
        n = self._world_size
        left = (first + np.argsort(seconds[first:], kind="stable")).tolist()
        delays = np.array((self._table and self._table.delays) or [1.0] * n)
        if (delays == 1.0).all():
            return rng.permuted(np.array(left).reshape(-1, n)[::-1], axis=1)
        steps = np.empty((len(left) // n, n), dtype=np.int64)
        for step in steps:
            ranks = sorted(rng.permutation(n).tolist(), key=delays.__getitem__)
            longest = seconds[left[-1]] * delays[ranks[0]] * (1.0 + 1e-9)
            for rank in ranks:
                own = seconds[left] * delays[rank]
                at = max(0, int(np.searchsorted(own, longest, "right")) - 1)
                step[rank] = left.pop(at)
        return steps

    def _limited(self, batches: Sequence[_Ints]) -> list[int]:
        """Return the batches that what was trained limits, the largest first."""
        table = self._table or _Table()
        most_rows, most_tokens = table.samples, table.tokens
        if most_rows == _NO_LIMIT == most_tokens:
            return []
        size: dict[int, int] = {}
        for i, batch in enumerate(batches):
            tokens = self._lengths[self._order[batch]].sum(axis=1)
            n, total = len(batch), tokens.sum()
            shares = (n + 1) / most_rows, (total + tokens.max()) / most_tokens
            if n > 1 and max(shares) > _NEARLY:
                size[i] = int(total) * n
        return sorted(size, key=size.__getitem__, reverse=True)

    def _first_order(self, batches: Sequence[_Ints]) -> list[int]:
        """Return the order before anything is known: Note: [The longest come second].

        Args:
            batches: In random order.
        """
        n, places = self._world_size, range(len(batches))
        longest = [i for i in places if self._is_longest[batches[i]].any()]
        others = [i for i in places if i not in longest]
        wide = sorted(others, key=lambda i: -len(batches[i]))[: 2 * n]
        rest = [i for i in others if i not in wide]
        return [*wide[:n], *longest, *wide[n:], *rest]

    def _full(self, places: _Ints) -> list[_Ints]:
        """Return full batches, as many for each rank; what remains is left out.

        A cut of all samples gives the sizes of batches and how many samples remain. So
        many are drawn at random, whatever their lengths, and the others are cut into
        the same sizes: the n-th longest of them is hardly longer than that of all.

        Args:
            places: As for `_cut`.
        """
        rng = np.random.default_rng((self._seed, self.epoch, 1))
        drawn = rng.permutation(len(self._order))
        drawn = drawn[np.isin(drawn, places)]
        batches, lacks = self._cut(places)
        n_full = len(batches) - (lacks > 0)
        sizes: list[int] = []
        found = list(map(len, batches))[: n_full // self._world_size * self._world_size]
        while found != sizes:  # they become smaller where one does not fit
            sizes = found
            kept = np.sort(drawn[len(drawn) - sum(sizes) :])
            batches, _ = self._cut(kept, sizes)
            found = list(map(len, batches[: len(sizes)]))
        return batches[: len(sizes)]

    def _cut(
        self, places: _Ints, sizes: Sequence[int] | None = None
    ) -> tuple[list[_Ints], int]:
        """Return batches of consecutive samples, and how many the last one lacks.

        Args:
            places: (n_places,) Positions in the order, ascending.
            sizes: The most rows of each batch.
        """
        lengths = self._lengths[self._order[places]]
        rows = self._rows(lengths)
        table = self._table
        is_padded = table is None or table.is_padded
        filled = np.concatenate([[0.0], np.cumsum(1.0 / rows)])
        """How many batches the samples before fill, if each takes its share of one."""
        is_first = table is not None and not table.rows
        first = _FIRST_ROWS if is_first else (len(places),)
        turns = itertools.cycle(first) if sizes is None else iter(sizes)
        batches, at, lacks = [], 0, 0
        while at < len(places):
            turn = next(turns, len(places))
            most = min(int(rows[at]), turn)
            end = min(at + most, len(places))
            if not is_padded:
                full = filled[at] + 1.0 + 1e-9
                fits = int(np.searchsorted(filled, full, "right")) - 1 - at
                spare = int((full - filled[-1]) * rows[-1]) if full > filled[-1] else 0
                most = min(fits + spare, turn)
            elif lengths.shape[1] > 1:
                most = min(most, int(self._rows(lengths[at:end].max(0)[None])[0]))
            else:
                most = min(most, int(rows[at:end].min()))
            end = min(len(places), at + most)
            batches.append(places[at:end])
            lacks = at + most - end
            at = end
        return batches, lacks

    def _draw(self) -> _Step:
        """Return the next step."""
        step = self._steps.pop()
        rows, elements = np.zeros(self._world_size), np.zeros(self._world_size)
        for rank, batch in enumerate(step.batches):
            self._is_left[batch] = False
            rows[rank] = len(batch)
            elements[rank] = self._elements[self._order[batch]].sum()
        own = self._rank
        self._shares.append((rows[own] / rows.sum(), elements[own] / elements.sum()))
        self.n_drawn += 1
        return step

    def _rows(self, lengths: _Ints) -> NDArray[np.float64]:
        """Return (n_batches,) the rows of batches, before they are rounded down.

        Args:
            lengths: (n_batches, n_names) The longest sample of each batch.
        """
        tokens = lengths.sum(axis=1)
        limit = _NO_LIMIT
        if self._table is None:
            is_bounded = self._max_rows is not None or self._max_tokens is not None
            rows = np.full(len(lengths), math.inf if is_bounded else _FEW)
        else:
            # No more tokens than the longest sample has, or two rows.
            least = np.where(tokens <= self._half_tokens, 2, 1)
            rows = (self._most_tokens / tokens).clip(least, _FEW)
            limit = self._table.samples
            if any(self._table.rows):
                found = np.array(self._table.rows, dtype=float)
                there = self._at_anchors.sum(axis=1)
                fewest = (found * there)[found > 0.0].min()  # tokens of a known batch
                first = (fewest / there).clip(1.0, max(_FEW, found.max()))
                rows = _between(self._anchors, np.where(found, found, first), lengths)
            rows = np.minimum(rows, self._table.tokens / tokens)
        if self._max_tokens is not None:
            rows = np.minimum(rows, self._max_tokens / tokens)
        most = min(self._max_rows or math.inf, limit)
        limited: NDArray[np.float64] = rows.clip(1.0, most)
        if self._multiple is not None:
            rungs = _LADDER[np.searchsorted(_LADDER, limited, "right") - 1]
            limited = np.where(limited < most, rungs, limited)
        return limited

    # ------------------------------------------------------------------ tables

    def _begin_round(self) -> None:
        """Make a table, and use it: Note: [Rounds of several ranks]."""
        session = self.session
        if session is None and not self.is_expecting:
            self._use(_FIXED)
            return
        table, error = _Table(), None
        try:
            if session is not None:
                table = self._forecast(session)
        except Exception as failed:
            if self._world_size == 1:
                raise
            error = failed
        if self._world_size == 1:
            self._use(table)
            return
        unknown = [-1.0] * len(self._at_anchors)
        numbers = [
            *(self._n_iterations, self.epoch, self.n_drawn),
            *(self._n_asked, self._n_ahead),
            *(table.samples, table.tokens, table.is_padded),
            *(*(table.rows or unknown), *(table.paces or unknown)),
        ]
        exchange = Exchange(numbers, error)
        self._exchanges.append((self._n_asked + self._lag, exchange))

    def _agreed(self, exchange: Exchange) -> _Table:
        """Return the table of all ranks; all wait for the last one.

        Raises:
            MimoseError: They are not at the same batch of the same epoch.
            OtherRankError: Another rank failed.
        """
        found = exchange.wait()
        while (found[:, 0] < self._n_iterations).any():  # of one that was stopped
            exchange = exchange.again()
            found = exchange.wait()
        if (found[:, :3] != found[0, :3]).any():
            at = [f"{n:.0f} of epoch {e:.0f}" for _, e, n in found[:, :3]]
            msg = (
                f"the ranks of mimose.BatchSampler do not draw the same batches: by "
                f"rank they are at batch {', '.join(at)}. Begin and end each epoch on "
                f"all ranks, with the same set_epoch and the same loaded state"
            )
            raise MimoseError(msg)
        self._n_asked = int(found[:, 3].min())  # some drew further before it stopped
        self._lag = int(np.ptp(found[:, 4]))
        samples, tokens, is_padded = found[:, 5:8].min(axis=0)
        rows, paces = np.split(found[:, 8:], 2, axis=1)
        if (rows < 0).any():  # a rank knows nothing yet
            return _Table()
        unknown = (paces <= 0).any(axis=0)
        means = np.where(unknown, 0.0, paces.mean(axis=0))
        delays: NDArray[np.float64] = np.ones(len(paces))
        if not unknown.all():
            delays = (paces[:, ~unknown] / means[~unknown]).mean(axis=1)
        steps = np.round(_SPEEDS_A_DOUBLING * np.log2(delays / delays.min()))
        own = (2.0 ** (steps / _SPEEDS_A_DOUBLING)).tolist() if steps.any() else ()
        return _Table(
            tuple(rows.min(axis=0).astype(int).tolist()),
            *(int(samples), int(tokens), bool(is_padded)),
            tuple((means / (np.mean(own) if own else 1.0)).tolist()),
            tuple(own),
        )

    def _use(self, table: _Table | None) -> None:
        """Cut the remaining samples anew if a table differs from the last one."""
        before = self._table
        is_same = bool(self._history) and _is_same(table, before)
        self.is_settled = is_same and table is not None and any(table.rows)
        if not is_same:
            self._take(table)
            known, old = (sum(each.rows) if each else 0 for each in (table, before))
            if known > 1.25 * old > 0 and torch.accelerator.is_available():
                torch.accelerator.empty_cache()  # blocks of smaller batches are gaps

    def _forecast(self, session: Session) -> _Table:
        """Return a table with today's knowledge; the last one if nothing is known.

        Raises:
            MimoseError: A size of the model's inputs has no bound, or there is no size
                of a given name.
        """
        known, shape = self._table or _Table(), None
        why = "too few of its steps could be paired with batches that were drawn"
        session.collation.end_turn()
        try:
            session.forecast({})
        except MimoseError as error:  # nothing is measured yet, or it was detached
            known, why = _Table(), str(error)
        else:
            shape = session.collation.shape(_drawn(1, self._at_anchors[0]))
        if shape is None:
            if self.n_drawn >= _STILL_SMALL and not known.rows and not self._warned:
                self._warned = True
                _log.warning(
                    "mimose.BatchSampler still draws small batches after %d of them, "
                    "because the session cannot forecast: %s. See session.report()",
                    *(self.n_drawn, why),
                )
            return known
        session.forecast(dict.fromkeys(self._names, 1))
        times = session.summary().first_times
        self._first_seconds = times.seconds if times else 0.0
        before = known.rows or [0] * len(self._at_anchors)
        rows, paces = zip(
            *(
                self._best_rows(session, lengths, old)
                for lengths, old in zip(self._at_anchors, before, strict=True)
            ),
            strict=True,
        )
        tokens = self._at_anchors.sum(axis=1)
        samples, elements = (2 * most for most in session.collation.most)
        most = np.minimum(samples, elements / tokens)
        needs_rows = max(_FEW, *rows)
        needs_tokens = max(self._most_tokens, 2 * self._half_tokens, *(rows * tokens))
        is_padded = session.collation.pads(self._at_anchors.shape[1])
        is_near = (np.array(rows) > 1) & (np.array(rows) > _NEARLY * most - 1.0)
        binds = is_near.any() or samples < needs_rows or elements < needs_tokens
        limits = (samples, elements) if binds else (_NO_LIMIT, _NO_LIMIT)
        return _Table(rows, *limits, is_padded, paces)

    def _best_rows(
        self, session: Session, lengths: _Ints, old: int
    ) -> tuple[int, float]:
        """Return the rows that train the most tokens a second, and seconds a token.

        Each is 0 if not known.

        Args:
            session: Makes the forecasts.
            lengths: (n_names,) The lengths of the batch.
            old: The rows of the last table; 0 for none.
        """
        tokens = int(lengths.sum())
        collation = session.collation
        doubling = _DOUBLING_OF_SEVERAL if len(lengths) > 1 else _DOUBLING
        doubling = doubling if collation.pads(len(lengths)) else _DOUBLING_UNPADDED
        samples, elements = (2 * most for most in collation.most)
        most = min(self._max_rows or _GRID[-1], (self._max_tokens or math.inf) / tokens)
        most = max(1, min(most, samples, elements / tokens))

        def ask(n: int, budget: int | None = None, share: int = 1) -> Forecast:
            own = np.maximum(1, lengths // share)
            return session.forecast(collation.shape(_drawn(n, own)), budget)

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

        def paced(n: int, known: int) -> tuple[int, float]:
            seconds = ask(known).settled_seconds
            total = 0.0 if seconds is None else seconds + self._first_seconds
            return n, total / (known * tokens)

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
        return paced(best, best)


def _loaded(table: Any) -> _Table | None:
    """Return a table after its way through JSON."""
    if table is None:
        return None
    parts = (tuple(each) if isinstance(each, list) else each for each in table)
    return _Table._make(parts)


def _drawn(n: int, lengths: _Ints) -> tuple[int, ...]:
    """Return a batch of n samples of the same lengths, as `Collation.shape` takes it.

    Args:
        n: The samples.
        lengths: (n_names,) The lengths of each.
    """
    return n, *(n * lengths).tolist(), *lengths.tolist()


def _raise_if_skipping() -> None:
    """Make sure that what draws batches does not skip some by their number.

    Raises:
        MimoseError: It does, as `accelerate.skip_first_batches` and trainers that
            resume: the batches before depended on what the session knew then.
    """
    for caller in _callers():
        n_skipped = getattr(caller, "skip_batches", 0)
        if n_skipped:
            msg = (
                f"{n_skipped} batches of mimose.BatchSampler would be skipped, which "
                f"are not those of the last run: their rows followed what the session "
                f"knew. Save sampler.state_dict() with a checkpoint, and resume by "
                f"sampler.load_state_dict(state) instead of skipping (in the Trainer "
                f"of transformers with ignore_data_skip=True)"
            )
            raise MimoseError(msg)


def _drawn_ahead() -> int:
    """Return how many batches the loader that iterates draws ahead of the training."""
    return max(map(draws_ahead, _callers()), default=0)


def _callers() -> Iterator[Any]:
    """Yield the objects whose methods are in the call stack."""
    frame = inspect.currentframe()
    while frame is not None:
        if (caller := frame.f_locals.get("self")) is not None:
            yield caller
        frame = frame.f_back


def _is_same(table: _Table | None, before: _Table | None) -> bool:
    """Whether two tables cut the same batches, and know as many seconds."""
    if table is None or before is None:
        return table is before
    is_known, was_known = ([p > 0.0 for p in each.paces] for each in (table, before))
    same = table._replace(paces=()) == before._replace(paces=())
    return same and is_known == was_known


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


def _checked(name: str, column: Sequence[int]) -> _Ints:
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


def _anchors(column: _Ints, is_one_of_several: bool) -> _Ints:
    """Return lengths from the shortest to the longest, at most a factor apart.

    Args:
        column: (n_samples,) Lengths.
        is_one_of_several: Whether other lengths vary too: then anchors are coarser.
    """
    low, high = float(column.min()), float(column.max())
    factor = _APART_OF_SEVERAL if is_one_of_several else _APART
    n = 1 + math.ceil(math.log(high / low) / math.log(factor))
    return np.unique(np.geomspace(low, high, n).round().astype(np.int64))


def _between(
    anchors: Sequence[_Ints], rows: NDArray[np.float64], lengths: _Ints
) -> NDArray[np.float64]:
    """Return (n_batches,) rows, interpolated: Note: [Rows by a table].

    Args:
        anchors: For each name, its anchors.
        rows: (n_anchors,) at every combination, the last name fastest.
        lengths: (n_batches, n_names) Within the anchors.
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
