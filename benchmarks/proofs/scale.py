"""Real models on cards of their true size: who trains them fastest within the memory?

Each workload trains on each of its cards under each strategy (`benchmarks.scale`), in a
process of its own, on the hollow card or on a part of one that is there. Seconds are
the card's, in the mean of the steps after the tenth.

    python -m benchmarks.scale --expandable no --strategies hf whole
    python -m benchmarks.scale --device cuda --out runs
    python -m benchmarks.scale --workloads bert-large --gib 16 --steps 16 --out runs
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Options, Settings
from benchmarks.proofs.numbers import percent
from benchmarks.scale.models import WORKLOADS
from benchmarks.scale.run import STRATEGIES, work
from mimose.bench.child import RunFailedError
from mimose.bench.device import SIM, kind_of

__all__ = ["OPTIONS", "QUESTION", "ask", "work"]

QUESTION = "Who trains models of real size fastest within the memory?"
DEFAULTS = {"seed": 1, "threads": 1}
_ALLOCATORS = {"no": (False,), "yes": (True,), "both": (False, True)}
OPTIONS = (
    common.device(SIM),
    common.some("--workloads", WORKLOADS),
    common.some("--strategies", STRATEGIES),
    ("--gib", {"nargs": "+", "type": int, "help": "of the card; else a workload's"}),
    ("--card", {"default": "h100", "help": "h200, h100, a100, rtx4090, a10: hollow"}),
    ("--expandable", {"choices": _ALLOCATORS, "default": "both"}),
    common.count("--steps", 120, "a run"),
    common.flag("--resume", "keep the rows that are there"),
)
_OURS = "whole", "fine"
_PLACE = "workload", "gib", "expandable"


def ask(settings: Settings, options: Options) -> Answer:
    """Run what is asked for; each row is kept as it comes."""
    path = settings.out / "scale.csv"
    answer = Answer(path=path)
    if options.resume and path.exists():
        answer.rows.extend(common.read(path))
    known = list(answer.rows)
    rows: list[common.Row] = []
    base: dict[tuple[object, ...], float | None] = {}
    for place, strategy in _runs(options):
        if any((place | strategy).items() <= row.items() for row in known):
            continue
        row = _run(settings, options, **place, **strategy)
        where = tuple(place.values())
        if strategy["strategy"] in ("hf", "full"):
            base.setdefault(where, row["seconds"])
        name = "{workload}, {gib} GiB, {strategy}".format_map(row)
        name += ", segments that grow" * row["expandable"]
        answer.add(name, [row], line(row, base.get(where)), (), head="run")
        rows.append(row)
    ours = [row for row in rows if row["strategy"] in _OURS]
    over, ooms = (sum(row.get(name) or 0 for row in ours) for name in ("over", "ooms"))
    answer.bars += [
        Bar("runs that ended with an error", sum(bool(r["error"]) for r in rows), 0),
        Bar("mimose's steps over their budget", over, 0),
        Bar("mimose's steps out of memory", ooms, 0),
    ]
    return answer


def _runs(options: Options) -> Iterator[tuple[dict[str, Any], ...]]:
    for workload in options.workloads:
        sizes = options.gib or WORKLOADS[workload].cards
        for place in itertools.product(sizes, _ALLOCATORS[options.expandable]):
            for strategy in options.strategies:
                where = dict(zip(_PLACE, (workload, *place), strict=True))
                yield where, {"strategy": strategy}


def _run(settings: Settings, options: Options, **where: Any) -> common.Row:
    is_hollow = kind_of(settings.device) == SIM
    where["card"] = options.card if is_hollow else "itself"
    task = {**where, "is_expandable": where["expandable"], "steps": options.steps}
    try:
        (row,) = common.measured("scale", settings, **task)
    except RunFailedError as error:
        row = {"seconds": None, "error": str(error).splitlines()[0][:300]}
        row |= settings.provenance()
    return {**where, "error": "", **row}


def line(row: Mapping[str, Any], base: float | None) -> dict[str, object]:
    """Return a line of the table.

    Args:
        row: What was measured.
        base: Seconds of checkpointing everything in the same place.
    """
    if row["error"]:
        return {"ms": row["error"]}
    seconds = row["seconds"]
    told = row.get
    return {
        "ms": seconds and 1e3 * seconds,
        "ratio": seconds and base and seconds / base,
        "allocator": percent(seconds and row["allocator_seconds"] / seconds, 1),
        "out of memory": row["ooms"],
        "flushes": row["flushes"],
        "GiB": row["reserved_bytes"] / 2**30,
        "over": told("over"),
        "run again": told("reruns"),
        "first plan": told("first_plan"),
        "planned": percent(told("planned_share"), 0),
        "keep all": percent(told("kept_share"), 0),
        "error p99": percent(told("error_p99")),
        "used": percent(told("headroom_used")),
        "fragmentation": told("fragmentation"),
        "left out": row["left_out"],
    }
