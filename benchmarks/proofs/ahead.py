"""How many new shapes find their plan made when they come?

The demonstration's model is trained on real texts that a `DataLoader` with two workers
pads to the longest of each batch, in shuffled order, within a budget. A session watches
the loader; beside it one trains on the same batches without watching. Counted are the
batches of sizes that had not come before, from the step on at which plans are not
measured any more.

    python -m benchmarks.proofs ahead
    python -m benchmarks.proofs ahead --steps 100 --workers 1
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.proofs.common import Answer, Bar, Settings, count, recorded, rows_of
from benchmarks.proofs.loop import Loop
from benchmarks.proofs.numbers import percent
from mimose.bench.grid.workloads import N_TEXTS, OURS, collate
from mimose.bench.rows import Row
from mimose.bench.zoo import Batch
from mimose.session import Session, attach

QUESTION = "How many new shapes find their plan made when they come?"
OPTIONS = (count("--steps", 300), count("--workers", 2, "of the loader"))

_SHARE = 0.5
"""Of the growth of the longest batch with everything kept: the budget."""
_LEARNING_STEPS = 50
"""The first 40 steps of new shapes are measured, most of them under plans that are made
as they begin."""
_BAR = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class AheadRow(Row):
    """One step."""

    is_watched: bool
    step: int
    length: int
    """Of the batch's longest text."""
    is_new: bool
    """Whether no batch of this length came before."""
    phase: str
    cache_hit: bool
    """Whether the plan was there when the step began."""
    plan_seconds: float
    """From the root's entry to the plan."""
    kept: int
    """Layers whose activations were kept."""
    is_over: bool


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Train watching, and without."""
    answer = Answer()
    for is_watched in (True, False):
        task = {"steps": options.steps, "workers": options.workers}
        own = rows_of(AheadRow, "ahead", settings, is_watched=is_watched, **task)
        line = _summarise(own)
        bars = [Bar("steps over the budget", sum(row.is_over for row in own), 0)]
        if is_watched:
            what = "share of new shapes with a plan"
            bars.append(Bar(what, _ready(_late(own)), at_least=_BAR, is_share=True))
        name = "watched" if is_watched else "not watched"
        answer.add(name, own, line, bars, head="loader")
    return answer


def _late(rows: Sequence[AheadRow]) -> list[AheadRow]:
    """Return the steps of new shapes behind those that are measured anyway."""
    return [row for row in rows if row.is_new and row.step >= _LEARNING_STEPS]


def _ready(rows: Sequence[AheadRow]) -> float | None:
    return sum(row.cache_hit for row in rows) / len(rows) if rows else None


def _summarise(rows: Sequence[AheadRow]) -> dict[str, object]:
    late = _late(rows)
    return {
        "steps": len(rows),
        "new shapes": sum(row.is_new for row in rows),
        "of these with a plan": percent(_ready([r for r in rows if r.is_new])),
        f"from step {_LEARNING_STEPS} on": len(late),
        "with a plan": percent(_ready(late)),
    }


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Train, and tell of each step."""
    torch.manual_seed(task["seed"])
    loop = Loop(OURS.build("tiny"))
    texts = list(OURS.corpus.train)
    longest = sorted(texts, key=lambda text: len(text.token_ids))[-N_TEXTS:]
    loop.warm_up(collate(longest))
    measured = loop.step(collate(longest))
    growth = measured.peak_bytes - measured.start_bytes
    budget = measured.start_bytes + loop.state_bytes + int(_SHARE * growth)
    session = attach(loop.model, budget, meter=loop.meter)
    loader: DataLoader[Any] = DataLoader(
        texts,  # type: ignore[arg-type]
        batch_size=N_TEXTS,
        shuffle=True,
        generator=torch.Generator().manual_seed(task["seed"]),
        num_workers=task["workers"],
        collate_fn=collate,
        drop_last=True,
    )
    seen = set[int]()
    for batch in _batches(session, loader, task):
        length = batch["input_ids"].shape[1]
        loop.step(batch)
        told = recorded(
            session.records[-1],
            *("step", "phase", "cache_hit", "plan_seconds", "kept", "is_over"),
        )
        yield {
            "is_watched": task["is_watched"],
            "length": length,
            "is_new": length not in seen,
            **told,
        }
        seen.add(length)
        if told["step"] + 1 == task["steps"]:
            return


def _batches(
    session: Session, loader: DataLoader[Any], task: Mapping[str, Any]
) -> Iterator[Batch]:
    """Yield batches, epoch after epoch."""
    while True:
        batches: Iterable[Batch] = loader
        if task["is_watched"]:
            batches = session.watch(loader)
        yield from batches
