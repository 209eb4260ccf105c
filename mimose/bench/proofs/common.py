"""What the proofs share: rows with their provenance, bars, and an answer in numbers."""

from __future__ import annotations

import csv
import datetime
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from mimose.bench.machine import describe_machine, load_average

MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Where and with what a row was measured; each proof adds what it measured."""

    seed: int
    threads: int
    load_average: float
    """Of the machine over the last minute, when the row arrived."""
    date: str
    """When the proof began, ISO 8601."""
    device: str
    python: str
    torch: str
    transformers: str
    mimose: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What every proof can be told."""

    seed: int = 0
    """Settles weights, shapes and batches."""

    threads: int = 2
    """For torch's operators."""

    device: str = "cpu"
    """Where to train, in the proofs that can train elsewhere."""

    models: tuple[str, ...] = ()
    """Names of the zoo's architectures; empty for the proof's own choice."""

    out: Path = Path("docs/results/cpu")
    """The folder for the CSV file."""

    date: str = field(default_factory=lambda: _now())
    """When the proof began."""

    def provenance(self) -> dict[str, Any]:
        """Return the columns of `Row`."""
        return {
            "seed": self.seed,
            "threads": self.threads,
            "load_average": load_average(),
            "date": self.date,
            **describe_machine(self.device),
        }


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True)
class Bar:
    """A promise in numbers, set before the measurement."""

    what: str
    value: float | None
    """None where nothing was measured; the bar is missed then."""
    at_most: float = math.inf
    at_least: float = -math.inf
    is_share: bool = False
    """Whether people read it in per cent."""

    @property
    def holds(self) -> bool:
        """Whether the measurement keeps the promise."""
        return self.value is not None and self.at_least <= self.value <= self.at_most

    def __str__(self) -> str:
        """Write the verdict as a line."""
        verdict = "holds" if self.holds else "MISSED"
        sign, limit = (
            ("≤", self.at_most)
            if self.at_most < math.inf
            else (
                "≥",
                self.at_least,
            )
        )
        form = self._form
        return f"{verdict:7} {self.what}: {form(self.value)} (bar {sign} {form(limit)})"

    def _form(self, value: float | None) -> str:
        if value is None:
            return "not measured"
        return f"{value:.2%}" if self.is_share else f"{value:g}"


@dataclass(kw_only=True, slots=True)
class Answer:
    """What a proof found."""

    rows: Sequence[Row]
    """All that was measured."""
    table: Sequence[Mapping[str, object]]
    """The rows in short, for people and for the JSON line."""
    bars: Sequence[Bar]
    """The promises."""
    notes: Sequence[str] = ()
    """What a reader should know besides."""
    is_text: bool = False
    """Whether the table's cells are words, and begin at the left."""


def quantile(values: Iterable[float], share: float) -> float | None:
    """Return the smallest value that `share` of all do not exceed; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def mean(values: Iterable[float]) -> float | None:
    """Return the mean, None of nothing."""
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else None


def worst(values: Iterable[float]) -> float | None:
    """Return the largest value, None of nothing."""
    return max(values, default=None)


def percent(share: float | None, digits: int = 2) -> str:
    """Write a share for people."""
    return "" if share is None else f"{share:.{digits}%}"


def mebibytes(n_bytes: float | None) -> str:
    """Write bytes for people."""
    return "" if n_bytes is None else f"{n_bytes / MIB:.1f}"


def progress(text: str) -> None:
    """Tell who waits how far it is; on the error output, apart from the answer."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def publish(name: str, answer: Answer, folder: Path) -> None:
    """Write the CSV file, print the table and the bars; JSON is the last line."""
    path = folder / f"{name}.csv"
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(path, answer.rows)
    table = format_table(answer.table, is_text=answer.is_text)
    lines = [*table, *answer.notes, *map(str, answer.bars)]
    document = {
        "proof": name,
        "holds": all(bar.holds for bar in answer.bars),
        "bars": [{**_finite(asdict(bar)), "holds": bar.holds} for bar in answer.bars],
        "table": [dict(line) for line in answer.table],
        "notes": list(answer.notes),
        "rows": str(path),
    }
    sys.stdout.write("\n".join([*lines, json.dumps(document)]) + "\n")


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows to a CSV file, what was measured first; None is an empty field."""
    shared = [column.name for column in fields(Row)]
    own = [c.name for c in fields(rows[0]) if c.name not in shared] if rows else []
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*own, *shared], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def format_table(
    table: Sequence[Mapping[str, object]], *, is_text: bool = False
) -> list[str]:
    """Lay a table out in lines, columns as wide as they need to be.

    Args:
        table: Its lines, cells by the head of their column.
        is_text: Whether cells begin at the left of their column; else they end at its
            right.
    """
    if not table:
        return []
    head = list(table[0])
    cells = [head, *([_cell(line.get(title)) for title in head] for line in table)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    put = str.ljust if is_text else str.rjust
    return ["  ".join(map(put, row, widths)).rstrip() for row in cells]


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the sides on which a bar is open."""
    return {
        name: value
        for name, value in values.items()
        if not (isinstance(value, float) and math.isinf(value))
    }
