"""``python -m benchmarks.scale.forecast``: are a step's seconds as they were forecast?

Models of `benchmarks.scale` train on batches of random rows and lengths, the largest of
which just fit. Before each step its session says how long the step will take, the
optimizer's included; the hollow card's clock says how long it took.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import mimose
from benchmarks.proofs.numbers import quantile
from benchmarks.scale.models import WORKLOADS
from benchmarks.scale.run import BUDGET, GIB, build
from mimose.bench.child import run_child
from mimose.bench.rows import Row, RowsFile, RunSettings

_PLACES = {"bert-large": 16, "t5-large": 24, "llama-8b-lora": 40}
"""Workloads, and the GiB of their cards."""
_ROWS, *_LENGTHS = "input_ids.0", "input_ids.1", "labels.1"
_UNKNOWN, _FIRST = 8, 24
"""Steps of which nothing is known, and those in which rows grow to what fits; behind
them rows are drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForecastRow(Row):
    """How far off forecasts of seconds were on a workload, as shares of a step."""

    workload: str
    gib: int
    card: str
    n_steps: int
    n_unknown: int
    """Steps behind the first that no seconds were told of."""
    ooms: str
    """Steps that ran out of memory: which, its shape, and whether it was to fit."""
    early_p50: float
    """Until the step of which the next columns tell."""
    early_p95: float
    error_p50: float
    error_p95: float
    error_max: float
    fixed_share: float
    """Of a step's seconds, those of any batch, in the median."""
    ask_seconds: float
    """Of the host, in the median."""


def work(task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Train a workload; yield the columns that are measured.

    Args:
        task: As for `benchmarks.scale.run.work`.
    """
    workload = WORKLOADS[task["workload"]]
    run = build(workload, task)
    draw = random.Random(task["seed"])
    errors: list[tuple[int, float]] = []
    asked, shares, failed, n_unknown = [], [], [], 0
    budget = int(BUDGET * task["gib"] * GIB)
    with mimose.attach(run.model, budget, refine=False) as session:
        for step, sizes in enumerate(workload.sizes(task["steps"], task["seed"])):
            if step < _UNKNOWN:
                run.train(sizes, 2 + step)
                continue
            shape = dict(zip(_LENGTHS, sizes, strict=False))
            most = max(2, session.largest(shape, vary=_ROWS))
            shape[_ROWS] = most + 1
            if step >= _FIRST:
                shape[_ROWS] = draw.randint(max(1, most // 3), most)
            elif session.forecast(shape).fits is False:
                shape[_ROWS] = most
            else:
                shape[_ROWS] += most // 3
            began = time.process_time()
            told = session.forecast(shape)
            asked.append(time.process_time() - began)
            before = run.card.clock()
            try:
                run.train(sizes, shape[_ROWS])
            except torch.OutOfMemoryError:
                failed.append(f"{step}:{dict(shape)}:{told.fits}")
                run.optimizer.zero_grad()
                continue
            took = run.card.clock().since(before).seconds
            if told.seconds is None:
                n_unknown += 1
                continue
            errors.append((step, abs(told.seconds / took - 1.0)))
            fixed = session.summary().fixed_seconds
            shares.append((fixed or 0.0) / took)
    early = [error for step, error in errors if step < _FIRST]
    late = [error for step, error in errors if step >= _FIRST]
    yield {
        "n_steps": task["steps"],
        "n_unknown": n_unknown,
        "ooms": " ".join(failed),
        "early_p50": quantile(early, 0.5),
        "early_p95": quantile(early, 0.95),
        "error_p50": quantile(late, 0.5),
        "error_p95": quantile(late, 0.95),
        "error_max": max(late),
        "fixed_share": statistics.median(shares),
        "ask_seconds": statistics.median(asked),
    }


def main() -> int:
    """Run what is asked for, print the rows and write them down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale.forecast")
    add = parser.add_argument
    add("--workloads", nargs="+", default=list(_PLACES), choices=_PLACES)
    add("--card", default="h100")
    add("--steps", type=int, default=80)
    add("--seed", type=int, default=1)
    add("--out", default="docs/results/scale/forecast.csv")
    options = parser.parse_args()
    settings = RunSettings(seed=options.seed, threads=1, device="sim")
    file = RowsFile(Path(options.out), ForecastRow)
    for name in options.workloads:
        gib = _PLACES[name]
        task = {"workload": name, "gib": gib, "card": options.card, "device": "sim"}
        task |= {"steps": options.steps, "seed": options.seed}
        (told,) = run_child("benchmarks.scale.forecast", task, settings.threads)
        where = {"workload": name, "gib": gib, "card": options.card}
        row = ForecastRow(**where, **told, **settings.provenance())
        file.append([row])
        sys.stdout.write(
            f"{name:18} {gib:3} GiB: off by {row.error_p50:.2%} in the median, "
            f"{row.error_p95:.2%} of 1 in 20, {row.error_max:.2%} at most; "
            f"fixed {row.fixed_share:.1%}; asked in {1e3 * row.ask_seconds:.1f} ms; "
            f"out of memory: {row.ooms or 'none'}\n"
        )
        sys.stdout.flush()
    file.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
