"""Shared parts of the proofs: rows with their provenance, bars, and JSON answers."""

from __future__ import annotations

import argparse
import ast
import csv
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from mimose.bench.child import RunFailedError, run_child
from mimose.bench.rows import Row as Provenance
from mimose.bench.rows import RunSettings
from mimose.bench.usage import at_least_one
from mimose.exceptions import first_line
from mimose.report import text

if TYPE_CHECKING:
    from mimose.records import StepRecord

AMPLE_BYTES = 2**40
"""A budget that is never used up."""
_TOLD_EVERY = 100
NO_TIME, _LEAST_SECONDS = "left out: no time was left", 10.0
"""What a row says of a process that was not begun, with less than so many seconds."""

Row: TypeAlias = dict[str, Any]
"""A row: what was measured by name, then where and with what, as `Provenance` says."""
Task: TypeAlias = Mapping[str, Any]
"""What a child is given: the settings, and what a proof adds."""
Rows: TypeAlias = Iterator[Mapping[str, Any]]
"""What a child's ``work`` yields."""
Options: TypeAlias = argparse.Namespace
"""The values of a proof's `OPTIONS`."""
Option: TypeAlias = tuple[str, dict[str, Any]]
"""A command-line option: its name, and arguments of argparse."""


def device(default: str) -> Option:
    """Return the option that says where to train."""
    return "--device", {"default": default, "help": "such as cuda"}


def count(name: str, default: int, what: str = "") -> Option:
    """Return an option for a number of things; `what` says of which."""
    return name, {"type": at_least_one, "default": default, "help": what}


def flag(name: str, what: str) -> Option:
    """Return an option that is there or is not."""
    return name, {"action": "store_true", "help": what}


def some(name: str, known: Iterable[str]) -> Option:
    """Return an option for some of what is known; all by default."""
    return name, {"nargs": "+", "choices": list(known), "default": list(known)}


RESUME = flag("--resume", "keep the rows that are there")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings(RunSettings):
    """What every proof takes."""

    models: tuple[str, ...] = ()
    """Names of the zoo's architectures; empty for the proof's own choice."""
    out: Path = Path("docs/results/cpu")
    """The folder for the CSV file."""


def said_by(proof: str, settings: Settings, /, **task: Any) -> Iterator[dict[str, Any]]:
    """Yield what a proof's ``work`` yields, in a separate process.

    Args:
        proof: The proof.
        settings: The settings.
        task: What ``work`` is given, besides these; ``options`` are those of `Child`.

    Raises:
        RunFailedError: It ended with an error, or took too long.
    """
    options = task.pop("options", {})
    whole = {"seed": settings.seed, "device": settings.device, **task}
    return run_child(f"{__package__}.{proof}", whole, settings.threads, **options)


def within(
    proof: str, settings: Settings, ends: float, limit: float, /, **task: Any
) -> Iterator[Row]:
    """Yield what `said_by` does as rows, within a limit of seconds.

    What did not end well, or could not begin, has a last row that says ``why``.

    Args:
        proof: The proof.
        settings: The settings.
        ends: When all has to end, on the monotonic clock.
        limit: Seconds that this one may take.
        task: As for `said_by`, and the ``environment`` of the process.
    """
    limit = min(limit, ends - time.monotonic())
    options = {"environment": task.pop("environment"), "limit_seconds": limit}
    try:
        if limit < _LEAST_SECONDS:
            raise RunFailedError(NO_TIME)
        for said in said_by(proof, settings, options=options, **task):
            yield {**said, **settings.provenance()}
    except RunFailedError as error:
        yield {"why": first_line(error), **settings.provenance()}


def measured(proof: str, settings: Settings, /, **task: Any) -> list[Row]:
    """Return what `said_by` yields as rows; tell who waits of every hundredth."""
    rows: list[Row] = []
    for said in said_by(proof, settings, **task):
        rows.append({**said, **settings.provenance()})
        if len(rows) % _TOLD_EVERY == 0:
            progress(f"{proof}: {len(rows)} rows")
    return rows


def recorded(record: StepRecord, *columns: str) -> dict[str, Any]:
    """Return a step record's attributes as columns of a row.

    Args:
        record: Of one forward.
        columns: Their names; ``kept`` and ``layer_calls`` count its layers' calls.
    """
    n = len(record.actions)
    counted = {"layer_calls": n, "kept": n - record.n_recomputed}
    return {name: counted.get(name, getattr(record, name, None)) for name in columns}


def short(row: Row, *others: str) -> Row:
    """Return a row without its provenance, and without these columns."""
    left_out = {column.name for column in fields(Provenance)}.union(others)
    return {name: value for name, value in row.items() if name not in left_out}


@dataclass(frozen=True, slots=True)
class Bar:
    """A promise in numbers, set before the measurement."""

    what: str
    value: float | None
    """The measured value; None if nothing was measured, then the bar is missed."""
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
        is_upper = self.at_most < math.inf
        sign, limit = ("≤", self.at_most) if is_upper else ("≥", self.at_least)
        form = self._form
        return f"{verdict:7} {self.what}: {form(self.value)} (bar {sign} {form(limit)})"

    def told(self) -> dict[str, object]:
        """Return it for JSON, without the side on which it is open."""
        values = {**asdict(self), "holds": self.holds}
        return {name: v for name, v in values.items() if v not in (math.inf, -math.inf)}

    def _form(self, value: float | None) -> str:
        if value is None:
            return "not measured"
        return f"{value:.2%}" if self.is_share else f"{value:g}"


@dataclass(kw_only=True, slots=True)
class Answer:
    """What a proof found."""

    rows: list[Row] = field(default_factory=list)
    """All that was measured."""
    table: list[Mapping[str, object]] = field(default_factory=list)
    """The rows in short, for people and for the JSON line."""
    bars: list[Bar] = field(default_factory=list)
    """The promises."""
    notes: list[str] = field(default_factory=list)
    """What a reader should know besides."""
    path: Path | None = None
    """Where rows are kept at once, before all are there; None for the proof's name."""

    @classmethod
    def begun(cls, path: Path, *, resume: bool) -> Answer:
        """Return one whose rows are kept at once, behind those that are there."""
        return cls(path=path, rows=read(path) if resume and path.exists() else [])

    def add(
        self,
        name: str,
        rows: Iterable[Row],
        line: Mapping[str, object],
        bars: Iterable[Bar],
        *,
        head: str = "model",
    ) -> None:
        """Add what was found of one model, or another `head`, and tell who waits."""
        self.rows.extend(rows)
        self.table.append({head: name, **line})
        self.bars.extend(replace(bar, what=f"{name}: {bar.what}") for bar in bars)
        if self.path is not None:
            write(self.path, self.rows)
        progress(f"{name}: done")


Verdict: TypeAlias = tuple[Mapping[str, object], list[Bar]]
"""A line of the table, and the bars."""


def progress(text: str) -> None:
    """Show the progress on standard error, apart from the answer."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def publish(name: str, answer: Answer, folder: Path) -> None:
    """Write the CSV file, print the table and the bars; JSON is the last line."""
    path = answer.path or folder / f"{name}.csv"
    write(path, answer.rows)
    lines = [*format_table(answer.table), *answer.notes, *map(str, answer.bars)]
    document = {
        "proof": name,
        "holds": all(bar.holds for bar in answer.bars),
        "bars": [bar.told() for bar in answer.bars],
        "table": [dict(line) for line in answer.table],
        "notes": list(answer.notes),
        "rows": str(path),
    }
    told = json.dumps(document, default=lambda number: number.item())  # numpy's
    sys.stdout.write("\n".join([*lines, told]) + "\n")


def read(path: Path) -> list[Row]:
    """Return the rows of a CSV file that `write` made."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            {name: _value(text) for name, text in row.items()}
            for row in csv.DictReader(file)
        ]


def _value(text: str) -> object:
    """Return what a cell was made of: None, a number, a truth value, or text."""
    try:
        return ast.literal_eval(text) if text else None
    except (ValueError, SyntaxError):
        return text


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as CSV: what was measured first, where it was measured last.

    A file that is there is replaced at once, so that a process that ends in between
    loses no row.
    """
    where = [column.name for column in fields(Provenance)]
    names = dict.fromkeys(name for row in rows for name in short(row))
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    with new.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*names, *where], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    new.replace(path)


def format_table(table: Sequence[Mapping[str, object]]) -> list[str]:
    """Lay a table out in lines, in narrow columns."""
    if not table:
        return []
    head = list(dict.fromkeys(title for line in table for title in line))
    cells = [[_cell(line.get(title)) for title in head] for line in table]
    return text.table([head, *cells])


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
