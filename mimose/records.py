"""The records of a session: one for each step, a summary of all, a file of them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
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
    """The names of the layer calls (``layer#call``) if they are known."""
    seconds: float | None = None
    """From the start of the forward to the end of the backward, measured on the host,
    which may run ahead of an accelerator (`Session.forecast` has the device's seconds).
    None before the backward has ended."""
    reserved_peak_bytes: int | None = None
    """On an accelerator: the most that the allocator had reserved."""
    alloc_retries: int | None = None
    """On an accelerator: how often the allocator freed its cached blocks at the limit
    and tried again."""

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


MUCH = 0.1
"""From this share of the time on, a session says what to do about new shapes. No
measurement set it: less is hardly worth a line."""
FEWER_SHAPES = (
    "Libraries build plans for each shape (cuDNN's attention on Hopper and Blackwell "
    "23 to 37 ms a plan; with 1 MiB a shape, which is a guess, 1,000 shapes hold 1 GiB "
    "outside of the allocator). Make shapes fewer: pad_to_multiple_of=8 of "
    "BatchSampler, fill_budget or a collator. Or compile the layers, or let another "
    "attention come first (TORCH_CUDNN_SDPA_DEPRIORITIZED=1 or "
    "torch.nn.attention.sdpa_kernel: faster for few short steps, slower for long ones, "
    "and other bits)"
)
"""What to do about it."""


class FirstTimes(NamedTuple):
    """What the first steps at a shape take, of the last timed steps with such inputs.

    Libraries choose kernels and build plans for a shape that the process never had.
    """

    n_new: int
    """Steps at a shape for the first time."""
    n_steps: int
    share: float
    """The part of the seconds of all these steps that goes to it."""
    seconds: float
    """What that comes to for each of all these steps, in the mean."""


class RankWaits(NamedTuple):
    """How long ranks wait for the slowest in each step, by a sampler's predictions."""

    n_steps: int
    """Steps whose seconds were predicted."""
    seconds: float
    """Their sum, of the slowest rank in each."""
    waited: float
    """The part of it that a rank waits, in the mean over the ranks."""
    slowest: tuple[int, ...]
    """By rank, the number of steps in which it was the slowest."""


class AgreementUse(NamedTuple):
    """What ranks that agree have exchanged, as this rank saw it."""

    n_ranks: int
    n_exchanges: int
    seconds: float
    """The time of all exchanges, with the wait for other ranks."""
    n_changed: int
    """Forwards that ran another plan than this rank alone would have run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over steps."""

    steps: int = 0
    """Training forwards of the model."""
    phases: Mapping[str, int] = field(default_factory=dict)
    """The number of steps in each phase."""
    steps_over: int = 0
    """Steps whose peak was over the budget."""
    budget_range: tuple[int, ...] = ()
    """The smallest and the largest budget; empty before the first step."""
    recomputed_flops: int = 0
    """The FLOPs that ran again, of all steps."""
    collected_flops: int = 0
    """The part of them in phase `collect`."""
    plan_seconds: float = 0.0
    """The `StepRecord.plan_seconds` of all steps."""
    retries: int = 0
    """How often a forward ran again after it ran out of memory."""


_NONE = Totals()


def totals_of(records: Collection[StepRecord], before: Totals = _NONE) -> Totals:
    """Return the sums over some steps, and over others whose sums are known.

    Args:
        records: The records of some steps.
        before: The sums over the others.
    """
    budgets = (*before.budget_range, *(record.budget_bytes for record in records))
    redone = [(r.recomputed_flops, r.phase == "collect") for r in records]
    phases = Counter(before.phases)
    phases.update(record.phase for record in records)
    return Totals(
        steps=before.steps + len(records),
        phases=dict(phases),
        steps_over=before.steps_over + sum(record.is_over for record in records),
        budget_range=(min(budgets), max(budgets)) if budgets else (),
        recomputed_flops=before.recomputed_flops + sum(n for n, _ in redone),
        collected_flops=before.collected_flops + sum(n for n, is_in in redone if is_in),
        plan_seconds=before.plan_seconds + sum(r.plan_seconds for r in records),
        retries=before.retries + sum(record.retries for record in records),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(Totals):
    """A session in numbers: `Session.summary`."""

    budget_bytes: int
    """The present budget."""
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
    fixed_seconds: float | None = None
    """The fixed time of a step on the device, which does not depend on the batch, with
    the step's share of the optimizer step; None if not known."""
    batch_seconds: float | None = None
    """The seconds that the last shape adds to that if all layers are kept."""
    first_times: FirstTimes | None = None
    """What shapes take the first time; None if not known, or nothing."""
    byte_price: tuple[float, str, str] | None = None
    """FLOPs that count as much as moving a byte; their precision; what this is from.
    None before products were counted."""
    rank_waits: RankWaits | None = None
    """How long ranks wait for each other; None without a sampler on several ranks."""
    least_rows_share: float = 0.0
    """The share of the tokens a second that ``min_rows`` of a sampler costs, as
    predicted, in the mean over lengths; 0 if nothing or not known."""
    largest_to_come: Mapping[str, int] | None = None
    """The largest of the shapes given to `Session.expect`; None if there are none."""
    least_peak_to_come: float | None = None
    """The predicted peak of that shape under the safest plan, in bytes; None if not
    known."""
    host: HostUse | None = None
    """None if no action uses the host's memory."""
    agreement: AgreementUse | None = None
    """None if ranks plan freely."""
    unplanned: tuple[str, ...] = ()
    """What ran past the session, a sentence for each cause, with what to call."""
    rehearsed: str = ""
    """Where the loaded state was learned, if that was a rehearsal."""


def kind_of(reason: str) -> str:
    """Return a reason without its numbers, so that similar ones count together.

    >>> kind_of("64 is beyond 40, the largest size measured")
    '# is beyond #, the largest size measured'
    """
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
        self._dropped = _NONE
        self._file: IO[str] | None = None
        if path is not None:
            self._path = Path(path)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._is_new = not self._path.exists()
            self._file = self._path.open("a", encoding="utf-8")
            with self._path.open("rb") as there:
                there.seek(max(0, there.seek(0, os.SEEK_END) - 1))
                if there.read() not in (b"", b"\n"):
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
        else:
            if len(self) >= _MOST_KEPT:
                self._dropped = totals_of([self.popleft()], self._dropped)
                place = max(0, place - 1)
            self.insert(place, record)
        if self._file is None:
            return
        mark = {AMENDS: True} if amends else {}
        try:
            self._file.write(json.dumps(asdict(record) | mark) + "\n")
            self._file.flush()
        except OSError as error:  # as on a full disk
            with contextlib.suppress(OSError):  # closing writes what is buffered
                self.close_file()
            _log.warning(
                "mimose: a step's record could not be written to %s (%s). Training "
                "goes on, and no more records are written",
                self._path,
                error,
            )

    def totals(self) -> Totals:
        """Return the sums over all steps so far."""
        return totals_of(self, self._dropped)

    def close_file(self) -> None:
        """Close the file, and remove it if it is new and empty."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
            if self._is_new and self._path.exists() and not self._path.stat().st_size:
                self._path.unlink()


_KNOWN = frozenset(each.name for each in fields(StepRecord))
_NO_NUMBERS = {"shape", "phase", "actions", "reason", "events"}
_WHOLE = ("step", "budget_bytes", "start_bytes", "recomputed_flops", "cache_hit")


def read_records(path: str | PathLike[str]) -> list[StepRecord]:
    """Read the records that ``attach(record_to=...)`` wrote.

    Unknown fields are ignored. Incomplete lines, which an interrupted run leaves, are
    skipped with a warning.

    Args:
        path: The file.

    Returns:
        The records in the order of the file.

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
            else:
                records.append(record)
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
    try:
        record = StepRecord(**{name: said[name] for name in _KNOWN & said.keys()})
        sizes = record.shape.values()
        numbers = [*sizes, *(getattr(record, name) for name in _KNOWN - _NO_NUMBERS)]
        whole = [*sizes, *(getattr(record, name) for name in _WHOLE)]
        texts = [record.reason, *record.actions, *record.events]
        is_sound = (
            all(n is None or abs(n) < sys.maxsize for n in numbers)
            and all(isinstance(n, int) for n in whole)
            and all(isinstance(text, str) for text in texts)
            and record.phase in PHASES
            and record.plan_seconds is not None
            and record.budget_bytes > 0
        )
        actions, events = tuple(record.actions), tuple(record.events)
        return replace(record, actions=actions, events=events) if is_sound else None
    except (AttributeError, TypeError):
        return None


Shape: TypeAlias = tuple[tuple[str, int], ...]
"""The sizes that vary within the run, by name."""


def split_runs(records: Sequence[StepRecord]) -> list[list[StepRecord]]:
    """Split records into runs: a new run begins when a step number repeats.

    Steps of one run may be out of order, because they are written when they end.
    """
    runs: list[list[StepRecord]] = []
    seen: set[int] = set()
    for record in records:
        if not runs or record.step in seen:
            runs.append([])
            seen.clear()
        seen.add(record.step)
        runs[-1].append(record)
    return runs


def shapes_of(run: Sequence[StepRecord]) -> list[Shape]:
    """Return each step's sizes that vary during the run; all sizes if none varies.

    The first record of a signature has all sizes, the later ones those that had varied
    until then; the others are as before. If the first record is not kept, some sizes
    are unknown.

    Args:
        run: The records of one run.
    """
    values: dict[str, set[int]] = {}
    for record in run:
        for name, size in record.shape.items():
            values.setdefault(name, set()).add(size)
    shown = [name for name, sizes in values.items() if len(sizes) > 1] or [*values]
    shapes: list[Shape] = []
    known: dict[str, int] = {}
    for record in run:
        if known.keys().isdisjoint(record.shape):  # another signature
            known = {}
        known |= record.shape
        shapes.append(tuple((name, known[name]) for name in shown if name in known))
    return shapes


def shape_text(shape: Shape) -> str:
    """Return a shape as text."""
    return ", ".join(f"{name}={size}" for name, size in shape) or "(no sizes)"


def sizes_text(shape: Shape) -> str:
    """Return the sizes of a shape as text, without their names."""
    return " × ".join(str(size) for _, size in shape) or "–"


def n_elements(shape: Shape) -> int:
    """Return the size of a batch: the number of its elements, from sizes that vary.

    >>> n_elements((("ids.0", 4), ("ids.1", 10), ("labels.1", 5)))
    60
    """
    batches = [size for name, size in shape if name.endswith(".0")]
    has_batch = len(batches) == 1
    in_a_row: dict[str, int] = {}
    for name, size in shape:
        if not (has_batch and name.endswith(".0")):
            argument = name.rpartition(".")[0]
            in_a_row[argument] = in_a_row.get(argument, 1) * size
    rows = batches[0] if has_batch else 1
    return rows * (sum(in_a_row.values()) if in_a_row else 1)
