"""Does this device do what the library relies on, and does the library keep its word?

A first look at a device: one table, of what was expected, what was seen, and a verdict.
Each group of lines runs in a process of its own with a time limit, and each line is
appended to the CSV file as it comes: nothing that fails, hangs or crashes takes another
line with it.

    python -m mimose.bench.proofs check --device cuda --out runs/check
    python -m mimose.bench.proofs check --device sim --groups meter waits
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from mimose.bench.check.groups import GROUPS, Group, run_group
from mimose.bench.check.line import MISSED, Line, impossible, judged
from mimose.bench.proofs.child import ChildFailedError, run_child
from mimose.bench.proofs.common import Answer, Bar, Row, Settings, progress
from mimose.usage import positive

QUESTION = "Does this device do what the library relies on?"

_LEAST_SECONDS = 5.0
"""With less than this left no group is begun."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckRow(Row):
    """One line."""

    group: str
    what: str
    expected: str
    seen: str
    verdict: str
    seconds: float
    """From the begin of its group, process included."""

    def __str__(self) -> str:
        """Write it for who waits."""
        expected = f" (expected {self.expected})" if self.expected else ""
        return f"{self.what}: {self.seen}{expected}: {self.verdict}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this proof's own options."""
    parser.add_argument("--device", default="cuda", help="cuda, or sim to try it")
    parser.add_argument("--limit-seconds", type=positive, default=540.0, help="in all")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Run every group, and append each line to the file as it comes."""
    ends = time.monotonic() + options.limit_seconds
    write = _start_file(settings.out / "check.csv")
    rows = []
    for name in options.groups:
        for row in _rows(settings, GROUPS[name], ends):
            rows.append(row)
            write(row)
            progress(str(row))
    return Answer(rows=rows, table=_table(rows), bars=_bars(rows), is_text=True)


def _rows(settings: Settings, group: Group, ends: float) -> Iterator[CheckRow]:
    began = time.monotonic()
    for line in _lines(settings, group, ends - began):
        yield CheckRow(
            group=group.name,
            **asdict(line),
            seconds=round(time.monotonic() - began, 1),
            **settings.provenance(),
        )


def _lines(settings: Settings, group: Group, left_seconds: float) -> Iterator[Line]:
    """Run a group in a process; how it ended is a line where it did not end well."""
    if left_seconds < _LEAST_SECONDS:
        yield impossible(f"all of {group.name}", "no time was left for it")
        return
    limit_seconds = min(group.limit_seconds, left_seconds)
    task = {"group": group.name, "device": settings.device}
    try:
        for said in run_child(
            "check",
            task,
            settings.threads,
            environment=group.environment,
            limit_seconds=limit_seconds,
        ):
            yield Line(**said)
    except ChildFailedError as error:
        seen = str(error).splitlines()
        yield judged(
            f"all of {group.name}", "ends", f"{seen[0]} {seen[-1]}", holds=False
        )


def _start_file(path: Path) -> Callable[[CheckRow], None]:
    """Begin a CSV file, and return what appends a row to it."""
    names = [column.name for column in fields(CheckRow)]
    shared = [column.name for column in fields(Row)]
    names = [*(name for name in names if name not in shared), *shared]
    path.parent.mkdir(parents=True, exist_ok=True)
    _append(path, names, None)

    return lambda row: _append(path, names, asdict(row))


def _append(path: Path, names: Sequence[str], row: Mapping[str, Any] | None) -> None:
    with path.open("w" if row is None else "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        if row is None:
            writer.writeheader()
        else:
            writer.writerow(row)


def _table(rows: Sequence[CheckRow]) -> list[dict[str, object]]:
    names = ("group", "what", "expected", "seen", "verdict")
    return [{name: getattr(row, name) for name in names} for row in rows]


def _bars(rows: Sequence[CheckRow]) -> list[Bar]:
    missed = sum(row.verdict == MISSED for row in rows)
    return [Bar(f"lines missed of {len(rows)}", missed, at_most=0)]


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Run one group."""
    device = torch.empty(0, device=task["device"]).device  # its index is told
    for line in run_group(GROUPS[task["group"]], device):
        yield asdict(line)
