"""Batches whose number of rows follows their lengths, to fill the memory budget.

Each round has a table of rows by length: `mimose.rows`. The tables, and the number of
batches drawn with each, reproduce an epoch.

Note: [The longest come second]
A session cannot predict sizes far beyond the measured ones, nor other numbers of rows
before they have varied. So the sampler draws the longest samples early, between two
batches of the most rows. They come second because the first step of a session is not
measured.

Note: [Steps of like seconds]
In a step all ranks wait for the slowest. To balance them, the batches of one step are
those next to each other by predicted seconds: the seconds a token at the anchors,
interpolated, times the tokens. Steps come in random order, and so do the ranks in a
step. Ranks that predict other seconds get other batches: the fastest begins with the
longest, and each other one gets the longest that takes it no longer.

Note: [Rounds of several ranks]
At the begin of a round the ranks exchange their tables: the fewest rows count. A loader
with workers draws ahead of the training, and while one rank waits in an exchange, the
others must not wait for it in a step. So all ranks choose their batches as far ahead as
the loader that draws ahead the furthest, and begin each round between the same steps.
"""

from __future__ import annotations

import bisect
import inspect
import math
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch.utils.data import Sampler

from mimose.arguments import check_integer, check_switches
from mimose.distributed import exchange, own_rank
from mimose.exceptions import MimoseError, StateMismatchError
from mimose.rows import (
    LIKE,
    Draws,
    Floats,
    Ints,
    Rows,
    Table,
    checked,
    free_gaps,
    halved,
    round_length,
    sort_keys,
)
from mimose.torch_private import draws_ahead

if TYPE_CHECKING:
    from mimose.session import Session

_SPEEDS_A_DOUBLING = 8
"""Speeds of ranks are rounded to such steps of 9%, so that what two sessions of equal
devices learned differently makes no difference. Simulated with eight ranks, one of
them 5% or 10% slower, and readings that are off by 1%: ranks wait 0.8% with 8 steps,
8.6% with 4; with 32, or without rounding, 1.5%, and new speeds cut nine rounds of ten
anew."""
_ALIKE = 1.1
"""Ranks are compared where their rows differ by less than this factor: more rows share
a step's fixed time. With 10% more of them, a tenth of a step being fixed, a device
seems 0.9% faster, which `_SPEEDS_A_DOUBLING` rounds off; with twice as many, 5%."""


class _Step(NamedTuple):
    """One batch for each rank, as positions in the order."""

    batches: Sequence[Ints]
    seconds: Sequence[float]
    """Predicted seconds of each rank; empty if they are not known."""


class BatchSampler(Sampler[list[int]], Draws):
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

    In a step all ranks wait for the slowest. With ``balance=True`` they wait little: of
    8 ranks, with lengths of a spread of 1.2, 1% of a step instead of 46%. But the
    samples of a step have like lengths on all ranks then. A small model on 4 ranks
    needed 1.26 times the samples, and about the same time.

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
        min_rows: The least rows of a batch, as soon as the session forecasts that so
            many fit, also if fewer train more tokens a second; where fewer fit, as many
            as do. The first batches, those that end an epoch, and `max_rows` and
            `max_tokens` may have fewer.
        pad_to_multiple_of: To what your collator rounds padded lengths up. Then batches
            have few different shapes: Note: [A ladder of rows]. None if it does not, or
            nothing is padded.
        balance: Whether the batches that the ranks train in one step have like
            predicted seconds, and so like lengths: Note: [Steps of like seconds].
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
        min_rows: int = 1,
        pad_to_multiple_of: int | None = None,
        balance: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        Draws.__init__(self, session)
        by_name = lengths if isinstance(lengths, Mapping) else {"lengths": lengths}
        names = list(lengths) if isinstance(lengths, Mapping) else []
        self._rows = Rows(
            names,
            max_rows=max_rows,
            max_tokens=max_tokens,
            min_rows=min_rows,
            pad_to_multiple_of=pad_to_multiple_of,
        )
        columns = [checked(name, column) for name, column in by_name.items()]
        found = np.stack(columns, axis=1)
        self._elements: Ints = found.sum(axis=1)
        """(n_samples,) Of each sample, without padding."""
        self._lengths = self._rows.rounded(found)
        """(n_samples, n_names) As the collator rounds them up."""
        self._rows.cover(self._lengths)
        check_switches(shuffle=shuffle, drop_last=drop_last, balance=balance)
        rank, world_size = own_rank(rank, world_size)
        if len(self._lengths) < world_size:
            msg = f"{len(self._lengths)} samples are too few for {world_size} ranks"
            raise ValueError(msg)
        self._seed = check_integer("seed", seed, 0)
        self._shuffle, self._drop_last = bool(shuffle), bool(drop_last)
        self._balance = bool(balance)
        self._rank, self._world_size = rank, world_size
        self.epoch = 0
        self.is_settled = self.is_expecting = False
        self._n_asked = 0
        """Batches chosen in all epochs."""
        self._n_ahead = self._n_spare = 0
        """How many batches this rank's loader draws ahead; and how many more one of
        another rank."""
        self._reset()

    def _reset(self) -> None:
        """Go to the start of the epoch."""
        self.n_drawn = self._n_chosen = 0
        self._loaded: Mapping[str, Any] | None = None
        """The state that was loaded in this epoch."""
        self._is_begun = self._is_over = self._is_frozen = self._grows = False
        self._is_exhausted, self._n_before = False, 0
        self._history: list[tuple[int, Table | None]] = []
        """Each table, and the number of batches chosen before it."""
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
        self._n_ahead, self._n_spare = _drawn_ahead(), 0
        is_look = self._loaded and self._is_begun and not self._was_trained()
        if self._is_over and not is_look:
            self.epoch += 1
            self._reset()
        elif self._is_begun:
            self._restart(self._loaded)
        self._is_begun = True
        self._begin_reports()
        if self._session is not None:
            self._n_before = self._session.collation.n_steps
        left, budget = 0, 0
        chosen: deque[_Step] = deque()
        while True:
            while len(chosen) <= self._n_spare and (self._steps or not self._history):
                alone = self.session if self._world_size == 1 else None
                now = 0 if alone is None else alone.budget
                if (not left or now < budget) and not self._is_frozen:
                    self._begin_round()
                    left = 1 if self._grows else round_length(self._n_asked)
                budget = now
                left -= 1
                self._n_asked += 1
                if self._steps:  # with drop_last there may be no full batch left
                    chosen.append(self._choose())
                    self._is_over = not self._steps
            if not chosen:
                break
            step = chosen.popleft()
            batch = self._order[step.batches[self._rank]]
            self.n_drawn += 1
            if self._session is not None and step.seconds:
                self._session.collation.predicted(step.seconds)
            self._report(self._lengths[batch])
            yield batch.tolist()
        self._is_over = self._is_exhausted = True

    def _was_trained(self) -> bool:
        """Whether the last iteration was more than a look, which may draw all."""
        if self._session is None:
            return self._is_exhausted
        return self._session.collation.n_steps > self._n_before

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
        if self._is_over and n_trained == self._n_chosen:
            epoch, n_trained = epoch + 1, 0
        used = [
            [n, table and table.saved()] for n, table in self._history if n < n_trained
        ]
        return {
            "of": self._description(),
            "epoch": epoch,
            "n_trained": n_trained,
            "history": used,
            "table": self._rows.table and self._rows.table.saved(),
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
            its = {"pad_to_multiple_of": None, "min_rows": 1, **its}
        if its != own:
            msg = (
                f"the state belongs to another sampler, with {its}; this one has "
                f"{own}. Make the sampler with the same samples, arguments and number "
                f"of ranks (a lower version, or none, is an older mimose's, which drew "
                f"in another order), or start the epoch again without the state"
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
            self._take(Table.loaded(table))
            while self._n_chosen < end:
                self._choose()
        self.n_drawn = self._n_chosen
        self._is_over = bool(self._history) and not self._steps
        if not self._history:
            self._rows.table = Table.loaded(state["table"])
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
            "world_size": self._world_size,
            **self._rows.limits,
        }

    def _sorted(self) -> Ints:
        """Return the samples sorted by length, similar ones shuffled, longest first."""
        rng = np.random.default_rng((self._seed, self.epoch))
        logs, shuffles = np.log(self._lengths), self._shuffle
        shifts = [rng.random() if shuffles else 0.0 for _ in logs.T[:-1]]
        noise = rng.random(len(logs)) if shuffles else np.zeros(len(logs))
        keys = sort_keys(logs, shifts, math.log(LIKE) * noise)
        return np.lexsort([-key for key in reversed(keys)])

    def _take(self, table: Table | None) -> None:
        """Cut the remaining samples into batches by a table."""
        self._rows.table = table
        self._history.append((self._n_chosen, table))
        n = self._world_size
        left = np.flatnonzero(self._is_left)
        batches = self._full(left) if self._drop_last else self._cut(left)[0]
        halved(batches, n_equal := -(-len(batches) // n) * n)
        batches += batches[-1:] * (
            n_equal - len(batches)
        )  # all ranks get the same number
        rng = np.random.default_rng((self._seed, self.epoch, self._n_chosen))
        if self._shuffle:
            batches = [batches[i] for i in rng.permutation(len(batches))]
        if table is not None and not table.rows:
            batches = [batches[i] for i in self._first_order(batches)]
        lengths = [self._lengths[self._order[batch]] for batch in batches]
        limited = self._rows.limited(lengths)[:n]
        self._grows = bool(limited)
        order = [*dict.fromkeys([*limited, *range(len(batches))])]
        batches, lengths = ([each[i] for i in order] for each in (batches, lengths))
        seconds = self._rows.seconds(lengths) if n > 1 else np.zeros(0)
        steps = np.arange(len(batches)).reshape(-1, n)
        if len(seconds) and self._shuffle and self._balance:
            first = int(self._grows)
            steps[first:] = rng.permutation(self._alike(seconds, first * n, rng))
        delays = self._delays()
        self._steps = [
            _Step(
                [batches[i] for i in step],
                (seconds[step] * delays).tolist() if len(seconds) else (),
            )
            for step in steps[::-1]
        ]

    def _delays(self) -> Floats:
        """Return (n_ranks,) seconds of each rank over those of the fastest."""
        table = self._rows.table
        return np.array((table and table.delays) or [1.0] * self._world_size)

    def _alike(self, seconds: Floats, first: int, rng: np.random.Generator) -> Ints:
        """Return (n_steps, n_ranks) batches of like seconds: see the note.

        Args:
            seconds: (n_batches,) Of the fastest rank.
            first: The first batch that has no step yet.
            rng: Draws the ranks of equal speed.
        """
        n = self._world_size
        left = (first + np.argsort(seconds[first:], kind="stable")).tolist()
        delays = self._delays()
        if (delays == 1.0).all():
            return rng.permuted(np.array(left).reshape(-1, n)[::-1], axis=1)
        found = seconds[left].tolist()
        steps = np.empty((len(left) // n, n), dtype=np.int64)
        for step in steps:
            ranks = sorted(rng.permutation(n).tolist(), key=delays.__getitem__)
            longest = found[-1] * delays[ranks[0]] * (1.0 + 1e-9)
            for rank in ranks:
                at = max(0, bisect.bisect_right(found, longest / delays[rank]) - 1)
                step[rank] = left.pop(at)
                found.pop(at)
        return steps

    def _first_order(self, batches: Sequence[Ints]) -> list[int]:
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

    def _full(self, places: Ints) -> list[Ints]:
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
        self, places: Ints, sizes: Sequence[int] | None = None
    ) -> tuple[list[Ints], int]:
        """Return batches of consecutive samples, and how many the last one lacks.

        Args:
            places: (n_places,) Positions in the order, ascending.
            sizes: The most rows of each batch.
        """
        batches, lacks = self._rows.cut(self._lengths[self._order[places]], sizes)
        return [places[batch] for batch in batches], lacks

    def _choose(self) -> _Step:
        """Return the next step."""
        step = self._steps.pop()
        rows, elements = np.zeros(self._world_size), np.zeros(self._world_size)
        for rank, batch in enumerate(step.batches):
            self._is_left[batch] = False
            rows[rank] = len(batch)
            elements[rank] = self._elements[self._order[batch]].sum()
        own = self._rank
        self._shares.append((rows[own] / rows.sum(), elements[own] / elements.sum()))
        self._n_chosen += 1
        return step

    def _begin_round(self) -> None:
        """Make a table, and use it: Note: [Rounds of several ranks]."""
        session = self.session
        if session is None and not self.is_expecting:
            self._use(None)
            return
        table, error = Table(), None
        try:
            if session is not None:
                table = self._rows.forecast(session, self.n_drawn, "BatchSampler")
        except Exception as failed:
            if self._world_size == 1:
                raise
            error = failed
        if self._world_size == 1:
            self._use(table._replace(paces=()))  # one rank waits for none
            return
        unknown = [-1.0] * len(self._rows.at_anchors)
        same = zlib.crc32(repr(self._description()).encode()), self.epoch
        numbers = [
            *(*same, self._n_chosen, self._rank, self._n_asked, self._n_ahead),
            *(table.samples, table.tokens, table.is_padded),
            *(*(table.rows or unknown), *(table.paces or unknown)),
            *((table.fits or unknown) if self._rows.has_least else ()),
        ]
        found = exchange(numbers, error)
        self._use(self._agreed(found))

    def _agreed(self, found: Floats) -> Table:
        """Return the table of all ranks.

        Args:
            found: The numbers of each.

        Raises:
            MimoseError: They are not at the same batch of the same epoch, or draw from
                other samples.
        """
        if (found[:, :3] != found[0, :3]).any():
            at = [f"{n:.0f} of epoch {e:.0f}" for _, e, n in found[:, :3]]
            is_other = (found[:, 0] != found[0, 0]).any()
            others = ", of other samples or arguments" if is_other else ""
            msg = (
                f"the ranks of mimose.BatchSampler do not draw the same batches: by "
                f"rank they are at batch {', '.join(at)}{others}. Give it the same "
                f"samples and arguments on all ranks, and begin and end each epoch on "
                f"all of them, with the same set_epoch and the same loaded state"
            )
            raise MimoseError(msg)
        self._n_asked = int(found[:, 4].min())
        self._n_spare = int(found[:, 5].max()) - self._n_ahead
        samples, tokens, is_padded = found[:, 6:9].min(axis=0)
        # Of processes that share a rank's batches (tensor parallelism) one counts.
        _, first = np.unique(found[:, 3], return_index=True)
        if len(first) != self._world_size:
            msg = (
                f"the processes have {len(first)} different ranks of "
                f"mimose.BatchSampler with world_size={self._world_size}: give each "
                f"its rank, or neither, for those of torch.distributed"
            )
            raise MimoseError(msg)
        n_parts = 2 + self._rows.has_least
        rows, paces, *fits = np.split(found[:, 9:], n_parts, axis=1)
        fit = fits[0].min(axis=0).tolist() if fits and fits[0].min() >= 0 else []
        if (rows < 0).any():  # a rank knows nothing yet
            return Table()
        fewest, (rows, paces) = rows.min(axis=0), (rows[first], paces[first])
        known = paces > 0.0
        alike = known.all(axis=0) & (rows.max(axis=0) <= _ALIKE * rows.min(axis=0))
        delays: Floats = np.ones(len(paces))
        if alike.any():
            own_paces = paces[:, alike]
            delays = np.median(own_paces / own_paces.mean(axis=0), axis=1)
        before = _SPEEDS_A_DOUBLING * np.log2(self._delays())
        found = _SPEEDS_A_DOUBLING * np.log2(delays / delays.min())
        steps = np.where(np.abs(found - before) < 1.0, before, np.round(found))
        own = 2.0 ** (steps / _SPEEDS_A_DOUBLING)
        counts = known & (rows == np.where(known, rows, np.inf).min(axis=0))
        means = (paces / own[:, None] * counts).sum(axis=0) / counts.sum(axis=0).clip(1)
        return Table(
            tuple(fewest.astype(int).tolist()),
            *(int(samples), int(tokens), bool(is_padded)),
            tuple(means.tolist()),
            tuple(own.tolist()) if steps.any() else (),
            tuple(fit),
        )

    def _use(self, table: Table | None) -> None:
        """Cut the remaining samples anew if a table differs from the last one."""
        before = self._rows.table
        is_same = table.is_like(before) if table is not None else before is None
        is_same = is_same and bool(self._history)
        self.is_settled = is_same and table is not None and any(table.rows)
        if not is_same:
            self._take(table)
            free_gaps(before, table)


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
