"""Do ranks that draw their own batches end their steps together?

    python -m benchmarks.proofs together

Models train on hollow cards. All ranks wait for the slowest of a step: `slowest` is the
sum over steps of its seconds, over that of the ranks' mean.

- two: two processes, each with a card, a session and a `mimose.BatchSampler`, balanced
  and not. They exchange what their clocks say of a step. No gradients cross.
- streams: as two, of a `mimose.BatchStream` on each, whose streams have other samples,
  the second one a fifth fewer. Steps where a rank repeats one do not count.
- many: a session learns alone. Then samplers of more ranks draw an epoch, as if all
  ranks had that session's numbers. Seconds are forecasts of each batch's exact shape.
  `best` has the same batches sorted by these.
- given: the same session plans global batches for more ranks, by `mimose.balance`, and
  with the samples of each rank drawn at random.

Rates are tokens a second of both ranks on the user's clock, `slowest` of two is on the
device's.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed

import mimose
from benchmarks.proofs import common, ranks
from benchmarks.proofs.common import Answer, Bar, Options, Row, Rows, Settings, Task
from benchmarks.scale.models import WORKLOADS
from benchmarks.scale.run import BUDGET, GIB, Run, build
from mimose import batch_sampler
from mimose.bench.device import SIM

QUESTION = "Do ranks that draw their own batches end their steps together?"
DEFAULTS = {"seed": 3, "threads": 1, "device": SIM}
OPTIONS = (
    common.some("--parts", ("two", "streams", "many", "given")),
    common.count("--samples", 1500, "that two ranks train"),
    common.RESUME,
)
_LLAMA, _BERT = "llama-8b-lora-32k", "bert-large"
_CARDS = {_LLAMA: 80, _BERT: 16}
_SHORTEST, _LONGEST, _MEDIAN, _SPREAD = 16, 32_768, 512, 1.2
"""Of log-normal lengths."""
_EPOCHS, _UNTIL_LEARNED, _MOST_SECONDS, _BUFFER = 2, 40, 3000.0, 256
"""Of two ranks: epochs, steps that are left out, the longest time, and the samples that
streams hold."""
_LEARNED = 120
"""Steps of one rank before more are simulated."""
_LONG, _MOST = 52_000, 1024
"""Samples of a long epoch, and the most ranks."""
_GIVEN, _BATCHES = {2: 512, 4: 512, 8: 512, 32: 2048, 128: 8192}, 8
"""Samples of a global batch, by ranks; and how many batches are planned."""
_BARS = {
    "many": {(8, _LONG): 1.05, (32, _LONG): 1.10, (128, _LONG): 1.40},
    "given": {(4, 512): 1.05, (8, 512): 1.05, (32, 2048): 1.10, (128, 8192): 1.25},
}
"""By part, ranks and samples: the slowest over the mean."""
_MANY = (
    *((_LLAMA, "log-normal", n, _LONG) for n in (2, 8, 32, 128)),
    *((_LLAMA, "log-normal", n, 165 * n) for n in (8, 32, 128, _MOST)),
    *((_LLAMA, kind, n, 165 * n) for kind in ("uniform", "equal") for n in (8, 128)),
    *((_BERT, "64 to 512", n, 7_500 * n) for n in (8, 128)),
)
"""Workloads, lengths, ranks and samples: 165 of log-normal ones are some 30 steps."""
_KINDS: Mapping[str, Callable[[random.Random, int], Sequence[int]]] = {
    "log-normal": lambda draw, n: _log_normal(draw, n),
    "uniform": lambda draw, n: [draw.randint(16, 4096) for _ in range(n)],
    "equal": lambda draw, n: [512] * n,
    "64 to 512": lambda draw, n: [own for (own,) in WORKLOADS[_BERT].sizes(n, 1)],
}


def ask(settings: Settings, options: Options) -> Answer:
    """Train on two ranks, and simulate more."""
    answer = Answer.begun(settings.out / "together.csv", resume=options.resume)
    for part in options.parts:
        if all(row["part"] != part for row in answer.rows):
            for row in _measured(part, settings, options):
                answer.add(part, [row], {}, (), head="part")
    answer.table, rows = [*map(_line, answer.rows)], answer.rows
    for row in rows:
        answer.bars += _bars(row)
        if row.get("ranks") == _MOST:
            n, steps, all_bytes = row["rounds"], row["steps"], _MOST * row["sent_bytes"]
            answer.notes.append(
                f"a rank of {_MOST} sends {row['sent_bytes']} bytes in a round, gets "
                f"{all_bytes}; {n} rounds in {steps} steps, later one in 64"
            )
    ours = {row["balance"]: row for row in rows if row["part"] == "two"}
    if ours:
        gain = ours[True]["rate"] / ours[False]["rate"]
        answer.bars.append(Bar("tokens a second, over random", gain, at_least=1.25))
    return answer


def _measured(part: str, settings: Settings, options: Options) -> Iterator[Row]:
    task = {"device": settings.device, "samples": options.samples, "part": part}
    kinds: Mapping[str, Any] = {"two": (True, False), "streams": (None,)}
    for is_balanced in kinds.get(part, ()):
        own = {**task, "balance": is_balanced}
        yield from ranks.launched(__name__, settings, _MOST_SECONDS, **own)[0]
    for workload in {"many": (_LLAMA, _BERT), "given": (_LLAMA,)}.get(part, ()):
        for said in common.said_by("together", settings, **task, workload=workload):
            yield {**said, **settings.provenance()}


def _line(row: Row) -> dict[str, object]:
    names = "part", "balance", "ranks", "lengths", "samples", "steps", "slowest"
    more = "best", "random", "random_times", "rate", "second_rate"
    return {name: row[name] for name in (*names, *more) if row.get(name) is not None}


def _bars(row: Row) -> list[Bar]:
    if row["part"] in ("two", "streams"):
        name = "two, balanced" if row["balance"] else "two, random"
        name = "streams" if row["part"] == "streams" else name
        bars = [Bar(f"{name}: out of memory", row["ooms"], at_most=0)]
        bars.append(Bar(f"{name}: whole epochs", row["whole"], at_least=_EPOCHS))
        most = 1.04 if row["balance"] else None
        most = 1.10 if row["part"] == "streams" else most
    else:
        name = f"{row['ranks']} ranks, {row['samples']} samples, {row['lengths']}"
        bars = [Bar(f"{name}: random / balanced", row["random_times"], at_least=1.0)]
        most = _BARS[row["part"]].get((row["ranks"], row["samples"]))
    if most is not None:
        bars.append(Bar(f"{name}: slowest / mean", row["slowest"], at_most=most))
    return bars


def work(task: Task) -> Rows:
    """Do a ``part``; yield its rows."""
    warnings.filterwarnings("ignore")
    for row in (_simulated if "workload" in task else _two)(task):
        yield {"part": task["part"], **row}


def _two(task: Task) -> Rows:
    """Train as one of two ranks; the first one tells."""
    ranks.join(task)
    run, budget = _built(task, _LLAMA)
    n, rank, is_stream = task["samples"], task["rank"], task["part"] == "streams"
    lengths = _log_normal(random.Random(task["seed"]), (1 + is_stream) * n)
    n_ooms, steps, drawn = 0, list[list[_Step]](), list[list[int]]()
    with run.attached(budget) as session:
        seed = task["seed"]
        sampler: Any
        if is_stream:
            whose = range(rank * n, rank * n + (n if rank == 0 else n * 4 // 5))
            how = {"length": lengths.__getitem__, "collate_fn": list, "seed": seed}
            sampler = mimose.BatchStream(whose, session, buffer=_BUFFER, **how)
        else:
            how = {"seed": seed, "balance": task["balance"]}
            sampler = mimose.BatchSampler(lengths, session, **how)
        for _ in range(_EPOCHS):
            steps, drawn = [*steps, []], [*drawn, []]
            for batch in sampler:
                before = run.card.clock()
                try:
                    run.train((max(lengths[at] for at in batch),), len(batch))
                except torch.OutOfMemoryError:
                    n_ooms += 1
                    run.optimizer.zero_grad()
                clock = run.card.clock().since(before)
                found: list[Any] = [None] * ranks.N_RANKS
                is_again = is_stream and sampler.is_repeated
                own = clock.seconds, clock.user, batch, n_ooms, is_again
                distributed.all_gather_object(found, own)
                device, user, batches, ooms, again = zip(*found, strict=True)
                new = [
                    b for b, is_old in zip(batches, again, strict=True) if not is_old
                ]
                both = [*itertools.chain(*new)]
                drawn[-1] += both
                if not any(again):
                    n_tokens = sum(lengths[at] for at in both)
                    steps[-1].append(_Step(device, user, n_tokens))
    distributed.barrier()
    distributed.destroy_process_group()
    if rank == 0:
        n_all = n + n * 4 // 5 if is_stream else n
        whole = sum(sorted(own) == list(range(n_all)) for own in drawn)
        learned = [*itertools.chain(*steps)][_UNTIL_LEARNED:]
        both_told = {**_told(learned), **_told(steps[-1], "second_")}
        own_told = {"balance": task["balance"], "ooms": sum(ooms), "whole": whole}
        yield {**own_told, **both_told}


def _built(task: Task, name: str) -> tuple[Run, int]:
    """Return a workload on its card, and a session's budget."""
    run = build(WORKLOADS[name], {**task, "gib": _CARDS[name], "card": "h100"})
    return run, int(BUDGET * _CARDS[name] * GIB)


def _simulated(task: Task) -> Rows:
    """Learn as one rank; then draw, or plan, as many."""
    run, budget = _built(task, task["workload"])
    draw = random.Random(task["seed"])
    cases = [case[1:] for case in _MANY if case[0] == task["workload"]]
    with run.attached(budget) as session:
        lengths = _KINDS[cases[0][0]](draw, 300 * _LEARNED)
        for batch in itertools.islice(mimose.BatchSampler(lengths, session), _LEARNED):
            run.train((max(lengths[at] for at in batch),), len(batch))
        if task["part"] == "given":
            yield from _given(session, draw)
        else:
            yield from _many(session, draw, cases)


def _many(session: mimose.Session, draw: random.Random, cases: Any) -> Rows:
    seconds = _forecasts(session)
    for kind, n, n_samples in cases:
        lengths, found = _KINDS[kind](draw, n_samples), []
        for is_balanced in (True, False):
            steps, sent = _drawn_by(lengths, session, n, balance=is_balanced)
            found.append(np.array([[seconds(*each) for each in own] for own in steps]))
        ours, at_random = found
        yield {
            **{"lengths": kind, "ranks": n, "samples": n_samples},
            **{"steps": len(ours), "slowest": slowest(ours)},
            "best": slowest(np.sort(ours, axis=None).reshape(-1, n)),
            "random": slowest(at_random),
            "random_times": at_random.max(axis=1).sum() / ours.max(axis=1).sum(),
            **{"rounds": len(sent), "sent_bytes": 8 * max(sent)},
        }


def _given(session: mimose.Session, draw: random.Random) -> Rows:
    first = session.summary().first_times
    each = _forecasts(session, first.seconds if first else 0.0, accumulating=True)

    def seconds(own: Sequence[Sequence[int]], of: Sequence[int]) -> float:
        return sum(each(len(rows), max(of[row] for row in rows)) for rows in own)

    for n, n_samples in _GIVEN.items():
        ours, at_random = [], []
        for _ in range(_BATCHES):
            lengths = _log_normal(draw, n_samples)
            plan = mimose.balance(lengths, session, n)
            ours.append([seconds(own, lengths) for own in plan.indices])
            drawn = [lengths[rank::n] for rank in range(n)]
            cut = [mimose.balance(own, session, 1).indices[0] for own in drawn]
            at_random.append([*map(seconds, cut, drawn)])
        times = np.max(at_random, axis=1).sum() / np.max(ours, axis=1).sum()
        yield {
            **{"lengths": "log-normal", "ranks": n, "samples": n_samples},
            **{"steps": _BATCHES, "slowest": slowest(ours)},
            **{"random": slowest(at_random), "random_times": float(times)},
        }


def _log_normal(draw: random.Random, n: int) -> list[int]:
    """Return lengths within bounds."""
    found: list[int] = []
    while len(found) < n:
        length = round(draw.lognormvariate(math.log(_MEDIAN), _SPREAD))
        if _SHORTEST <= length <= _LONGEST:
            found.append(length)
    return found


def _forecasts(
    session: mimose.Session, extra: float = 0.0, *, accumulating: bool | None = None
) -> Callable[[int, int], float]:
    """Return what forecasts seconds of a batch by its rows and its longest sample.

    What was not measured has a multiple of half the rows; `extra` comes to each batch.
    """

    @functools.cache
    def seconds(n: int, length: int) -> float:
        shape = session.collation.shape((n, n * length, length))
        found = session.forecast(shape, accumulating=accumulating).settled_seconds
        if found is None and n > 1:
            return n / (n // 2) * seconds(n // 2, length)
        return math.nan if found is None else found + extra

    return seconds


class _Step(NamedTuple):
    """What a step took, by rank, on the device's and on the user's clock."""

    device: Sequence[float]
    user: Sequence[float]
    n_tokens: int


def _told(steps: Sequence[_Step], when: str = "") -> dict[str, Any]:
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


@contextlib.contextmanager
def alone(n_ranks: int) -> Iterator[list[int]]:
    """Have samplers within the block take their own numbers for those of all ranks.

    Yields:
        How many numbers each exchange has.
    """
    sent: list[int] = []

    def own(numbers: Sequence[float], error: Exception | None) -> NDArray[np.float64]:
        if error is not None:
            raise error
        sent.append(2 + len(numbers))  # the fourth one is the rank
        return np.array([[*numbers[:3], rank, *numbers[4:]] for rank in range(n_ranks)])

    with mock.patch.object(batch_sampler, "exchange", own):
        yield sent


def _drawn_by(
    lengths: Sequence[int], session: mimose.Session, n_ranks: int, *, balance: bool
) -> tuple[list[list[tuple[int, int]]], list[int]]:
    """Return an epoch's steps of ranks that all know what a session knows.

    Returns:
        The samples and the longest one of each rank's batch, by step; and how many
        numbers each exchange has.
    """
    with alone(n_ranks) as sent:
        sampler = _Whole(lengths, session, rank=0, world_size=n_ranks, balance=balance)
        for _ in sampler:
            pass
    return sampler.drawn, sent
