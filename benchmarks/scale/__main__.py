"""``python -m benchmarks.scale``: the table of workloads, cards and strategies."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.scale.models import WORKLOADS
from benchmarks.scale.run import STRATEGIES
from mimose.bench.child import RunFailedError, run_child
from mimose.bench.rows import Row, RowsFile, RunSettings, read

_EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleRow(Row):
    """How a strategy trained a workload on a card; see `benchmarks.scale.run`."""

    workload: str
    gib: int
    card: str
    expandable: bool
    strategy: str
    n_steps: int
    ooms: int
    """Out-of-memory errors that reached the loop."""
    left_out: str
    """Sizes that no exact plan can hold."""
    seconds: float | None
    """Of the card a step, in the mean after the tenth."""
    kernel_seconds: float | None
    allocator_seconds: float | None
    n_kernels: float | None
    cpu_seconds: float | None
    """Of the host a step, in the median; told of a quiet machine alone."""
    flushes: int
    """How often the allocator freed its cached blocks at the wall."""
    reserved_bytes: int
    over: int | None = None
    """Steps that passed the budget."""
    reruns: int | None = None
    first_plan: int | None = None
    planned_share: float | None = None
    """Of the steps after the tenth."""
    kept_share: float | None = None
    """Of these, those that keep all."""
    error_p50: float | None = None
    error_p99: float | None = None
    headroom_used: float | None = None
    """Growth over headroom in steps that needed a plan, in the median."""
    n_needed: int | None = None
    fragmentation: float | None = None
    reasons: str = ""
    """Why steps were not planned."""
    error: str = ""
    """What the run ended with, if it did."""

    @property
    def place(self) -> tuple[str, int, bool]:
        """Everything but the strategy."""
        return self.workload, self.gib, self.expandable


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for, print the table and write the rows down."""
    options = _parser().parse_args(arguments)
    settings = RunSettings(seed=options.seed, threads=1, device=options.device)
    rows = []
    path = Path(options.out)
    done = read(path, ScaleRow) if options.resume and path.exists() else []
    file = RowsFile(path, ScaleRow, goes_on=bool(done))
    known = {(row.place, row.strategy) for row in done}
    for place in _places(options):
        for strategy in options.strategies:
            if ((*place,), strategy) in known:
                continue
            row = _run(place, strategy, options, settings)
            rows.append(row)
            file.append([row])
            sys.stdout.write(_line(row, _base(rows, row)) + "\n")
            sys.stdout.flush()
    file.close()
    return int(any(row.error for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale",
        description="Train models of real size on a simulated card of its true size, "
        "or on a part of one that is there.",
    )
    add = parser.add_argument
    add("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    add("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    add("--gib", nargs="+", type=int, help="sizes of the card; each workload's own")
    add("--device", default="sim", choices=("sim", "cuda"), help="sim: hollow")
    add("--card", default="h100", help="h200, h100, a100, rtx4090 or a10, where hollow")
    add("--expandable", choices=("no", "yes", "both"), default="both")
    add("--steps", type=int, default=120)
    add("--seed", type=int, default=1)
    add("--out", default="docs/results/scale/scale.csv", help="where rows are kept")
    add("--resume", action="store_true", help="keep the rows that are there")
    return parser


def _places(options: argparse.Namespace) -> Iterable[tuple[str, int, bool]]:
    allocators = {"no": (False,), "yes": (True,), "both": (False, True)}
    for workload in options.workloads:
        for gib in options.gib or WORKLOADS[workload].cards:
            for expandable in allocators[options.expandable]:
                yield workload, gib, expandable


def _run(
    place: tuple[str, int, bool],
    strategy: str,
    options: argparse.Namespace,
    settings: RunSettings,
) -> ScaleRow:
    workload, gib, expandable = place
    task = {"workload": workload, "gib": gib, "strategy": strategy}
    card = options.card if options.device == "sim" else "itself"
    task |= {"device": options.device, "card": card}
    task |= {"steps": options.steps, "seed": options.seed}
    try:
        (told,) = run_child(
            "benchmarks.scale.run",
            task,
            settings.threads,
            environment=_EXPANDABLE if expandable else {},
        )
    except RunFailedError as error:
        told = _failed(error)
    return ScaleRow(
        workload=workload,
        gib=gib,
        card=card,
        expandable=expandable,
        strategy=strategy,
        **told,
        **settings.provenance(),
    )


def _failed(error: RunFailedError) -> dict[str, Any]:
    none = dict.fromkeys(
        ("seconds", "kernel_seconds", "allocator_seconds", "n_kernels", "cpu_seconds")
    )
    message = str(error).splitlines()[0][:300]
    numbers = {"n_steps": 0, "ooms": 0, "flushes": 0, "reserved_bytes": 0}
    return {**none, **numbers, "left_out": "", "error": message}


def _base(rows: Iterable[ScaleRow], row: ScaleRow) -> float | None:
    """Return the seconds of checkpointing everything in the same place."""
    of_place = {each.strategy: each for each in rows if each.place == row.place}
    base = of_place.get("hf") or of_place.get("full")
    return base.seconds if base else None


def _line(row: ScaleRow, base: float | None) -> str:
    name = f"{row.workload:18} {row.gib:3} GiB {'exp' if row.expandable else '   '}"
    name = f"{name} {row.strategy:7}"
    if row.error:
        return f"{name} {row.error}"
    if row.seconds is None or row.allocator_seconds is None:
        return f"{name} nothing fits"
    ratio = f"{row.seconds / base:5.2f}" if base else "    –"
    text = (
        f"{name} {1e3 * row.seconds:7.1f} ms {ratio} "
        f"allocator {row.allocator_seconds / row.seconds:5.1%} "
        f"oom {row.ooms:2} flush {row.flushes:2} {row.reserved_bytes / 2**30:5.1f} GiB "
        f"cpu {1e3 * (row.cpu_seconds or 0):4.0f} ms"
    )
    if row.over is None:
        return text
    return (
        f"{text} over {row.over} rerun {row.reruns} plan {row.first_plan} "
        f"{row.planned_share or 0:4.0%} keep {row.kept_share or 0:4.0%} "
        f"p99 {_percent(row.error_p99)} used {_percent(row.headroom_used)} "
        f"frag {row.fragmentation or 0:.3f} {row.left_out} {row.reasons}"
    )


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.2%}"


if __name__ == "__main__":
    sys.exit(main())
