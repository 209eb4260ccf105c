"""What was measured, as plain data: all that an answer is made from."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mimose.bench.advise.methods import METHODS


@dataclass(frozen=True, kw_only=True, slots=True)
class AtSize:
    """What was measured at one size of a batch."""

    batch: int
    length: int | None
    """Tokens; None for the sample's own."""

    @property
    def size(self) -> int:
        """The length where it is one of those measured by length, else the batch."""
        return self.batch if self.length is None else self.length


@dataclass(frozen=True, kw_only=True, slots=True)
class Weighed(AtSize):
    """A step's peak."""

    peak_bytes: int
    """On a CPU the process's resident set; else what tensors requested."""
    reserved_bytes: int
    """What the allocator took for it; on a CPU the same."""
    seconds: float
    """Of that one step: rough."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed(AtSize):
    """Seconds of a step, one for each round."""

    rounds: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.rounds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Foretold(AtSize):
    """What a planner's plans cost, as the session has learned it."""

    least_bytes: float
    """The least budget that some plan keeps."""
    keep_bytes: float
    """The least budget at which everything is kept."""
    seconds: tuple[float, ...]
    """Added to plain training's at budgets from one to the other, in equal steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One method."""

    method: str
    why_not: str = ""
    """Why it could not be measured; empty where it was."""
    alters: bool = False
    """Whether gradients are others for this model, though they are not for most."""
    weighed: tuple[Weighed, ...] = ()
    stopped: str = ""
    """Why no larger batch was tried."""
    timed: tuple[Timed, ...] = ()
    foretold: tuple[Foretold, ...] = ()
    unplanned: tuple[AtSize, ...] = ()
    """Where a session that was to be timed made no plan that keeps the budget."""

    @property
    def is_exact(self) -> bool:
        """Whether gradients are plain training's, but for how floating point rounds."""
        return METHODS[self.method].is_exact and not self.alters


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurements:
    """All methods, and under which conditions."""

    model: str
    batch: int
    """Of the sample."""
    length: int | None
    budget_bytes: int
    device: str
    dtype: str
    optimizer: str
    threads: int
    machine: Mapping[str, str]
    load_average: float
    promised_seconds: float
    taken_seconds: float
    n_rounds: int
    is_interrupted: bool
    notes: tuple[str, ...] = ()
    """What was left out for lack of time, and the like."""
    methods: tuple[Measured, ...] = field(default=())
    lengths: tuple[int, ...] = ()
    """Padded tokens of the batches to come; empty where nobody said."""
    by_pace: bool | None = None
    """Whether steps are told at the machine's pace. False where the clock scattered
    less; None where no pace was read, as on an accelerator, or nobody wrote it down."""

    def write(self, path: Path) -> None:
        """Write it as JSON, for `read`."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> Measurements:
    """Read what `Measurements.write` wrote.

    Raises:
        OSError: It cannot be read.
        ValueError: It is something else.
    """
    try:
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        told["methods"] = tuple(map(_measured, told["methods"]))
        told["notes"] = tuple(told["notes"])
        told["lengths"] = tuple(told["lengths"])
        return Measurements(**told)
    except (KeyError, TypeError, ValueError) as error:
        msg = f"{path} was not written by mimose advise: {error}"
        raise ValueError(msg) from error


def foretold_of(told: Mapping[str, Any]) -> Foretold:
    """Return what JSON has of a batch size's plans."""
    return Foretold(**{**told, "seconds": tuple(told["seconds"])})


def _measured(told: dict[str, Any]) -> Measured:
    timed: Sequence[dict[str, Any]] = told["timed"]
    return Measured(
        method=told["method"],
        why_not=told["why_not"],
        alters=told.get("alters", False),
        weighed=tuple(Weighed(**each) for each in told["weighed"]),
        stopped=told["stopped"],
        timed=tuple(Timed(**{**e, "rounds": tuple(e["rounds"])}) for e in timed),
        foretold=tuple(map(foretold_of, told["foretold"])),
        unplanned=tuple(AtSize(**each) for each in told.get("unplanned", ())),
    )
