"""Does this device do what the library relies on, and does the library work on it?

It prints one table with what was expected, what was seen, and a verdict. Each group of
lines runs in a separate process with a time limit, and each line is appended to the CSV
file at once. So a group that fails, hangs or crashes does not affect others.

    python -m benchmarks.proofs check --device cuda --out runs/check
    python -m benchmarks.proofs check --device sim --groups meter waits
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict

import torch

from benchmarks.check import GROUPS, MISSED, Line, impossible, judged, run_group
from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Options, Rows, Settings, Task
from mimose.bench.child import RunFailedError, run_child
from mimose.exceptions import first_line
from mimose.usage import positive

QUESTION = "Does this device do what the library relies on?"
OPTIONS = (
    ("--device", {"default": "cuda", "help": "cuda, or sim to try it"}),
    ("--limit-seconds", {"type": positive, "default": 540.0, "help": "in all"}),
    common.some("--groups", GROUPS),
)

_LEAST_SECONDS = 5.0
"""With less than this left no group is begun."""


def ask(settings: Settings, options: Options) -> Answer:
    """Run every group, and keep each line at once."""
    ends = time.monotonic() + options.limit_seconds
    answer = Answer(path=settings.out / "check.csv")
    for group in options.groups:
        began = time.monotonic()
        for line in lines_of(settings, group, ends - began):
            told = asdict(line)
            seconds = round(time.monotonic() - began, 1)  # the process's begin included
            row = {"group": group, **told, "seconds": seconds, **settings.provenance()}
            answer.add(group, [row], told, (), head="group")
            common.progress(f"{line.what}: {line.seen}: {line.verdict}")
    missed = sum(line["verdict"] == MISSED for line in answer.table)
    answer.bars.append(Bar(f"lines missed of {len(answer.rows)}", missed, at_most=0))
    return answer


def lines_of(settings: Settings, name: str, left_seconds: float) -> Iterator[Line]:
    """Run a group in a process; how it ended is a line where it did not end well."""
    if left_seconds < _LEAST_SECONDS:
        yield impossible(f"all of {name}", "no time was left for it")
        return
    group = GROUPS[name]
    limit_seconds = min(group.limit_seconds, left_seconds)
    task = {"group": name, "device": settings.device}
    options = {"environment": group.environment, "limit_seconds": limit_seconds}
    try:
        for said in run_child(__name__, task, settings.threads, **options):
            yield Line(**said)
    except RunFailedError as error:
        yield judged(f"all of {name}", "ends", first_line(error), holds=False)


# ------------------------------------------------------------------ in the child


def work(task: Task) -> Rows:
    """Run one group."""
    device = torch.empty(0, device=task["device"]).device  # its index is reported
    for line in run_group(task["group"], device):
        yield asdict(line)
