"""Dataclasses as lines of a CSV file; None becomes an empty field."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Row = TypeVar("_Row", bound="DataclassInstance")


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


class RowsFile:
    """A file that grows by some rows at a time.

    Args:
        path: The file; its folder is made.
        kind: The rows' dataclass.
        goes_on: Whether it is there already, and is not begun anew.
    """

    def __init__(self, path: Path, kind: type[Any], *, goes_on: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open(
            "a" if goes_on else "w", newline="", encoding="utf-8"
        )
        self._writer = csv.DictWriter(self._file, [f.name for f in fields(kind)])
        if not goes_on:
            self._writer.writeheader()

    def append(self, rows: Iterable[Any]) -> None:
        """Write rows down at once."""
        self._writer.writerows(asdict(row) for row in rows)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def write(path: Path, kind: type[_Row], rows: Iterable[_Row]) -> None:
    """Write rows to a file.

    Args:
        path: The file.
        kind: The rows' dataclass.
        rows: The rows.
    """
    file = RowsFile(path, kind)
    file.append(rows)
    file.close()


def read(path: Path, kind: type[_Row]) -> list[_Row]:
    """Read what was written.

    Args:
        path: The file.
        kind: The rows' dataclass.

    Raises:
        ValueError: The columns are not those of the dataclass, or a line is cut short.
    """
    known = fields(kind)
    columns = [field.name for field in known]
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if list(reader.fieldnames or ()) != columns:
            msg = f"{path} has columns {reader.fieldnames}, expected {columns}"
            raise ValueError(msg)
        rows = []
        for number, line in enumerate(reader, 2):
            if None in line.values():
                msg = f"{path}, line {number}: it is cut short"
                raise ValueError(msg)
            values = {f.name: _READERS[str(f.type)](line[f.name]) for f in known}
            rows.append(kind(**values))
        return rows
