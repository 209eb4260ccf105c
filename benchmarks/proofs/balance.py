"""Do ranks that share a global batch by predicted seconds end together?

A model of `benchmarks.scale` trains global batches on the hollow card, each as one of
eight ranks would. Then global batches are planned for more ranks: by `mimose.balance`;
at random; and by sums of squared lengths. The last two cut each rank's samples into
micro-batches as `mimose.balance` does for one rank. Seconds are forecasts of each
micro-batch's exact shape. `_times` is a step over that of `mimose.balance`; `equal` has
equally many micro-batches on all ranks.

    python -m benchmarks.proofs balance
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

import mimose
from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Options, Rows, Settings, Task
from benchmarks.scale.models import WORKLOADS
from benchmarks.scale.run import BUDGET, GIB, build
from mimose.bench.device import SIM
from mimose.bench.rehearse.host import of_session

QUESTION = "Do ranks that share a global batch end together?"
DEFAULTS = {"seed": 3, "threads": 1, "device": SIM}
_RANKS = {2: 256, 4: 128, 8: 64, 32: 64, 128: 64}
"""Numbers of ranks, and the samples of each in a global batch."""
_RUN = 4, 8
"""Those whose ranks all run, one after the other on one card."""
_BARS = {4: 1.05, 8: 1.05, 32: 1.10, 128: 1.25}
OPTIONS = (common.count("--steps", 320, "at least, to learn from"),)
WORKLOAD, CARD_GIB = "llama-8b-lora-32k", 80
_SHORTEST, _LONGEST, _MEDIAN, _SPREAD = 16, 32_768, 512, 1.2
_SHOWN = 10
"""Columns of the table."""
_LEARNING = 8, 64
"""Ranks and samples of a global batch that is trained."""


def ask(settings: Settings, options: Options) -> Answer:
    """Train, plan, and compare the slowest rank with the mean of all."""
    answer = Answer(path=settings.out / "balance.csv")
    for row in common.measured("balance", settings, steps=options.steps):
        n = row["ranks"]
        bars = [Bar("micro-batches that do not fit", row["unfit"], at_most=0)]
        if n in _BARS:
            bars.append(Bar("slowest rank / mean", row["balance"], at_most=_BARS[n]))
        line = {name: row[name] for name in [*list(row)[1:_SHOWN], "run"]}
        answer.add(str(n), [row], line, bars, head="ranks")
    return answer


def work(task: Task) -> Rows:
    """Train; yield the columns that are measured for each number of ranks.

    Args:
        task: ``steps``, ``seed`` and ``device``.
    """
    workload, draw = WORKLOADS[WORKLOAD], random.Random(task["seed"])
    run = build(workload, {**task, "gib": CARD_GIB, "card": "h100"})
    budget = int(BUDGET * CARD_GIB * GIB)
    with (
        mimose.attach(run.model, budget, refine=False) as session,
        run.charged(of_session(session)),
    ):
        steps = n_ooms = 0
        while steps < task["steps"]:
            n_ranks, each = _LEARNING
            lengths = [_LONGEST, *lengths_of(draw, n_ranks * each - 1)]
            plan = mimose.balance(lengths, session, n_ranks)
            has_longest = [any(0 in rows for rows in own) for own in plan.indices]
            first = has_longest.index(True)
            rank = draw.randrange(n_ranks) if steps else first
            for rows, _ in plan.of_rank(rank):
                try:
                    run.train((max(lengths[row] for row in rows),), rows=len(rows))
                except torch.OutOfMemoryError:
                    n_ooms += 1
                    run.optimizer.zero_grad()
                steps += 1
        for n_ranks, each in _RANKS.items():
            lengths, ran = lengths_of(draw, n_ranks * each), []
            told = _compared(session, lengths, n_ranks, draw)
            plan = mimose.balance(lengths, session, n_ranks)
            for rank in range(n_ranks if n_ranks in _RUN else 0):
                before = run.card.clock()
                for rows, _ in plan.of_rank(rank):
                    run.train((max(lengths[row] for row in rows),), rows=len(rows))
                ran.append(run.card.clock().since(before).user)
            slowest = max(ran) / statistics.mean(ran) if ran else None
            yield {**told, "run": slowest, "steps": steps, "ooms": n_ooms}


def lengths_of(draw: random.Random, n: int) -> list[int]:
    """Return the lengths of samples, log-normal within bounds."""
    found: list[int] = []
    while len(found) < n:
        length = round(draw.lognormvariate(math.log(_MEDIAN), _SPREAD))
        if _SHORTEST <= length <= _LONGEST:
            found.append(length)
    return found


class Forecasts:
    """Seconds of batches by a session's forecasts of their exact shapes.

    Args:
        session: Makes the forecasts.
        extra: Seconds that each batch takes besides.
        accumulating: As for `Session.forecast`.

    Attributes:
        n_unfit: Shapes asked that do not fit.
        n_tried: Those with more rows than were measured.
    """

    def __init__(
        self,
        session: mimose.Session,
        extra: float = 0.0,
        *,
        accumulating: bool | None = None,
    ) -> None:
        self._session, self._extra = session, extra
        self._accumulating = accumulating
        self.n_unfit = self.n_tried = 0

    def seconds(self, n: int, length: int) -> float:
        """Return a batch's seconds, or a multiple of those of half its rows."""
        shape = self._session.collation.shape((n, n * length, length))
        told = self._session.forecast(shape, accumulating=self._accumulating)
        self.n_unfit += told.fits is False
        self.n_tried += told.fits is None
        seconds = told.settled_seconds
        if seconds is None and n > 1:
            return n / (n // 2) * self.seconds(n // 2, length)
        return math.nan if seconds is None else seconds + self._extra


def _compared(
    session: mimose.Session, lengths: list[int], n_ranks: int, draw: random.Random
) -> Mapping[str, Any]:
    """Return the slowest rank's seconds over the mean, and over those of balance."""
    mimose.balance(lengths, session, n_ranks)
    began = time.perf_counter()
    plan = mimose.balance(lengths, session, n_ranks)
    took = time.perf_counter() - began
    times = session.summary().first_times
    told = Forecasts(session, times.seconds if times else 0.0, accumulating=True)

    def seconds(ranks: Sequence[Sequence[Sequence[int]]]) -> list[float]:
        found: list[float] = []
        for own in ranks:
            sizes = ((len(rows), max(lengths[row] for row in rows)) for rows in own)
            found.append(sum(told.seconds(*each) for each in sizes))
        return found

    def alone(parts: Sequence[Sequence[int]]) -> Iterator[Sequence[Sequence[int]]]:
        for part in parts:
            [own] = mimose.balance([lengths[i] for i in part], session, 1).indices
            yield [[part[i] for i in rows] for rows in own]

    ours = seconds(plan.indices)
    equal = mimose.balance(lengths, session, n_ranks, equal=True).indices
    unfit, tried = told.n_unfit, told.n_tried
    mixed = draw.sample(range(len(lengths)), len(lengths))
    at_random = seconds([*alone([mixed[r::n_ranks] for r in range(n_ranks)])])
    squares: list[tuple[int, int, list[int]]] = [(0, r, []) for r in range(n_ranks)]
    for i in sorted(mixed, key=lambda i: -lengths[i]):
        total, rank, part = squares[0]
        heapq.heapreplace(squares, (total + lengths[i] ** 2, rank, [*part, i]))
    by_squares = seconds([*alone([part for *_, part in squares])])
    return {
        "ranks": n_ranks,
        "samples": len(lengths),
        "micro_batches": sum(map(len, plan.indices)) / n_ranks,
        "balance": max(ours) / (sum(ours) / n_ranks),
        "equal_times": max(seconds(equal)) / max(ours),
        "random": max(at_random) / (sum(at_random) / n_ranks),
        "squares": max(by_squares) / (sum(by_squares) / n_ranks),
        "random_times": max(at_random) / max(ours),  # a step, over that of balance
        "squares_times": max(by_squares) / max(ours),
        "plan_ms": 1e3 * took,
        "slowest_seconds": max(ours),
        "longest_seconds": told.seconds(1, max(lengths)),
        "unfit": unfit,
        "tried": tried,  # micro-batches with more rows than were measured
    }
