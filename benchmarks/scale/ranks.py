"""Steps of ranks that wait for the slowest: see `benchmarks.proofs.together`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from transformers.trainer_pt_utils import BatchRebalanceSampler

import mimose
from benchmarks.scale.fill import PLACES, Group, Trials
from mimose import batch_sampler
from mimose.sim.hollow import Clock

_PLACE = PLACES["llama-8b-lora-80"]
_TRIALS = 100_000
"""Steps of a trial, at most: more than an epoch has."""


class Step(NamedTuple):
    """What a step took, by rank, on the device's and on the user's clock."""

    device: Sequence[float]
    user: Sequence[float]
    n_tokens: int


def told(steps: Sequence[Step], when: str = "") -> dict[str, Any]:
    """Return columns of steps, each with a word before its name."""
    waited = sum(max(step.user) for step in steps)
    return {
        f"{when}steps": len(steps),
        f"{when}slowest": slowest([step.device for step in steps]),
        f"{when}user_slowest": slowest([step.user for step in steps]),
        f"{when}rate": sum(step.n_tokens for step in steps) / waited,
    }


def slowest(seconds: Sequence[Sequence[float]] | NDArray[np.float64]) -> float:
    """Return the slowest rank's seconds, (n_steps, n_ranks), over the mean."""
    found = np.array(seconds)
    return float(found.max(axis=1).sum() / found.mean(axis=1).sum())


class _Whole(mimose.BatchSampler):
    """Keeps the samples and the longest one of each rank's batches."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.drawn: list[list[tuple[int, int]]] = []

    def _choose(self) -> Any:
        step = super()._choose()
        own = [self._lengths[self._order[batch]] for batch in step.batches]
        self.drawn.append([(len(each), int(each.max())) for each in own])
        return step


def drawn_by(
    lengths: Sequence[int], session: mimose.Session, n_ranks: int, *, balance: bool
) -> tuple[list[list[tuple[int, int]]], list[int]]:
    """Return an epoch's steps of ranks that all know what a session knows.

    Returns:
        The samples and the longest one of each rank's batch, by step; and how many
        numbers each exchange has.
    """
    sent: list[int] = []

    def own(numbers: Sequence[float], _: Any) -> NDArray[np.float64]:
        """Return the numbers of this one for all ranks, the fourth is the rank."""
        sent.append(2 + len(numbers))
        return np.array([[*numbers[:3], rank, *numbers[4:]] for rank in range(n_ranks)])

    with mock.patch.object(batch_sampler, "exchange", own):
        sampler = _Whole(lengths, session, rank=0, world_size=n_ranks, balance=balance)
        for _ in sampler:
            pass
    return sampler.drawn, sent


class Rebalanced(Trials):
    """Batches of ranks that ``batch_rebalance`` balances, by turns on one card.

    Args:
        task: As for `Trials`.
        lengths: Of the samples.
        n_ranks: The ranks.
        n_accumulated: Micro-batches of each in a step.
    """

    def __init__(
        self,
        task: Mapping[str, Any],
        lengths: Sequence[int],
        *,
        n_ranks: int,
        n_accumulated: int,
    ) -> None:
        super().__init__({**task, "steps": _TRIALS}, _PLACE)
        self.samples = [(length,) for length in lengths]
        self.longest = 1  # any number of rows may fit
        self.n_ranks, self.n_accumulated = n_ranks, n_accumulated
        self.ran: list[tuple[Group, Clock]] = []

    def step(self, group: Group) -> Clock:
        """Train a batch; keep what the clock says of it."""
        clock = super().step(group)
        self.ran.append((group, clock))
        return clock

    def groups(self, part: str, size: int) -> list[Group]:
        """Return an epoch's batches, of so many rows in the mean."""
        del part
        lengths = [length for (length,) in self.samples]
        n, n_each, found = self.n_ranks, self.n_accumulated, list[Group]()
        samplers = [
            BatchRebalanceSampler(
                *(lengths, n * n_each * size, n, n_each),
                **{"seed": self.seed, "rank": rank, "drop_last": False},
            )
            for rank in range(n)
        ]
        for batches in zip(*samplers, strict=True):
            found += [[self.samples[at] for at in batch] for batch in batches]
        return found

    def most(self, strategy: str) -> tuple[int, list[Step]]:
        """Return the most rows that never run out, and an epoch's steps.

        There are 0 rows if nothing fits.
        """
        self.ran.clear()
        told = self._most("a", strategy)
        size = told["size"] if told else 0
        n, n_batches = self.n_ranks, self.n_ranks * self.n_accumulated
        n_last = len(self.groups("a", size)) if told else 0
        late = self.ran[len(self.ran) - n_last :]
        steps = []
        for first in range(0, n_last, n_batches):
            step = late[first : first + n_batches]
            by_rank = [[clock for _, clock in step[rank::n]] for rank in range(n)]
            device = [sum(clock.seconds for clock in own) for own in by_rank]
            user = [sum(clock.user for clock in own) for own in by_rank]
            n_tokens = sum(length for group, _ in step for (length,) in group)
            steps.append(Step(device, user, n_tokens))
        return size, steps
