"""Are forecasts of a step's seconds right?

Models of `benchmarks.scale` train on batches of random rows and lengths, the largest of
which just fit. Before each step the session forecasts its seconds, with the optimizer's
share; the user's clock of the hollow card measures them. Errors are relative to a step.

    python -m benchmarks.proofs forecast
"""

from __future__ import annotations

import random
import statistics
import time

import torch

from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Options, Rows, Settings, Task
from benchmarks.proofs.numbers import quantile
from benchmarks.scale.models import WORKLOADS
from benchmarks.scale.run import BUDGET, GIB, build
from mimose.bench.device import SIM

_PLACES = {"bert-large": 16, "t5-large": 24, "llama-8b-lora": 40}
"""Workloads, and the GiB of their cards."""
QUESTION = "Are a step's seconds as they were forecast?"
DEFAULTS = {"seed": 1, "threads": 1, "device": SIM}
OPTIONS = (
    common.some("--workloads", _PLACES),
    ("--card", {"default": "h100", "help": "h200, h100, a100, rtx4090 or a10"}),
    common.count("--steps", 80, "a workload"),
)
_ROWS, *_LENGTHS = "input_ids.0", "input_ids.1", "labels.1"
_UNKNOWN, _FIRST = 8, 24
"""Steps of which nothing is known, and those in which rows grow to what fits; behind
them rows are drawn."""


def ask(settings: Settings, options: Options) -> Answer:
    """Train every workload, and judge nothing: how near is near enough is not said."""
    answer = Answer(path=settings.out / "forecast.csv")
    for name in options.workloads:
        task = {"workload": name, "gib": _PLACES[name], "card": options.card}
        (told,) = common.measured("forecast", settings, steps=options.steps, **task)
        answer.add(name, [told], common.short(told, "workload"), (), head="workload")
    return answer


def work(task: Task) -> Rows:
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
    with run.attached(budget) as session:
        for step, sizes in enumerate(workload.sizes(task["steps"], task["seed"])):
            if step < _UNKNOWN:
                run.train(sizes, 2 + step)
                continue
            shape = dict(zip(_LENGTHS, sizes, strict=False))
            most = max(2, session.largest(shape, dim=_ROWS))
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
            took = run.card.clock().since(before).user
            if told.seconds is None:
                n_unknown += 1
                continue
            errors.append((step, abs(told.seconds / took - 1.0)))
            fixed = session.summary().fixed_seconds
            shares.append((fixed or 0.0) / took)
    early = [error for step, error in errors if step < _FIRST]
    late = [error for step, error in errors if step >= _FIRST]
    yield {
        **{name: task[name] for name in ("workload", "gib", "card")},
        "n_unknown": n_unknown,  # behind the first, that no seconds were predicted for
        "ooms": " ".join(failed),  # which step, its shape, and whether it was to fit
        "early_p50": quantile(early, 0.5),  # until rows are drawn
        "early_p95": quantile(early, 0.95),
        "error_p50": quantile(late, 0.5),
        "error_p95": quantile(late, 0.95),
        "error_max": max(late),
        "fixed_share": statistics.median(shares),  # of a step's seconds
        "ask_seconds": statistics.median(asked),  # of the host
    }
