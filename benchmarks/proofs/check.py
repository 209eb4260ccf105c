"""Does this device do what the library relies on, and does the library work on it?

It prints one table with what was expected, what was seen, and a verdict. Each group of
lines runs in a separate process with a time limit, and each line is appended to the CSV
file at once. So a group that fails, hangs or crashes does not affect others.

    python -m benchmarks.proofs check --device cuda --out runs/check
    python -m benchmarks.proofs check --device sim --groups waits
"""

from __future__ import annotations

import time
from dataclasses import asdict, fields
from typing import Any

import torch

from benchmarks.check import GROUPS, MISSED, Line, impossible, judged, run_group
from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Options, Row, Rows, Settings, Task
from mimose.bench.usage import positive

QUESTION = "Does this device do what the library relies on?"
OPTIONS = (
    ("--device", {"default": "cuda", "help": "cuda, or sim to try it"}),
    ("--limit-seconds", {"type": positive, "default": 540.0, "help": "in all"}),
    common.some("--groups", GROUPS),
)


def ask(settings: Settings, options: Options) -> Answer:
    """Run every group, and keep each line at once."""
    ends = time.monotonic() + options.limit_seconds
    answer = Answer(path=settings.out / "check.csv")
    for name in options.groups:
        began, group = time.monotonic(), GROUPS[name]
        how: Any = {"environment": group.environment, "group": name}
        for row in common.within("check", settings, ends, group.limit_seconds, **how):
            line = _line(name, row)
            told = asdict(line)
            seconds = round(time.monotonic() - began, 1)  # the process's begin included
            row = {"group": name, **told, "seconds": seconds, **settings.provenance()}
            answer.add(name, [row], told, (), head="group")
            common.progress(f"{line.what}: {line.seen}: {line.verdict}")
    missed = sum(line["verdict"] == MISSED for line in answer.table)
    answer.bars.append(Bar(f"lines missed of {len(answer.rows)}", missed, at_most=0))
    return answer


def _line(group: str, row: Row) -> Line:
    """Return a child's line, or how it ended."""
    if why := row.get("why"):
        what = f"all of {group}"
        if why == common.NO_TIME:
            return impossible(what, why)
        return judged(what, "ends", why, holds=False)
    return Line(**{each.name: row[each.name] for each in fields(Line)})


# ------------------------------------------------------------------ in the child


def work(task: Task) -> Rows:
    """Run one group."""
    device = torch.empty(0, device=task["device"]).device  # its index is reported
    for line in run_group(task["group"], device):
        yield asdict(line)
