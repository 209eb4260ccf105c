"""What the session records of each step, and of all of them."""

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
"""Records of about half a kB each."""
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
PHASES: tuple[Phase, ...] = get_args(Phase)


class Peaks(NamedTuple):
    """The most held since a step began; None if not known."""

    level_bytes: int
    reserved_bytes: int | None = None
    allocated_bytes: int | None = None
    n_retries: int | None = None
    """How often the allocator freed all its cached blocks to go on."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One forward of the root, with its backward where there was one.

    A record is made when its step has ended: its backward has, or none can come any
    more. It does not change; where a step goes on, another takes its place.
    Forwards that run before the same backward are one step: start and peaks, predicted
    and observed, are the same in their records.
    """

    step: int
    """Counts the root's forwards in training, from 0."""
    shape: Mapping[str, int]
    """The sizes of the batch that vary, by name."""
    phase: Phase
    """`collect` (everything recomputed and measured), `step_down` (the first plans
    that keep something), `plan`, or `fallback` (the safest plan; see `reason`)."""
    actions: tuple[str, ...]
    """The action of each event, in the order in which they ran."""
    budget_bytes: int
    """The budget of this step: on an accelerator the most `reserved_peak_bytes` may be,
    elsewhere the most `observed_peak_bytes` may be."""
    start_bytes: int
    """Held when the forward began: on an accelerator requested by tensors."""
    predicted_peak_bytes: float | None
    """What the plan said the peak would be, at the exact sizes."""
    observed_peak_bytes: int | None = None
    """The peak from the start of the forward to the end of backward: on an accelerator
    of requested bytes, elsewhere of the resident set. None until the backward has
    ended, and where it is not known (see `reason`)."""
    cache_hit: bool = False
    """Whether the plan was there: from the cache, or made ahead."""
    plan_seconds: float = 0.0
    """From the root's entry until its forward may begin: the meter and the batch's
    sizes are read, the plan is found or made, what the forward changes is saved, free
    cached blocks are freed where they have to be."""
    recomputed_flops: int = 0
    """FLOPs of the products, convolutions and attention run again in backward."""
    retries: int = 0
    """How often the forward was run again after running out of memory."""
    reason: str = ""
    """Why the step is not an ordinary one; "" if it is."""
    events: tuple[str, ...] = ()
    """The names of the events (``layer#call``), where they are known. In a file, empty
    where they are those of the line before."""
    seconds: float | None = None
    """From the start of the forward to the end of backward, as the host sees it, which
    may run ahead of an accelerator (`Session.forecast` tells the device's seconds);
    None until then."""
    reserved_peak_bytes: int | None = None
    """On an accelerator the most that the allocator had taken from the device."""
    allocated_peak_bytes: int | None = None
    """On an accelerator the most that the blocks in use took."""
    alloc_retries: int | None = None
    """How often the allocator freed its cached blocks to go on."""
    is_optimal: bool = False
    """Whether the plan was proven to cost the least of all that keep the budget."""

    @property
    def highest_bytes(self) -> int | None:
        """What the budget is about: reserved bytes where they are known."""
        reserved = self.reserved_peak_bytes
        return self.observed_peak_bytes if reserved is None else reserved

    @property
    def predicted_growth_bytes(self) -> float | None:
        """The predicted peak over what was held at the start."""
        if self.predicted_peak_bytes is None:
            return None
        return self.predicted_peak_bytes - self.start_bytes

    @property
    def observed_growth_bytes(self) -> int | None:
        """The observed peak over what was held at the start."""
        if self.observed_peak_bytes is None:
            return None
        return self.observed_peak_bytes - self.start_bytes

    @property
    def prediction_error(self) -> float | None:
        """Observed over predicted growth, less one; None if either is unknown."""
        observed, predicted = self.observed_growth_bytes, self.predicted_growth_bytes
        if observed is None or not predicted:
            return None
        return observed / predicted - 1.0

    @property
    def is_over(self) -> bool:
        """Whether the peak that the budget is about exceeded it."""
        highest = self.highest_bytes
        return highest is not None and highest > self.budget_bytes

    @property
    def budget_use(self) -> float | None:
        """The peak that the budget is about, as a share of it."""
        highest = self.highest_bytes
        return None if highest is None else highest / self.budget_bytes

    @property
    def n_recomputed(self) -> int:
        """How many layer calls were not simply kept."""
        return len(self.actions) - self.actions.count(EXACT_MENU.first)


class HostUse(NamedTuple):
    """What a session took of the host's memory."""

    budget_bytes: int
    peak_bytes: int
    """The most that was held at once."""
    pinned_peak_bytes: int
    """The most that was pinned at once, what waited to be used again included; 0 where
    nothing is pinned."""
    n_refused: int
    """So many tensors did not fit within the budget, and stayed on the device."""


class AgreementUse(NamedTuple):
    """What ranks that agree have exchanged, as this rank saw it."""

    n_ranks: int
    n_exchanges: int
    seconds: float
    """What these took, waiting for other ranks included."""
    n_changed: int
    """Forwards that did something else than this rank alone would have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A session in numbers."""

    steps: int
    """Forwards of the root in training."""
    phases: Mapping[str, int]
    """Steps by phase."""
    steps_over: int
    """Steps whose observed peak exceeded the budget."""
    budget_bytes: int
    budget_range: tuple[int, int]
    """The least and the largest, this and those of the steps."""
    peak_bytes: int
    """The highest reading since the session began, optimizer steps included."""
    layers: int
    """Modules planned for."""
    shapes: int
    """Distinct shapes of the batch, of the recorded steps."""
    cache_hits: int
    cache_misses: int
    margin: float
    """Safety margin, as a share of predicted growth."""
    error_p50: float | None
    """Median of |observed − predicted| growth, as a share of predicted growth, over
    the recorded steps in phase `plan`."""
    error_p99: float | None
    recomputed_flops: int
    """Of all steps."""
    collected_flops: int
    """The part of it spent in phase `collect`."""
    plan_seconds: float
    """Of all steps."""
    retries: int
    fragmentation: float | None = None
    """On an accelerator: reserved growth counted for each byte of growth."""
    flushes: int | None = None
    """On an accelerator: how often the allocator freed its cached blocks to go on."""
    kept_units: Mapping[str, str] = field(default_factory=dict)
    """Layers that cannot be recomputed, and why."""
    inexact_layers: Mapping[str, str] = field(default_factory=dict)
    """Layers that are recomputed but not to the bit on this device, and why."""
    plans_ready: int = 0
    """New shapes whose plan was made before they came."""
    proven_plans: int = 0
    """Recorded steps in phase `plan` whose plan was proven to cost the least."""
    fixed_seconds: float | None = None
    """Of each step on the device, whatever its batch, with its share of the optimizer's
    step; None where it is not known."""
    row_seconds: Mapping[str, float] = field(default_factory=dict)
    """By the name of that size, what each row adds at the last step's other sizes if
    all layers are kept."""
    largest_to_come: Mapping[str, int] | None = None
    """Of the shapes given to `Session.expect`; None where none was."""
    least_peak_to_come: float | None = None
    """What it takes under any plan, in bytes; None where that is not known yet."""
    host: HostUse | None = None
    """None where no action holds anything on the host."""
    agreement: AgreementUse | None = None
    """None where ranks plan freely."""


@dataclass(slots=True)
class Totals:
    """Steps added up, those whose records are not kept any more among them."""

    steps: int = 0
    phases: Counter[str] = field(default_factory=Counter)
    steps_over: int = 0
    budgets: tuple[int, ...] = ()
    """The least and the largest; none before the first step."""
    recomputed_flops: int = 0
    collected_flops: int = 0
    plan_seconds: float = 0.0
    retries: int = 0

    def add(self, record: StepRecord) -> None:
        """Take in a step."""
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
"""How a reason ends that begins with the names of the actions that a step tries."""


def kind_of(reason: str) -> str:
    """Return what reasons share that differ in numbers, or in the actions tried.

    >>> kind_of("64 is beyond 40, the most measured")
    '# is beyond #, the most measured'
    """
    if reason.endswith(TRIED):
        return TRIED
    return _NUMBER.sub("#", reason)


AMENDS = "amends"
"""Marks a line that takes the place of the one before of the same step."""


class Records(deque[StepRecord]):
    """The last steps' records, oldest first; optionally written to a file as well.

    Args:
        path: A file to append each closed record to, as one line of JSON; its folder
            is made if it is not there.

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
                self._file.write("\n")  # a run that was killed left half a line

    def close(self, record: StepRecord) -> None:
        """Put a step's record in its place, and write it.

        One of the same step takes the place of what was known of it before. Of too many
        the oldest is dropped, and stays in the totals.
        """
        place = len(self)
        while place and self[place - 1].step > record.step:  # most often it is the last
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
        """Write a line; where that fails, as on a full disk, write no more of them."""
        try:
            file.write(line)
            file.flush()
        except OSError as error:
            self._file = None
            with contextlib.suppress(OSError):  # it writes what is left, or tries to
                file.close()
            _log.warning(
                "mimose: a step's record could not be written to %s (%s): no more are "
                "written; training goes on",
                self._path,
                error,
            )

    def totals(self) -> Totals:
        """Add up all steps there were."""
        totals = replace(self._dropped, phases=Counter(self._dropped.phases))
        for record in self:
            totals.add(record)
        return totals

    def close_file(self) -> None:
        """Close the file; one that is new and empty does not stay behind."""
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
        _log.warning("mimose: %d broken lines of %s were left out", n_broken, path)
    return records


def _amend(records: list[StepRecord], record: StepRecord) -> None:
    """Put a record in the place of the last of the same step of the same run."""
    for place in range(len(records) - 1, -1, -1):
        there = records[place]
        if (there.step, there.start_bytes) == (record.step, record.start_bytes):
            records[place] = record
            return


def _no_record(path: str | PathLike[str], number: int) -> MimoseError:
    said = "not a step's record, as attach(record_to=...) writes it"
    return MimoseError(f"{path}, line {number}: {said}")


def _record(said: Any) -> StepRecord | None:
    """Return what a line says; None where it says something else."""
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
    """Whether what is needed is there, and everything is of its kind."""
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
        # A greater number is none that was measured.
        and all(abs(n or 0) < sys.maxsize for n in [*numbers, *shape.values()])
        and all(known.get(name, 0) is not None for name in _NEVER_NONE)
        and known["budget_bytes"] > 0
    )
