"""Is the user's clock of a hollow card that of a real one?

transformers' checkpointing trains workloads of `benchmarks.scale` on a hollow H200. The
rows of a real one, each in a separate process (``docs/results/nvidia-h200/scale.csv``),
have the milliseconds that a user waited. One price for each operator is fitted to three
of them. Two are left out of the fit, and no row of mimose is in it.

    python -m benchmarks.proofs clock
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Options, Row, Rows, Settings, Task
from benchmarks.proofs.numbers import mean
from benchmarks.scale.models import WORKLOADS
from benchmarks.scale.run import build
from mimose.bench.device import SIM
from mimose.bench.rehearse.host import CALLS, n_regions
from mimose.sim.hollow import CARDS, HOST

QUESTION = "Does the hollow card's clock show what a user waits for?"
DEFAULTS = {"seed": 1, "threads": 1, "device": SIM}
OPTIONS = (common.count("--steps", 60, "a workload"),)
_FITTED, _LEFT_OUT = (
    ("bert-large", "llama-8b-lora", "vit-huge"),
    ("llama-1b", "t5-large"),
)
_MEASURED = Path("docs/results/nvidia-h200/scale.csv")
_WARM = 10
_NEAR = 0.25


def ask(settings: Settings, options: Options) -> Answer:
    """Count what each workload issues, and fit the price."""
    answer = Answer(path=settings.out / "clock.csv")
    seen = seen_of("seconds")
    rows = []
    for name in (*_FITTED, *_LEFT_OUT):
        task = {"workload": name, "gib": WORKLOADS[name].cards[-1], "card": "h200"}
        (row,) = common.measured("clock", settings, steps=options.steps, **task)
        rows.append(row | {"measured_seconds": seen[name]})
    price = _price([row for row in rows if row["workload"] in _FITTED])
    for row in rows:
        row["error"] = row["user_seconds"] / row["measured_seconds"] - 1.0
        line = {**common.short(row, "workload"), "fit": row["workload"] in _FITTED}
        answer.add(row["workload"], [row], line, (), head="workload")
    off = max(abs(row["error"]) for row in rows if row["workload"] in _LEFT_OUT)
    answer.bars += [
        Bar("price of an operator, in the fit over the clock's, off 1",
            abs(price / HOST.operator - 1.0), 0.05, is_share=True),
        Bar("the clock off a row that was left out", off, _NEAR, is_share=True),
    ]  # fmt: skip
    return answer


def seen_of(column: str) -> dict[str, float]:
    """Return what checkpointing took on the H200, in separate processes."""
    with _MEASURED.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["strategy"] == "hf"]
    own = [r for r in rows if int(r["n_steps"]) >= 50 and r["expandable"] == "False"]
    return {row["workload"]: float(row[column]) for row in own}


def _price(rows: list[Row]) -> float:
    """Return the price of an operator that fits best, the errors being relative."""
    work = np.array([row["n_operators"] for row in rows])
    rest = np.array([row["fixed_seconds"] for row in rows])
    seen = np.array([row["measured_seconds"] for row in rows])
    share, target = work / seen, (seen - rest) / seen
    return float(share @ target / (share @ share))


def work(task: Task) -> Rows:
    """Train a workload; yield what it issued, and the clock's seconds.

    Args:
        task: As for `benchmarks.scale.run.build`, and ``workload`` and ``steps``.
    """
    workload = WORKLOADS[task["workload"]]
    run = build(workload, task)
    passed = []
    with run.checkpointed(True):
        for sizes in workload.sizes(task["steps"], task["seed"]):
            before = run.card.clock()
            run.train(sizes)
            passed.append(run.card.clock().since(before))
    late = passed[_WARM:]
    means = {
        name: mean(getattr(c, name) for c in late) or 0.0 for name in late[0]._fields
    }
    python = n_regions(run.model) * CALLS["checkpoint"]
    plans = means["n_attention_plans"] * CARDS[task["card"]].attention_plan
    yield {
        **{name: task[name] for name in ("workload", "gib", "card")},
        "device_seconds": means["kernels"] + means["allocator"],
        "user_seconds": means["user"],
        "n_operators": means["n_kernels"] - means["n_listed"] + means["n_views"],
        "n_attention_plans": means["n_attention_plans"],
        "fixed_seconds": python + means["n_listed"] * HOST.listed + plans,
    }
