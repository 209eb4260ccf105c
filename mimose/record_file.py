"""Reading the file that `attach(record_to=...)` writes."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

from mimose.exceptions import MimoseError
from mimose.records import AMENDS, PHASES, StepRecord

_KNOWN = frozenset(f.name for f in fields(StepRecord))


_log = logging.getLogger(__name__)

_NUMBERS = (
    "predicted_peak_bytes",
    "observed_peak_bytes",
    "plan_seconds",
    "recomputed_flops",
    "retries",
    "seconds",
    "reserved_peak_bytes",
    "allocated_peak_bytes",
    "alloc_retries",
)


_ALWAYS_NUMBERS = (
    "plan_seconds",
    "recomputed_flops",
    "retries",
    "cache_hit",
    "is_optimal",
)


_ALWAYS_WHOLE = ("step", "budget_bytes", "start_bytes")


_MOST = 2**100
"""A greater number is none that was measured, and a float may not hold it."""
_MOST_SIZE = 2**63


_NEEDED = ("step", "shape", "phase", "actions", "budget_bytes", "start_bytes")


def read_records(path: str | PathLike[str]) -> list[StepRecord]:
    """Read what ``record_to`` wrote, events filled in; fields not known are left out.

    Lines that were not written to their end, as in a run that was killed, are left out
    as well, with a warning.

    Args:
        path: The file.

    Raises:
        OSError: The file cannot be read.
        MimoseError: No line, or a whole one, is a step's record.
    """
    records: list[StepRecord] = []
    plans: dict[tuple[str, ...], tuple[str, ...]] = {}
    n_broken = 0
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                said = json.loads(line)
            except (ValueError, RecursionError):
                n_broken += line.endswith("\n")  # the last may be in the making
                continue
            record = _record(said, f"{path}, line {number}")
            if said.get(AMENDS):
                _amend(records, record)
                continue
            events = record.events or (records[-1].events if records else ())
            actions = plans.setdefault(record.actions, record.actions)
            records.append(replace(record, events=events, actions=actions))
    if n_broken and not records:
        msg = f"{path}, line 1: not a step's record, as attach(record_to=...) writes it"
        raise MimoseError(msg)
    if n_broken:
        _log.warning("mimose: %d broken lines of %s were left out", n_broken, path)
    return records


def _amend(records: list[StepRecord], record: StepRecord) -> None:
    """Put a record in the place of the last of the same step of the same run."""
    for place in range(len(records) - 1, -1, -1):
        there = records[place]
        if _same_step(there) == _same_step(record):
            records[place] = record
            return


def _same_step(record: StepRecord) -> tuple[object, ...]:
    """Return what a step's records have in common, and others' seldom."""
    sizes = tuple(record.shape.items())
    return record.step, record.budget_bytes, record.start_bytes, sizes, record.actions


def _record(said: Any, where: str) -> StepRecord:
    if not isinstance(said, dict) or not _is_sound(said):
        msg = f"{where}: not a step's record, as attach(record_to=...) writes it"
        raise MimoseError(msg)
    known: dict[str, Any] = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in said.items()
        if name in _KNOWN
    }
    known.setdefault("predicted_peak_bytes", None)
    for name in ("actions", "events"):
        known[name] = tuple(known.get(name, ()))
    return StepRecord(**known)


def _is_sound(said: dict[str, Any]) -> bool:
    """Whether what is needed is there, and everything is of its kind."""
    numbers = [said.get(name) for name in _NUMBERS]
    shape = said.get("shape")
    return (
        all(name in said for name in _NEEDED)
        and isinstance(shape, dict)
        and all(_is_whole(size) and size < _MOST_SIZE for size in shape.values())
        and said["phase"] in PHASES
        and all(_are_texts(said.get(name, [])) for name in ("actions", "events"))
        and isinstance(said.get("reason", ""), str)
        and all(
            number is None or isinstance(number, float) or _is_whole(number)
            for number in numbers
        )
        and not any(
            isinstance(number, float) and _MOST <= abs(number) < math.inf
            for number in numbers
        )
        and all(_is_finite(said.get(name, 0)) for name in _ALWAYS_NUMBERS)
        and all(_is_whole(said[name]) for name in _ALWAYS_WHOLE)
        and said["budget_bytes"] > 0
    )


def _are_texts(said: Any) -> bool:
    return isinstance(said, list) and all(isinstance(text, str) for text in said)


def _is_finite(said: Any) -> bool:
    return _is_whole(said) or (isinstance(said, float) and math.isfinite(said))


def _is_whole(said: Any) -> bool:
    return isinstance(said, int) and abs(said) < _MOST
