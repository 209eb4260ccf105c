"""Does a budget of reserved bytes hold where lengths jump, and what does it cost?

A small BERT trains on lengths that are drawn evenly, without any order. One process
trains it plainly, with no limit: its reserved bytes grow with every length for which
no free block is large enough. It also measures what each length reserves if the step
begins without free blocks, and from that a budget is chosen that about 40% of the
steps need a plan for. Another process trains under mimose within it.

    python -m mimose.bench.proofs fragmentation
    python -m mimose.bench.proofs fragmentation --expandable --steps 200
    python -m mimose.bench.proofs.fragmentation_picture ROWS.csv PICTURE.png
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mimose.bench.proofs.common import (
    EXPANDABLE,
    Answer,
    Bar,
    Settings,
    count,
    device,
    recorded,
    rows_of,
    said_by,
)
from mimose.bench.proofs.loop import Loop
from mimose.bench.proofs.models import ModelSpec
from mimose.bench.proofs.numbers import mean, mebibytes, percent, quantile
from mimose.bench.rows import Row
from mimose.bench.step_meter import MeasuredStep
from mimose.measure.meters import AllocatorMeter
from mimose.session import Session, attach

QUESTION = "Does a budget of reserved bytes hold where lengths jump?"
OPTIONS = (device("sim"), count("--steps", 1000), EXPANDABLE)

_SPEC = ModelSpec(
    "bert", {"batch": (4, 4), "length": (16, 512)}, changes={"num_attention_heads": 1}
)
_NEED = 0.4
"""Share of the steps that are to need a plan."""
_NEEDED_BAR = 0.3
_STATE_STEPS = 2
"""Plain steps after which all that training holds between steps is there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FragmentationRow(Row):
    """One training step under mimose."""

    is_expandable: bool
    """Whether segments could grow."""
    step: int
    length: int
    phase: str
    budget_bytes: int
    """Of reserved bytes."""
    keep_all_growth_bytes: int
    """Reserved by a plain step of this length that begins without free blocks."""
    headroom_bytes: int
    """What the budget leaves for it."""
    start_bytes: int
    """Of the blocks in use when the step began."""
    reserved_peak_bytes: int
    """Read from outside, the optimizer's step included."""
    requested_peak_bytes: int
    """Of the session's reading, to the end of backward."""
    fragmentation: float
    """Reserved growth counted for each byte of growth, after the step."""
    given_back: int
    """How often the session has given free blocks back so far."""
    alloc_retries: int
    """How often the allocator gave its free blocks back to go on, in this step."""
    retries: int
    reason: str
    seconds: float

    @property
    def needs_plan(self) -> bool:
        """Whether keeping everything would exceed the budget."""
        return self.keep_all_growth_bytes > self.headroom_bytes

    @property
    def is_over(self) -> bool:
        """Whether more was reserved than the budget allows."""
        return self.reserved_peak_bytes > self.budget_bytes

    @property
    def use(self) -> float:
        """Growth as a share of what the budget left for it."""
        return (self.reserved_peak_bytes - self.start_bytes) / (
            self.budget_bytes - self.start_bytes
        )


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Train plainly, choose a budget, and train within it."""
    task = {"steps": options.steps, "is_expandable": options.expandable}
    *cold, plain = said_by("fragmentation", settings, part="plain", **task)
    growths = {str(said["length"]): said["growth_bytes"] for said in cold}
    headroom = _headroom([growths[str(length)] for length in plain["lengths"]])
    task |= {"part": "train", "growths": growths, "headroom_bytes": headroom}
    task["budget_bytes"] = plain["rest_bytes"] + headroom
    rows = rows_of(FragmentationRow, "fragmentation", settings, **task)
    return Answer(
        rows=[*rows],
        table=[_summarise(rows, plain)],
        bars=_judge(rows, options.steps),
    )


def _headroom(growths: Sequence[int]) -> int:
    """Choose the growth that a share of the steps nearest to `_NEED` exceeds.

    Growth comes in whole segments, so that many steps share one.
    """

    def miss(headroom: int) -> float:
        return abs(sum(g > headroom for g in growths) / len(growths) - _NEED)

    return min(sorted(set(growths)), key=miss)


# ------------------------------------------------------------------ judging


def _summarise(
    rows: Sequence[FragmentationRow], plain: Mapping[str, Any]
) -> dict[str, object]:
    needing = [row for row in rows if row.needs_plan]
    uses = [row.use for row in needing if row.phase == "plan"]
    requested = plain["requested_peak_bytes"]
    return {
        "steps": len(rows),
        "budget MiB": mebibytes(rows[0].budget_bytes),
        "headroom MiB": mebibytes(rows[0].headroom_bytes),
        "over": sum(row.is_over for row in rows),
        "need a plan": len(needing),
        "use p50": percent(quantile(uses, 0.5), 1),
        "use mean": percent(mean(uses), 1),
        "ratio at the end": rows[-1].fragmentation,
        "given back before": percent(rows[-1].given_back / len(rows), 1),
        "alloc retries": sum(row.alloc_retries for row in rows),
        "plain reserves MiB": mebibytes(plain["reserved_peak_bytes"]),
        "÷ its largest step": plain["reserved_peak_bytes"] / requested,
        "phases": dict(Counter(row.phase for row in rows)),
        "retries": sum(row.retries for row in rows),
        "step p50 s": quantile((row.seconds for row in rows), 0.5),
    }


def _judge(rows: Sequence[FragmentationRow], steps: int) -> list[Bar]:
    needing = sum(row.needs_plan for row in rows)
    retries = sum(row.alloc_retries for row in rows)
    return [
        Bar("steps done", len(rows), at_least=steps),
        Bar("steps over in reserved bytes", sum(r.is_over for r in rows), at_most=0),
        Bar("allocation retries", retries, at_most=0),
        Bar("steps that need a plan", needing, at_least=_NEEDED_BAR * steps),
    ]


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Do one part: ``"plain"`` or ``"train"``."""
    generator = torch.Generator().manual_seed(task["seed"] + 1)
    lengths = [_SPEC.draw(generator)["length"] for _ in range(task["steps"])]
    jumping = Jumping(task)
    if task["part"] == "plain":
        yield from jumping.plain(lengths)
        return
    with attach(
        jumping.loop.model, task["budget_bytes"], meter=jumping.loop.meter
    ) as session:
        for length in lengths:
            measured = jumping.step(length)
            yield {
                "is_expandable": task["is_expandable"],
                "length": length,
                "keep_all_growth_bytes": task["growths"][str(length)],
                "headroom_bytes": task["headroom_bytes"],
                "seconds": measured.seconds,
                **_observed(session, measured),
            }


class Jumping:
    """Trains on batches of one length each."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self._generator = torch.Generator().manual_seed(task["seed"] + 2)
        self.loop = Loop(_SPEC.build(task["seed"], task["device"]))
        if not isinstance(self.loop.meter, AllocatorMeter):
            msg = (
                f"{task['device']} reserves nothing ahead: fragmentation is that of an "
                f"accelerator's allocator, such as --device sim or cuda"
            )
            raise TypeError(msg)
        self.meter = self.loop.meter
        self.loop.warm_up(_SPEC.batch(_SPEC.shortest(), self._generator))

    def step(self, length: int) -> MeasuredStep:
        """Train on one batch."""
        sizes = {**_SPEC.longest(), "length": length}
        return self.loop.step(_SPEC.batch(sizes, self._generator))

    def plain(self, lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yield what each length reserves by itself, then what all reserve together."""
        for _ in range(_STATE_STEPS):
            self.step(min(lengths))
        rest_bytes = self.meter.resting_bytes()
        for length in sorted(set(lengths)):
            self.meter.resting_bytes()
            growth = self.step(length).peak_bytes - rest_bytes
            yield {"length": length, "growth_bytes": growth}
        rest_bytes = self.meter.resting_bytes()
        reserved, requested = 0, 0
        for length in lengths:
            reserved = max(reserved, self.step(length).peak_bytes)
            requested = max(requested, self.meter.peak_bytes())
        yield {
            "lengths": list(lengths),
            "rest_bytes": rest_bytes,
            "reserved_peak_bytes": reserved,
            "requested_peak_bytes": requested,
        }


def _observed(session: Session, measured: MeasuredStep) -> dict[str, Any]:
    record, summary = session.records[-1], session.summary()
    return {
        **recorded(record, "step", "phase", "alloc_retries", "retries", "reason"),
        "budget_bytes": session.budget_bytes,
        "start_bytes": measured.start_bytes,
        "reserved_peak_bytes": measured.peak_bytes,
        "requested_peak_bytes": record.observed_peak_bytes,
        "fragmentation": summary.fragmentation,
        "given_back": summary.given_back,
    }
