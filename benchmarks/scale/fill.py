"""One trial of rows that follow lengths: see `benchmarks.proofs.fill`."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

import mimose
from benchmarks.scale.models import OF_OTHER_DIMENSIONS, WORKLOADS, Sizes, Workload
from benchmarks.scale.run import BUDGET, GIB, build
from mimose.bench.device import SIM, kind_of
from mimose.planners import everywhere
from mimose.sim.hollow import Clock, forget_attention_plans

_LLAMA = replace(
    WORKLOADS["llama-8b-lora"], spans=((1, 32768),), median=512.0, spread=1.3
)


class Place(NamedTuple):
    """What is trained on which card."""

    workload: Workload
    gib: int
    n_samples: int
    """Samples of an epoch."""
    actions: str
    """The session's."""
    bar: float
    """By how much c is to pass a: on the user's clock, or in epochs on the device's."""
    names: Sequence[str] = ("input_ids.1", "labels.1")
    """The sizes that the lengths are named after."""
    adds: bool = False
    """Whether samples stand one after the other, and a batch has no padding."""
    strategies: Sequence[str] = ("plain", "hf", "chunks")
    """What is searched for the largest fixed size."""


_OTHERS = OF_OTHER_DIMENSIONS
_PLAIN: Mapping[str, Any] = {"strategies": ("plain",)}
PLACES: Mapping[str, Place] = {
    "bert-large-16": Place(WORKLOADS["bert-large"], 16, 16000, "whole", 2.0),
    "bert-large-24": Place(WORKLOADS["bert-large"], 24, 16000, "whole", 2.0),
    "t5-large-24": Place(WORKLOADS["t5-large"], 24, 8000, "whole", 2.0),
    "llama-8b-lora-40": Place(_LLAMA, 40, 3000, "selective", 1.37),
    "llama-8b-lora-80": Place(_LLAMA, 80, 3000, "selective", 2.29),
    "picture-reader-80": Place(
        *(WORKLOADS["picture-reader"], 80, 4000, "whole", 1.0), ("labels.1",)
    ),
    "texts": Place(
        *(_OTHERS["texts"], 16, 8000, "whole", 0.98), ("x.1",), adds=True, **_PLAIN
    ),
    "graphs": Place(
        *(_OTHERS["graphs"], 5, 4000, "whole", 1.1),
        **{"names": ("x.0", "edge_index.1"), "adds": True, **_PLAIN},
    ),
    "time-first": Place(
        *(_OTHERS["time-first"], 16, 8000, "whole", 1.1), ("x.0",), **_PLAIN
    ),
}
_FEW = 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96
_GRID = (*_FEW, 112, 128, 160, 192)
"""Rows that are tried, and, times the longest sample, budgets of tokens."""
_WARM, _UNTIL_LEARNED = 12, 40
"""Steps that rates of fixed rows and budgets leave out; those of sessions."""
_LIKE = 1.08
"""Samples go together whose first lengths lie within such a factor."""

Group: TypeAlias = Sequence[Sizes]
_Batch = TypeVar("_Batch")


class Trials:
    """Trains epochs of one workload on one card, as often as asked.

    Args:
        task: ``place``, ``card``, ``device``, ``seed``, ``steps``, and, if they are not
            ``True``, 1 and 0, ``attention_plans``, ``pad_to_multiple_of``, to which
            padded lengths are rounded up, and ``buffer``, the samples that s holds, 0
            for its own choice.
        place: The place; None for that of `PLACES`.
    """

    def __init__(self, task: Mapping[str, Any], place: Place | None = None) -> None:
        self.place = place or PLACES[task["place"]]
        workload, self.actions = self.place.workload, self.place.actions
        self.seed, self.most_steps = task["seed"], task["steps"]
        self.multiple = task.get("pad_to_multiple_of", 1)
        self.buffer = task.get("buffer") or None
        self.samples = list(workload.sizes(self.place.n_samples, self.seed))
        self.run = build(workload, {**task, "gib": self.place.gib})
        self.run.train(tuple(low for low, _ in workload.spans), 1)
        self.longest = sum(workload.longest)
        self.session: mimose.Session | None = None
        is_hollow = kind_of(task["device"]) == SIM
        self.budget = None if is_hollow else int(BUDGET * self.place.gib * GIB)
        """A real card says that all of it is free, whatever limit it has."""
        self.settled: int | None = None

    @contextlib.contextmanager
    def strategy(self, name: str) -> Iterator[None]:
        """Train within the block plainly, by transformers' own, or in a session."""
        options: dict[str, Any] = {"actions": name}
        if name == "chunks":  # everything, where the budget asks for it the loss too
            options = {"actions": "whole", "planner": everywhere("recompute")}
        try:
            if name in ("plain", "hf"):
                with self.run.checkpointed(name == "hf"):
                    yield
            else:
                with self.run.attached(self.budget, **options) as self.session:
                    yield
        finally:
            self.session = None
            if self.run.device == SIM:
                forget_attention_plans()
            self.run.optimizer.zero_grad()
            gc.collect()
            torch.accelerator.empty_cache()

    def step(self, group: Group) -> Clock:
        """Train a batch; return what the card's clock says of it."""
        before = self.run.card.clock()
        self.run.train(self.sizes(group), len(group), self.session)
        return self.run.card.clock().since(before)

    def watch(self, group: Group) -> None:
        """Train a batch; `run` notes it, also if it runs out of memory."""
        self.run.watched(self.sizes(group), len(group), self.session)

    def sizes(self, group: Group) -> Sizes:
        """Return the sizes of a batch: the sums of its lengths, or the largest."""
        if self.place.adds:
            return tuple(map(sum, zip(*group, strict=True)))
        return padded(group, self.multiple)

    def try_out(
        self,
        strategy: str,
        size: int,
        groups: Iterable[Group],
        warm: int = _WARM,
    ) -> dict[str, Any]:
        """Train batches until one runs out of memory; return a row's columns.

        Args:
            strategy: The strategy.
            size: The most rows, or tokens, of a batch; 0 if the sampler chooses.
            groups: The batches; they may ask for `session`.
            warm: Steps that the rate leaves out.
        """
        steps: list[tuple[Group, Clock]] = []
        why, told = "", {}
        with self.strategy(strategy):
            try:
                for group in itertools.islice(groups, self.most_steps):
                    steps.append((group, self.step(group)))
            except (torch.OutOfMemoryError, mimose.InfeasibleBudgetError) as error:
                why = f"{type(error).__name__} at {len(group)} x {self.sizes(group)}"
            if self.session is not None:
                summary = self.session.summary()
                told = {"over": summary.steps_over, "reruns": summary.retries}
        found = numbers(steps, warm, why, self.sizes, adds=self.place.adds)
        return {"strategy": strategy, "size": size, **found, **told}

    def heaviest_first(self, part: str, size: int) -> list[Group]:
        """Return an epoch's batches, first those that take the most memory."""
        groups = self.groups(part, size)
        n = (lambda _: 1) if self.place.adds else len
        heavy = sorted(groups, key=lambda g: -n(g) * sum(self.sizes(g)))[:2]
        heavy += sorted(groups, key=lambda g: -sum(self.sizes(g)))[:2]
        return [*heavy, *groups]

    def search(self, part: str) -> Iterator[dict[str, Any]]:
        """Yield the trial of the largest size that never runs out, by strategy.

        Where a host decides, more rows with everything recomputed may be faster than
        few that keep. The last strategy is tried if no other one fits.
        """
        *first, last = self.place.strategies
        found = [told for name in first or [last] if (told := self._most(part, name))]
        if not found and first and (told := self._most(part, last)):
            found = [told]
        yield from found

    def _most(self, part: str, strategy: str) -> dict[str, Any] | None:
        sizes = [s for s in _GRID if s * self.longest < 1_000_000]
        low, high = 0, len(sizes)
        while low < high:  # halve the grid by the heaviest batches alone
            middle = (low + high) // 2
            heavy = self.heaviest_first(part, sizes[middle])[:4]
            if self.try_out(strategy, 0, heavy)["ooms"]:
                high = middle
            else:
                low = middle + 1
        for size in reversed(sizes[:low]):
            groups = self.heaviest_first(part, size)
            size *= 1 if part == "a" else self.longest
            told = self.try_out(strategy, size, groups)
            if not told["ooms"]:
                return told
        return None

    def groups(self, part: str, size: int) -> list[Group]:
        """Return an epoch of fixed rows (a), or of so many longest samples' tokens."""
        rng = random.Random(self.seed)
        samples = list(self.samples)
        rng.shuffle(samples)
        if part == "a":
            return [samples[i : i + size] for i in range(0, len(samples), size)]
        groups = list(of_tokens(samples, size * self.longest))
        rng.shuffle(groups)
        return groups

    def ours(self, part: str = "c") -> dict[str, Any]:
        """Return the row of the sampler's own batches (c), or of the stream's (s)."""
        groups = self.drawn() if part == "c" else self.streamed()
        told = self.try_out(self.actions, 0, groups, _UNTIL_LEARNED)
        return told | {"settled": self.settled}

    def drawn(self) -> Iterator[Group]:
        """Yield the sampler's batches; note how many it took to settle.

        Epoch follows epoch, but where whole ones are compared.
        """
        columns = map(list, zip(*self.samples, strict=True))
        lengths = dict(zip(self.place.names, columns, strict=False))
        multiple = self.multiple if self.multiple > 1 else None
        sampler = mimose.BatchSampler(
            lengths, self.session, seed=self.seed, pad_to_multiple_of=multiple
        )
        for n_drawn, batch in enumerate(self._batches(sampler), 1):
            if sampler.is_settled and self.settled is None:
                self.settled = n_drawn
            yield [self.samples[at] for at in batch]

    def streamed(self) -> Iterator[Group]:
        """Yield the batches of the same samples as a stream."""
        names = self.place.names
        stream = mimose.BatchStream(
            self.samples,
            self.session,
            length=lambda sample: dict(zip(names, sample, strict=False)),
            collate_fn=list,
            buffer=self.buffer,
            seed=self.seed,
            pad_to_multiple_of=self.multiple if self.multiple > 1 else None,
        )
        for n_drawn, group in enumerate(self._batches(stream), 1):
            if stream.is_settled and self.settled is None:
                self.settled = n_drawn
            yield group

    def _batches(self, batches: Iterable[_Batch]) -> Iterator[_Batch]:
        yield from batches
        while self.place.workload not in OF_OTHER_DIMENSIONS.values():
            yield from batches


def padded(group: Group, multiple: int = 1) -> Sizes:
    """Return the lengths of a batch of such samples, rounded up to a multiple."""
    longest = map(max, zip(*group, strict=True))
    return tuple(-(-length // multiple) * multiple for length in longest)


def of_tokens(samples: Iterable[Sizes], most: int) -> Iterator[Group]:
    """Yield batches of like lengths of at most so many tokens, padding counted."""

    def place(sizes: Sizes) -> tuple[float, ...]:
        band = int(math.log(sizes[0], _LIKE)) if len(sizes) > 1 else 0
        return (band, *(size if band % 2 else -size for size in sizes[1:]), sizes[0])

    group: list[Sizes] = []
    for sample in sorted(samples, key=place):
        if group and (len(group) + 1) * sum(padded([*group, sample])) > most:
            yield group
            group = []
        group.append(sample)
    yield group


def numbers(
    steps: Sequence[tuple[Group, Clock]],
    warm: int,
    why: str,
    sizes: Callable[[Group], Sizes],
    *,
    adds: bool = False,
) -> dict[str, Any]:
    """Return what a row says of steps.

    Args:
        steps: Batches, and the card's clock.
        warm: How many of the first the rate leaves out.
        why: What ended them; "" for nothing.
        sizes: Returns the sizes of a batch.
        adds: Whether batches have no padding.
    """

    def share(of: Callable[[Sizes], int]) -> float | None:
        if adds:
            return 0.0
        real = sum(sum(map(of, group)) for group, _ in steps)
        held = sum(len(group) * of(sizes(group)) for group, _ in steps)
        return 1.0 - real / held if held else None

    def rate(
        of: Sequence[tuple[Group, Clock]],
        is_user: bool,
        n: Callable[[Group], int] = lambda group: sum(map(sum, group)),
    ) -> float | None:
        seconds = sum(clock.user if is_user else clock.seconds for _, clock in of)
        return sum(n(group) for group, _ in of) / seconds if of else None

    late = steps[warm:]
    same = steps[_UNTIL_LEARNED:]
    return {
        "tokens_per_second": None if why else rate(late, False),
        "tokens_per_second_all": rate(steps, False),
        "samples_per_second_all": rate(steps, False, len),
        "user_tokens_per_second": None if why else rate(same, True),
        "user_tokens_per_second_all": rate(steps, True),
        "rows": sum(len(group) for group, _ in late) / len(late) if late else None,
        "padding": share(sum),
        "first_padding": share(lambda sizes: sizes[0]),
        "shapes": len({(len(group), *sizes(group)) for group, _ in steps}),
        "n_steps": len(steps),
        "ooms": int(bool(why)),
        "why": why,
    }


def work(task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Run the trials of a place; yield a row's columns for each.

    Args:
        task: As for `Trials`, and ``part``.
    """
    warnings.filterwarnings("ignore")
    trials = Trials(task)
    if task["part"] in "cs":
        yield trials.ours(task["part"])
    else:
        yield from trials.search(task["part"])
