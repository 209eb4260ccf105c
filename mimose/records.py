"""The records of a session: one for each step, a summary of all, a file of them."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import sys
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from os import PathLike
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeAlias, get_args

from mimose.exceptions import MimoseError
from mimose.planners.actions import EXACT_MENU

_log = logging.getLogger(__name__)

Phase: TypeAlias = Literal["collect", "step_down", "plan", "fallback"]
_MOST_KEPT = 10_000
"""Records kept in memory, of about half a kB each."""
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
PHASES: tuple[Phase, ...] = get_args(Phase)


class Peaks(NamedTuple):
    """The highest readings since a step began; None if not known."""

    level_bytes: int
    reserved_bytes: int | None = None
    allocated_bytes: int | None = None
    n_retries: int | None = None
    """How often the allocator freed its cached blocks at the limit and tried again."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One training forward of the model, with its backward if there was one.

    The session makes a record when the step has ended. A record never changes; if a
    step goes on after all, a new record replaces it. Forwards that run before the same
    backward are one step: their records have the same start and the same peaks.
    """

    step: int
    """The number of this training forward, from 0."""
    shape: Mapping[str, int]
    """The sizes of the batch that vary, by name."""
    phase: Phase
    """`collect` (everything recomputed and measured), `step_down` (the first two plans,
    which check the predictions), `plan`, or `fallback` (everything recomputed, although
    other shapes have plans; see `reason`)."""
    actions: tuple[str, ...]
    """The action of each layer call, in the order in which they ran."""
    budget_bytes: int
    """The budget of this step. It limits `reserved_peak_bytes` on an accelerator, and
    `observed_peak_bytes` elsewhere."""
    start_bytes: int
    """What was held when the forward began: on an accelerator the requested bytes,
    elsewhere the resident set."""
    predicted_peak_bytes: float | None
    """The predicted peak of the plan, counted as `start_bytes`; None if not
    known."""
    observed_peak_bytes: int | None = None
    """The peak from the start of the forward to the end of the backward, counted as
    `start_bytes`. None before the backward has ended, and if it was not read (see
    `reason`)."""
    cache_hit: bool = False
    """Whether the plan existed before the step: in the cache, or made ahead."""
    plan_seconds: float = 0.0
    """From the call of the model until its forward begins: reading the meter and the
    sizes, finding or making the plan, saving what the forward may change, and freeing
    cached blocks if that is needed."""
    recomputed_flops: int = 0
    """FLOPs of the matrix products, convolutions and attention that ran again in the
    backward."""
    retries: int = 0
    """How often the forward ran again after it ran out of memory."""
    reason: str = ""
    """Why the step was not an ordinary one; "" if it was."""
    events: tuple[str, ...] = ()
    """The names of the layer calls (``layer#call``) if they are known. In a file, empty
    if they are those of the line before."""
    seconds: float | None = None
    """From the start of the forward to the end of the backward, measured on the host,
    which may run ahead of an accelerator (`Session.forecast` has the device's seconds).
    None before the backward has ended."""
    reserved_peak_bytes: int | None = None
    """On an accelerator: the most that the allocator had reserved."""
    allocated_peak_bytes: int | None = None
    """On an accelerator: the most that allocated blocks took."""
    alloc_retries: int | None = None
    """On an accelerator: how often the allocator freed its cached blocks at the limit
    and tried again."""
    is_optimal: bool = False
    """Whether the plan is proven to be the cheapest one within the budget."""

    @property
    def highest_bytes(self) -> int | None:
        """The peak that the budget limits: reserved bytes if they are known."""
        reserved = self.reserved_peak_bytes
        return self.observed_peak_bytes if reserved is None else reserved

    @property
    def predicted_growth_bytes(self) -> float | None:
        """The predicted peak minus the start, in bytes."""
        if self.predicted_peak_bytes is None:
            return None
        return self.predicted_peak_bytes - self.start_bytes

    @property
    def observed_growth_bytes(self) -> int | None:
        """The observed peak minus the start, in bytes."""
        if self.observed_peak_bytes is None:
            return None
        return self.observed_peak_bytes - self.start_bytes

    @property
    def prediction_error(self) -> float | None:
        """Observed growth divided by predicted growth, minus 1; None if not known."""
        observed, predicted = self.observed_growth_bytes, self.predicted_growth_bytes
        if observed is None or not predicted:
            return None
        return observed / predicted - 1.0

    @property
    def is_over(self) -> bool:
        """Whether the peak that the budget limits was over it."""
        highest = self.highest_bytes
        return highest is not None and highest > self.budget_bytes

    @property
    def budget_use(self) -> float | None:
        """The peak that the budget limits, as a share of the budget."""
        highest = self.highest_bytes
        return None if highest is None else highest / self.budget_bytes

    @property
    def n_recomputed(self) -> int:
        """How many layer calls ran under another action than keep."""
        return len(self.actions) - self.actions.count(EXACT_MENU.first)


class HostUse(NamedTuple):
    """How much of the host's memory a session used."""

    budget_bytes: int
    """`host_budget` in bytes."""
    peak_bytes: int
    """The most that tensors held at once."""
    pinned_peak_bytes: int
    """The most that was pinned at once, with the memory that torch keeps for reuse; 0
    if nothing is pinned."""
    n_refused: int
    """How many tensors did not fit into the host budget and stayed on the device."""


class AgreementUse(NamedTuple):
    """What ranks that agree have exchanged, as this rank saw it."""

    n_ranks: int
    n_exchanges: int
    seconds: float
    """The time of all exchanges, with the wait for other ranks."""
    n_changed: int
    """Forwards that ran another plan than this rank alone would have run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A session in numbers: `Session.summary`."""

    steps: int
    """Training forwards of the model."""
    phases: Mapping[str, int]
    """The number of steps in each phase."""
    steps_over: int
    """Steps whose peak was over the budget."""
    budget_bytes: int
    """The present budget."""
    budget_range: tuple[int, int]
    """The smallest and the largest budget so far."""
    peak_bytes: int
    """The highest reading since the session began, with optimizer steps."""
    layers: int
    """Layers planned for."""
    shapes: int
    """Distinct shapes in the recorded steps."""
    cache_hits: int
    """Steps whose plan was in the cache."""
    cache_misses: int
    """Steps whose plan was made for them."""
    margin: float
    """The safety margin, as a share of the predicted growth."""
    error_p50: float | None
    """The median of |observed − predicted| growth, as a share of the predicted growth,
    over the recorded steps in phase `plan`; None without such steps."""
    error_p99: float | None
    """The 99th percentile of the same."""
    recomputed_flops: int
    """The FLOPs that ran again, of all steps."""
    collected_flops: int
    """The part of them in phase `collect`."""
    plan_seconds: float
    """The `StepRecord.plan_seconds` of all steps."""
    retries: int
    """How often a forward ran again after it ran out of memory."""
    fragmentation: float | None = None
    """On an accelerator: reserved bytes counted for each requested byte of growth."""
    flushes: int | None = None
    """On an accelerator: how often the allocator freed its cached blocks at the limit
    and tried again."""
    kept_units: Mapping[str, str] = field(default_factory=dict)
    """Layers that cannot be recomputed, each with the reason."""
    inexact_layers: Mapping[str, str] = field(default_factory=dict)
    """Layers whose recomputation differs in the last bits on this device, each with the
    reason."""
    plans_ready: int = 0
    """New shapes whose plan was made before their step."""
    proven_plans: int = 0
    """Recorded steps in phase `plan` whose plan is proven to be the cheapest."""
    fixed_seconds: float | None = None
    """The fixed time of a step on the device, which does not depend on the batch, with
    the step's share of the optimizer step; None if not known."""
    row_seconds: Mapping[str, float] = field(default_factory=dict)
    """The seconds that each row adds if all layers are kept, at the last step's other
    sizes. The key is the name of the size that counts rows."""
    largest_to_come: Mapping[str, int] | None = None
    """The largest of the shapes given to `Session.expect`; None if there are none."""
    least_peak_to_come: float | None = None
    """The predicted peak of that shape under the safest plan, in bytes; None if not
    known."""
    host: HostUse | None = None
    """None if no action uses the host's memory."""
    agreement: AgreementUse | None = None
    """None if ranks plan freely."""


@dataclass(slots=True)
class Totals:
    """Sums over all steps, also those whose records were dropped."""

    steps: int = 0
    phases: Counter[str] = field(default_factory=Counter)
    steps_over: int = 0
    budgets: tuple[int, ...] = ()
    """The smallest and the largest; empty before the first step."""
    recomputed_flops: int = 0
    collected_flops: int = 0
    plan_seconds: float = 0.0
    retries: int = 0

    def add(self, record: StepRecord) -> None:
        """Add a step."""
        self.steps += 1
        self.phases[record.phase] += 1
        self.steps_over += record.is_over
        budgets = (*self.budgets, record.budget_bytes)
        self.budgets = min(budgets), max(budgets)
        self.recomputed_flops += record.recomputed_flops
        if record.phase == "collect":
            self.collected_flops += record.recomputed_flops
        self.plan_seconds += record.plan_seconds
        self.retries += record.retries


TRIED = "tried in place of what would be kept"
"""The end of a reason that begins with the names of the actions that a step tries."""


def kind_of(reason: str) -> str:
    """Return a reason without its numbers, so that similar ones count together.

    >>> kind_of("64 is beyond 40, the largest size measured")
    '# is beyond #, the largest size measured'
    """
    if reason.endswith(TRIED):
        return TRIED
    return _NUMBER.sub("#", reason)


AMENDS = "amends"
"""Marks a line that replaces an earlier one of the same step."""


class Records(deque[StepRecord]):
    """The records of the last steps, oldest first; optionally also in a file.

    Args:
        path: A file to which each record is appended as one line of JSON. Its folder is
            made if it does not exist.

    Raises:
        OSError: The file cannot be opened for appending.
    """

    def __init__(self, path: str | PathLike[str] | None = None) -> None:
        super().__init__(maxlen=_MOST_KEPT)
        self._dropped = Totals()
        self._path = None if path is None else Path(path)
        self._events: tuple[str, ...] = ()
        self._file: IO[str] | None = None
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._is_new = not self._path.exists()
            self._file = self._path.open("a+", encoding="utf-8")
            if _ends_within_a_line(self._path):
                self._file.write("\n")  # an interrupted run left half a line

    def close(self, record: StepRecord) -> None:
        """Insert a step's record in order, and write it.

        It replaces an earlier record of the same step. If there are too many records,
        the oldest one is dropped and stays in the totals.
        """
        place = len(self)
        while place and self[place - 1].step > record.step:  # usually it is the last
            place -= 1
        amends = bool(place) and self[place - 1].step == record.step
        if amends:
            self[place - 1] = record
        elif len(self) < _MOST_KEPT:
            self.insert(place, record)
        else:
            self._dropped.add(self.popleft() if place else record)
            if place:
                self.insert(place - 1, record)
        if self._file is not None:
            fields = asdict(record)
            if amends:
                fields[AMENDS] = True
            elif record.events == self._events:
                fields["events"] = ()
            if not amends:
                self._events = record.events
            self._write(self._file, json.dumps(fields) + "\n")

    def _write(self, file: IO[str], line: str) -> None:
        """Write a line. If that fails, as on a full disk, write no more lines."""
        try:
            file.write(line)
            file.flush()
        except OSError as error:
            self._file = None
            with contextlib.suppress(OSError):  # closing writes what is buffered
                file.close()
            _log.warning(
                "mimose: a step's record could not be written to %s (%s). Training "
                "goes "
                "on, and no more records are written",
                self._path,
                error,
            )

    def totals(self) -> Totals:
        """Return the sums over all steps so far."""
        totals = replace(self._dropped, phases=Counter(self._dropped.phases))
        for record in self:
            totals.add(record)
        return totals

    def close_file(self) -> None:
        """Close the file, and remove it if it is new and empty."""
        if self._file is None or self._path is None:
            return
        file, self._file = self._file, None
        file.close()
        if self._is_new and self._path.exists() and not self._path.stat().st_size:
            self._path.unlink()


def _ends_within_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) not in (b"", b"\n")


# ------------------------------------------------------------------ reading them back

_KNOWN = frozenset(each.name for each in fields(StepRecord))
_WHOLE = ("step", "budget_bytes", "start_bytes")
_NEEDED = (*_WHOLE, "shape", "phase", "actions")
_NUMBERS = (
    *(*_WHOLE, "plan_seconds", "recomputed_flops", "retries", "cache_hit"),
    *("is_optimal", "predicted_peak_bytes", "observed_peak_bytes", "seconds"),
    *("reserved_peak_bytes", "allocated_peak_bytes", "alloc_retries"),
)
_NEVER_NONE = _NUMBERS[:8]


def read_records(path: str | PathLike[str]) -> list[StepRecord]:
    """Read the records that ``attach(record_to=...)`` wrote.

    Unknown fields are ignored. Incomplete lines, which an interrupted run leaves, are
    skipped with a warning.

    Args:
        path: The file.

    Returns:
        The records in the order of the file. `StepRecord.events` is filled in where the
        file has it empty.

    Raises:
        OSError: The file cannot be read.
        MimoseError: A complete line is not a step's record, or no line is.
    """
    records: list[StepRecord] = []
    n_broken = 0
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                said = json.loads(line)
            except (ValueError, RecursionError):
                n_broken += line.endswith("\n")  # the last line may still be written
                continue
            record = _record(said)
            if record is None:
                raise _no_record(path, number)
            if said.get(AMENDS):
                _amend(records, record)
                continue
            events = record.events or (records[-1].events if records else ())
            records.append(replace(record, events=events))
    if n_broken and not records:
        raise _no_record(path, 1)
    if n_broken:
        _log.warning("mimose: skipped %d incomplete lines of %s", n_broken, path)
    return records


def _amend(records: list[StepRecord], record: StepRecord) -> None:
    """Replace the last record of the same step of the same run."""
    for place in range(len(records) - 1, -1, -1):
        there = records[place]
        if (there.step, there.start_bytes) == (record.step, record.start_bytes):
            records[place] = record
            return


def _no_record(path: str | PathLike[str], number: int) -> MimoseError:
    what = "not a step's record, as attach(record_to=...) writes it"
    return MimoseError(f"{path}, line {number}: {what}")


def _record(said: Any) -> StepRecord | None:
    """Return the record of a line of JSON; None if it is not one."""
    known: dict[str, Any] = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in (said.items() if isinstance(said, dict) else ())
        if name in _KNOWN
    }
    if not _is_sound(known):
        return None
    known.setdefault("predicted_peak_bytes", None)
    for name in ("actions", "events"):
        known[name] = tuple(known.get(name, ()))
    return StepRecord(**known)


def _is_sound(known: Mapping[str, Any]) -> bool:
    """Whether all required fields are present, and all have the right type."""
    if any(name not in known for name in _NEEDED):
        return False
    shape, lists = known["shape"], (known["actions"], known.get("events", []))
    if not (isinstance(shape, dict) and all(isinstance(each, list) for each in lists)):
        return False
    texts = [*lists[0], *lists[1]]
    numbers = [known[n] for n in _NUMBERS if n in known]
    whole = [known[name] for name in _WHOLE]
    return (
        known["phase"] in PHASES
        and isinstance(known.get("reason", ""), str)
        and all(isinstance(text, str) for text in texts)
        and all(isinstance(n, int) for n in [*whole, *shape.values()])
        and all(n is None or isinstance(n, (int, float)) for n in numbers)
        # No measured number is larger.
        and all(abs(n or 0) < sys.maxsize for n in [*numbers, *shape.values()])
        and all(known.get(name, 0) is not None for name in _NEVER_NONE)
        and known["budget_bytes"] > 0
    )
