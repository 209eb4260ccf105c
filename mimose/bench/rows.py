"""Results as lines of CSV files: dataclasses with their provenance.

None becomes an empty field. Measurements are the first columns, provenance the last.
"""

from __future__ import annotations

import csv
import datetime
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TextIO, TypeVar

from mimose.bench.machine import describe_machine, load_average


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The provenance of a row; each subclass adds its measurements."""

    seed: int
    threads: int
    load_average: float
    """The machine's load over the last minute, when the row arrived."""
    date: str
    """When the run began, ISO 8601."""
    device: str
    python: str
    torch: str
    transformers: str
    mimose: str


_Kind = TypeVar("_Kind", bound=Row)


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """The settings of every run."""

    seed: int = 0
    """Determines weights, shapes and batches."""
    threads: int = 2
    """Threads of torch's operators in each process."""
    device: str = "cpu"
    date: str = field(default_factory=_now)
    """When the run began."""

    def provenance(self) -> dict[str, Any]:
        """Return the columns of `Row`."""
        return {
            "seed": self.seed,
            "threads": self.threads,
            "load_average": load_average(),
            "date": self.date,
            **describe_machine(self.device),
        }


class RowsFile:
    """A file to which rows are appended.

    Args:
        path: The file; its folder is made.
        kind: The rows' dataclass.
    """

    def __init__(self, path: Path, kind: type[Row]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("w", newline="", encoding="utf-8")
        columns = [column.name for column in _columns(kind)]
        self._writer = csv.DictWriter(self._file, columns, lineterminator="\n")
        self._writer.writeheader()
        self._file.flush()

    def append(self, rows: Iterable[Row]) -> None:
        """Write rows at once."""
        self._writer.writerows(asdict(row) for row in rows)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def write(path: Path, kind: type[_Kind], rows: Iterable[_Kind]) -> None:
    """Write rows to a file; its folder is made."""
    file = RowsFile(path, kind)
    file.append(rows)
    file.close()


def read(path: Path, kind: type[_Kind]) -> list[_Kind]:
    """Read rows, with columns in any order.

    Newer columns, which have a default, may be missing.

    Raises:
        ValueError: The columns are not those of the dataclass, or a line is cut short.
    """
    known = {column.name: column for column in _columns(kind)}
    needed = {name for name, column in known.items() if column.default is MISSING}
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        there = set(reader.fieldnames or ())
        if not needed <= there <= known.keys():
            msg = f"{path} has columns {reader.fieldnames}, expected {list(known)}"
            raise ValueError(msg)
        rows = []
        for number, line in enumerate(reader, 2):
            if None in line.values():
                msg = f"{path}, line {number}: it is cut short"
                raise ValueError(msg)
            values = {n: _READERS[str(known[n].type)](text) for n, text in line.items()}
            rows.append(kind(**values))
        return rows


def _columns(kind: type[Row]) -> list[Field[Any]]:
    """Return a dataclass's fields, those of `Row` last."""
    shared = {column.name for column in fields(Row)}
    return sorted(fields(kind), key=lambda column: column.name in shared)


def _optional(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text == "" else read(text)


_READERS: Mapping[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": lambda text: text == "True",
    "int | None": _optional(int),
    "float | None": _optional(float),
}
