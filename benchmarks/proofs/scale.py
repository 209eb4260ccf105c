"""Real models on cards of true size: which strategy trains fastest in the memory?

Each workload trains on each of its cards under each strategy (`benchmarks.scale`), in a
separate process, on the hollow card or within a limit on a real one. Seconds are the
card's, the mean of the steps after the tenth.

    python -m benchmarks.scale --expandable no --strategies hf whole
    python -m benchmarks.scale --device cuda --out runs
    python -m benchmarks.scale --workloads bert-large --gib 16 --steps 16 --out runs
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Options, Row, Settings
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
    ("--attention-plans", {"choices": ("yes", "no"), "default": "yes"}),
    ("--expandable", {"choices": _ALLOCATORS, "default": "both"}),
    common.count("--steps", 120, "a run"),
    common.RESUME,
)
_OURS = "whole", "fine"
_WHOLE = 200
"""Of so many steps a whole run is judged, first ones included."""
_PLACE = "workload", "gib", "expandable", "attention_plans"
_RATIOS = {"user": "user_seconds", "whole": "user_whole", "host": "cpu_early"}
_RATIOS |= {"device": "seconds"}
_TOLD = (
    *("error", "user_seconds", "seconds", "allocator_seconds", "ooms", "flushes"),
    *("reserved_bytes", "over", "reruns", "first_plan", "planned_share", "kept_share"),
    *("error_p99", "headroom_used", "fragmentation", "left_out"),
)


def ask(settings: Settings, options: Options) -> Answer:
    """Run what is asked for; each row is kept at once."""
    answer = Answer.begun(settings.out / "scale.csv", resume=options.resume)
    rows = answer.rows
    for run in _runs(options):
        if not any(_is_at(row, run) for row in rows):
            row = _run(settings, options, **run)
            answer.add(" ".join(map(str, run.values())), [row], {}, ())
    answer.table = [line(row, rows) for row in rows]
    ours = [row for row in rows if row["strategy"] in _OURS]
    over, ooms = (sum(row.get(name) or 0 for row in ours) for name in ("over", "ooms"))
    answer.bars += [
        Bar("runs that ended with an error", sum(bool(r["error"]) for r in rows), 0),
        Bar("mimose's steps over their budget", over, 0),
        Bar("mimose's steps out of memory", ooms, 0),
    ]
    ratios = [found for row in ours if (found := _whole_ratio(row, rows)) is not None]
    if ratios and options.steps >= _WHOLE:
        what = "whole run on the user's clock, of checkpointing's"
        answer.bars += [
            Bar(f"{what}, mean", sum(ratios) / len(ratios), 0.85, is_share=True),
            Bar(f"{what}, most", max(ratios), 1.0, is_share=True),
        ]
    return answer


def _whole_ratio(row: Row, rows: Iterable[Row]) -> float | None:
    """Return a run's time over that of checkpointing everything, if that all fitted."""
    where = {name: row[name] for name in _PLACE}
    full = [r for r in rows if r["strategy"] == "hf" and _is_at(r, where)]
    if row["error"] or not full or full[0]["error"] or full[0]["ooms"]:
        return None
    return float(row["user_whole"]) / float(full[0]["user_whole"])


def _runs(options: Options) -> Iterator[Row]:
    for workload in options.workloads:
        sizes = options.gib or WORKLOADS[workload].cards
        allocators = _ALLOCATORS[options.expandable]
        plans = (options.attention_plans == "yes",)
        for how in itertools.product(sizes, allocators, plans, options.strategies):
            yield dict(zip((*_PLACE, "strategy"), (workload, *how), strict=True))


def _run(settings: Settings, options: Options, **where: Any) -> Row:
    is_hollow = kind_of(settings.device) == SIM
    where["card"] = options.card if is_hollow else "itself"
    task = {**where, "is_expandable": where["expandable"], "steps": options.steps}
    try:
        (row,) = common.measured("scale", settings, **task)
    except RunFailedError as error:
        row = {"seconds": None, "error": str(error).splitlines()[0][:300]}
        row |= settings.provenance()
    return {**where, "error": "", **row}


def line(row: Row, rows: Iterable[Row]) -> dict[str, object]:
    """Return a line of the table; ratios are to checkpointing in the same place."""
    where = {name: row[name] for name in _PLACE}
    name = "{workload}, {gib} GiB, {strategy}".format_map(row)
    name += ", segments that grow" * row["expandable"]
    name += ", no plans of attention" * (not row["attention_plans"])
    full = [r for r in rows if r["strategy"] == "hf" and _is_at(r, where)]
    base = next(iter(full), row)
    ratios = {
        f"{of} ratio": row.get(name) and base.get(name) and row[name] / base[name]
        for of, name in _RATIOS.items()
    }
    return {"run": name, **ratios, **{told: row.get(told) for told in _TOLD}}


def _is_at(row: Row, where: Row) -> bool:
    return where.items() <= row.items()
