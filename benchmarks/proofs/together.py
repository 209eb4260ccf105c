"""Do ranks that draw their own batches end their steps together?

    python -m benchmarks.proofs together
    python -m benchmarks.proofs together --parts two

Llama-8B with LoRA trains on hollow cards, on samples of log-normal lengths.

- two: two processes, each with a card, a session and a `mimose.BatchSampler`, with its
  balance and without. At a step's end they exchange what their clocks say of it; the
  step takes the slower one's. No gradients cross.
- many: a session learns alone. Then samplers of more ranks draw an epoch, all ranks
  with that session's numbers. Seconds are forecasts of each batch's exact shape.
- rival: transformers' ``batch_rebalance`` for two ranks whose batches run one after the
  other on one card, with the most rows that never run out of memory, found by trial,
  plainly and under transformers' checkpointing; `accumulated` micro-batches a step.

Rates are real tokens a second of both ranks on the user's clock, waits included; those
of the second epoch compare with the rival's. `slowest` is the sum over steps of the
slowest rank's seconds over that of the mean, on the device's clock or by forecasts.
"""

from __future__ import annotations

import functools
import random
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed
from transformers.trainer_pt_utils import BatchRebalanceSampler

import mimose
from benchmarks.proofs import balance, common, ranks
from benchmarks.proofs.common import Answer, Bar, Options, Row, Rows, Settings, Task
from benchmarks.scale.fill import PLACES, Group, Trials
from benchmarks.scale.host import of_session
from benchmarks.scale.models import WORKLOADS
from benchmarks.scale.run import BUDGET, GIB, Run, build
from benchmarks.sim.hollow import Clock
from mimose import batch_sampler
from mimose.bench.device import SIM

QUESTION = "Do ranks that draw their own batches end their steps together?"
DEFAULTS = {"seed": 3, "threads": 1, "device": SIM}
OPTIONS = (
    common.some("--parts", ("two", "many", "rival")),
    common.count("--samples", 1500, "that two ranks train"),
)
_EPOCHS, _UNTIL_LEARNED = 2, 40
_MOST_SECONDS = 3000.0
"""Of two ranks."""
_LEARNED = 120
"""Steps that one rank learns from before more are simulated."""
_STEPS, _FEWEST = 32, 2000
"""Steps of an epoch of many ranks, and its fewest samples."""
_CARDS = {balance.WORKLOAD: balance.CARD_GIB, "bert-large": 16}
_MANY: Mapping[str, Mapping[str, Sequence[int]]] = {
    balance.WORKLOAD: {
        "log-normal": (2, 8, 32, 128, 1024),
        "uniform": (8, 128),
        "equal": (8, 128),
    },
    "bert-large": {"64 to 512": (8, 128)},
}
_DRAWN: Mapping[str, Callable[[random.Random, int], list[int]]] = {
    "log-normal": balance.lengths_of,
    "uniform": lambda draw, n: [draw.randint(16, 4096) for _ in range(n)],
    "equal": lambda draw, n: [512] * n,
    "64 to 512": lambda draw, n: [
        length for (length,) in WORKLOADS["bert-large"].sizes(n, draw.randrange(2**31))
    ],
}
"""Lengths by kind; a session learns from the first kind of its workload."""
_BARS = {8: 1.05, 32: 1.10, 128: 1.40}
_ACCUMULATED = 1, 4
_TRIALS = 10_000
"""Steps of a trial, at most: more than its epochs have."""


def ask(settings: Settings, options: Options) -> Answer:
    """Train on two ranks, simulate more, and search the rival's rows."""
    answer = Answer(path=settings.out / "together.csv")
    task = {"samples": options.samples, "device": settings.device}
    ours: list[float] = []
    for is_balanced in (True, False) if "two" in options.parts else ():
        task["balance"] = is_balanced
        own = __name__, settings, _MOST_SECONDS
        rows, _ = ranks.launched(*own, part="two", **task)
        [row], bars = rows, []
        ours.append(row["tokens_per_second"])
        if is_balanced:
            second = row["second_tokens_per_second"]
            bars.append(Bar("slowest rank / mean", row["slowest"], at_most=1.04))
        else:
            gain = ours[0] / ours[1]
            bars.append(Bar("tokens a second, balanced / random", gain, at_least=1.25))
        bars.append(Bar("out of memory", row["ooms"], at_most=0))
        whole = row["whole_epochs"]
        bars.append(Bar("epochs with each sample once", whole, at_least=_EPOCHS))
        _add(answer, "two, balanced" if is_balanced else "two, random", row, bars)
    for workload in _MANY if "many" in options.parts else ():
        for row in common.measured(
            "together", settings, part="many", workload=workload
        ):
            n, data, bars = row["ranks"], row["data"], []
            if data == "log-normal" and n in _BARS:
                bars.append(Bar("slowest rank / mean", row["slowest"], _BARS[n]))
            bars.append(Bar("as random / balanced", row["random_times"], at_least=1.0))
            bars.append(Bar("unknown batches", row["unknown"], at_most=0))
            _add(answer, f"{n}, {data}", row, bars)
    if "rival" in options.parts:
        task["part"] = "rival"
        rows = common.measured("together", settings, **task)
        for row in rows:
            name = f"rival, {row['strategy']}, {row['accumulated']}"
            _add(answer, name, row, [])
        best = max((row["second_tokens_per_second"] for row in rows), default=None)
        if ours and best:
            what = "tokens a second over those of batch_rebalance"
            answer.bars.append(Bar(what, second / best, at_least=1.1))
    return answer


def _add(answer: Answer, name: str, row: Row, bars: Sequence[Bar]) -> None:
    shown = "slowest", "random", "best", "tokens_per_second", "n_steps", "sent_bytes"
    line = {title: row[title] for title in shown if title in row}
    answer.add(name, [row], line, bars, head="ranks")


class _Step(NamedTuple):
    """What a step took, by rank."""

    device: Sequence[float]
    user: Sequence[float]
    n_tokens: int


def _summed(steps: Sequence[_Step]) -> dict[str, Any]:
    """Return columns of such steps, in which all ranks wait for the slowest."""
    found = {"n_steps": len(steps)}
    for clock, name in ((0, "slowest"), (1, "user_slowest")):
        seconds = np.array([step[clock] for step in steps])
        found[name] = seconds.max(axis=1).sum() / seconds.mean(axis=1).sum()
    waited = sum(max(step.user) for step in steps)
    return {**found, "tokens_per_second": sum(s.n_tokens for s in steps) / waited}


def _second(steps: Sequence[_Step]) -> dict[str, Any]:
    return {f"second_{name}": value for name, value in _summed(steps).items()}


# ------------------------------------------------------------------ in the child


def work(task: Task) -> Rows:
    """Do a part; yield its rows.

    Args:
        task: ``part``, ``samples``, ``seed`` and ``device``; of two ranks also
            ``balance``, ``rank`` and ``store``.
    """
    warnings.filterwarnings("ignore")
    yield from {"two": _two, "many": _many, "rival": _rival}[task["part"]](task)


def _build(task: Task, name: str = balance.WORKLOAD) -> tuple[Run, int]:
    """Return a workload on a card, and the budget of sessions."""
    gib = _CARDS[name]
    run = build(WORKLOADS[name], {**task, "gib": gib, "card": "h100"})
    return run, int(BUDGET * gib * GIB)


def _two(task: Task) -> Rows:
    """Train as one of two ranks; the first one tells."""
    ranks.join(task)
    run, budget = _build(task)
    n_ooms = 0
    lengths = balance.lengths_of(random.Random(task["seed"]), task["samples"])
    steps: list[list[_Step]] = []
    drawn: list[list[int]] = []
    with (
        mimose.attach(run.model, budget, refine=False) as session,
        run.charged(of_session(session)),
    ):
        sampler = mimose.BatchSampler(
            lengths, session, seed=task["seed"], balance=task["balance"]
        )
        for _ in range(_EPOCHS):
            steps.append([])
            drawn.append([])
            for batch in sampler:
                before = run.card.clock()
                try:
                    run.train((max(lengths[at] for at in batch),), len(batch))
                except torch.OutOfMemoryError:
                    n_ooms += 1
                    run.optimizer.zero_grad()
                clock = run.card.clock().since(before)
                told: list[Any] = [None] * ranks.N_RANKS
                own = clock.seconds, clock.user, batch, n_ooms
                distributed.all_gather_object(told, own)
                device, user, batches, ooms = zip(*told, strict=True)
                both = [at for batch in batches for at in batch]
                n_tokens = sum(lengths[at] for at in both)
                steps[-1].append(_Step(device, user, n_tokens))
                drawn[-1].extend(both)
    distributed.barrier()
    distributed.destroy_process_group()
    if task["rank"] == 0:
        every = [step for epoch in steps for step in epoch]
        all_once = [sorted(own) == list(range(len(lengths))) for own in drawn]
        yield {
            "part": "two",
            "balance": task["balance"],
            **_summed(every[_UNTIL_LEARNED:]),
            **_second(steps[-1]),
            "ooms": sum(ooms),
            "whole_epochs": sum(all_once),
        }


# ------------------------------------------------------------------ many ranks


class _Whole(mimose.BatchSampler):
    """Keeps what all ranks draw: samples and longest lengths."""

    def __init__(self, lengths: Sequence[int], n_ranks: int, **options: Any) -> None:
        super().__init__(lengths, rank=0, world_size=n_ranks, **options)
        self.drawn: list[list[tuple[int, int]]] = []

    def _draw(self) -> Any:
        step = super()._draw()
        own = [self._lengths[self._order[batch]] for batch in step.batches]
        self.drawn.append([(len(each), int(each.max())) for each in own])
        return step


class _Alike:
    """In place of an exchange: all ranks have the numbers of this one."""

    sent: ClassVar[list[int]] = []
    """Numbers of each exchange, and whether the rank failed."""

    def __init__(self, n_ranks: int, numbers: Sequence[float], error: Any) -> None:
        assert error is None
        self._found = np.tile(np.array(numbers, dtype=float), (n_ranks, 1))
        self.sent.append(1 + len(numbers))

    def wait(self) -> NDArray[np.float64]:
        """Return them."""
        return self._found


def _many(task: Task) -> Rows:
    """Learn from one rank's batches; then draw as many ranks."""
    run, budget = _build(task, task["workload"])
    kinds, draw = _MANY[task["workload"]], random.Random(task["seed"])
    with (
        mimose.attach(run.model, budget, refine=False) as session,
        run.charged(of_session(session)),
    ):
        lengths = _DRAWN[next(iter(kinds))](draw, 64 * _LEARNED)
        n_late = 0
        for n, batch in enumerate(mimose.BatchSampler(lengths, session), 1):
            run.train((max(lengths[at] for at in batch),), len(batch))
            n_late += len(batch) * (n > _LEARNED // 2)
            if n == _LEARNED:
                break
        seconds = functools.cache(balance.Forecasts(session).seconds)
        for kind, numbers in kinds.items():
            for n_ranks in numbers:
                n = max(_FEWEST, _STEPS * n_ranks * n_late // (_LEARNED // 2))
                told = _compared(session, _DRAWN[kind](draw, n), n_ranks, seconds)
                yield {"part": "many", "data": kind, "ranks": n_ranks, "samples": n, **told}


def _compared(
    session: mimose.Session,
    lengths: Sequence[int],
    n_ranks: int,
    seconds: Callable[[int, int], float],
) -> dict[str, Any]:
    """Return the slowest rank's seconds over the mean, balanced and not."""
    _Alike.sent.clear()
    found, began = {}, time.perf_counter()
    with mock.patch.object(
        batch_sampler, "Exchange", functools.partial(_Alike, n_ranks)
    ):
        for is_balanced in (True, False):
            sampler = _Whole(lengths, n_ranks, session=session, balance=is_balanced)
            drawn = sum(map(len, sampler))
            took = time.perf_counter() - began
            found[is_balanced] = np.array(
                [[seconds(*each) for each in step] for step in sampler.drawn]
            )
    ours, theirs = found[True], found[False]
    best = np.sort(ours, axis=None).reshape(-1, n_ranks)
    return {
        "n_steps": len(ours),
        **{
            name: each.max(axis=1).sum() / each.mean(axis=1).sum()
            for name, each in (("slowest", ours), ("random", theirs), ("best", best))
        },
        "random_times": theirs.max(axis=1).sum() / ours.max(axis=1).sum(),
        "unknown": int(np.isnan(ours).sum()),
        "drawn_seconds": took,
        "own_samples": drawn,
        "exchanges": len(_Alike.sent) // 2,
        "sent_bytes": 8 * max(_Alike.sent),
        "received_bytes": 8 * max(_Alike.sent) * n_ranks,
    }


# ------------------------------------------------------------------ the rival


class _Rival(Trials):
    """Batches of ``batch_rebalance``, those of two ranks by turns on one card."""

    def __init__(self, task: Task, n_accumulated: int) -> None:
        place = PLACES["llama-8b-lora-80"]
        super().__init__({**task, "steps": _TRIALS, "card": "h100"}, place)
        lengths = balance.lengths_of(random.Random(task["seed"]), task["samples"])
        self.samples = [(length,) for length in lengths]
        self.longest, self.n_accumulated = 1, n_accumulated
        self.ran: list[tuple[Group, Clock]] = []

    def step(self, group: Group) -> Clock:
        """Train a batch; keep what the clock says of it."""
        clock = super().step(group)
        self.ran.append((group, clock))
        return clock

    def groups(self, part: str, size: int) -> list[Group]:
        """Return all epochs' batches of so many rows in the mean."""
        del part
        lengths = [length for (length,) in self.samples]
        n, n_each = ranks.N_RANKS, self.n_accumulated
        found: list[Group] = []
        for epoch in range(_EPOCHS):
            own = []
            for rank in range(n):
                sizes = (n * n_each * size, n, n_each)
                sampler = BatchRebalanceSampler(
                    lengths, *sizes, seed=self.seed, rank=rank, drop_last=False
                )
                sampler.set_epoch(epoch)
                own.append(sampler)
            found += [[self.samples[at] for at in b] for pair in zip(*own) for b in pair]
        return found

    def found(self, strategy: str) -> dict[str, Any] | None:
        """Return columns of the most rows that never run out of memory."""
        told = self._most("a", strategy)
        if told is None:
            return None
        n, whole = ranks.N_RANKS, self.groups("a", told["size"])
        n_batches = n * self.n_accumulated
        late = self.ran[-len(whole) // _EPOCHS :]
        steps = []
        for first in range(0, len(late), n_batches):
            groups, clocks = zip(*late[first : first + n_batches], strict=True)
            by_rank = [clocks[rank::n] for rank in range(n)]
            steps.append(
                _Step(
                    [sum(clock.seconds for clock in own) for own in by_rank],
                    [sum(clock.user for clock in own) for own in by_rank],
                    sum(length for group in groups for (length,) in group),
                )
            )
        return {"strategy": strategy, "rows": told["size"], **_second(steps)}


def _rival(task: Task) -> Rows:
    """Search the most rows of the rival's ways."""
    for n_accumulated in _ACCUMULATED:
        rival = _Rival(task, n_accumulated)
        for strategy in ("plain", "hf"):
            rival.ran.clear()
            if (told := rival.found(strategy)) is not None:
                yield {"part": "rival", "accumulated": n_accumulated, **told}
