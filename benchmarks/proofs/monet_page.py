"""The table of `monet` as the documentation has it.

python -m benchmarks.proofs.monet_page docs/results/cpu/monet.csv
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.proofs.monet import MonetRow
from benchmarks.proofs.monet_published import published
from benchmarks.proofs.numbers import MIB
from mimose.bench.rows import read

_HEAD = (
    "| model, batch × pixels or tokens | plain, MiB | asked | growth | time | "
    "with `marginal` | FLOPs | MONeT's at that memory | planners, ms |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def page(rows: Sequence[MonetRow]) -> str:
    """Return a line for each model and target, with both planners' plans.

    Args:
        rows: Those of one run, the optimum's and then ``marginal``'s of each target.
    """
    lines = [_HEAD]
    for row in rows:
        if row.planner != "marginal":
            lines.append(_line(row, _twin(rows, row)))
    return "\n".join(lines)


def _twin(rows: Sequence[MonetRow], row: MonetRow) -> MonetRow | None:
    """Return the same target's row by ``marginal``; None where it was not asked."""
    place = row.model, row.target, "marginal"
    return next((r for r in rows if (r.model, r.target, r.planner) == place), None)


def _line(row: MonetRow, other: MonetRow | None) -> str:
    times = [row.planner_seconds, *([other.planner_seconds] if other else [])]
    cells = (
        f"{row.model}, {row.batch} × {row.length}",
        f"{row.plain_growth_bytes / MIB:.0f}",
        row.target if row.is_reached else f"{row.target}, not reached",
        f"{row.share:.1%}",
        f"{row.overhead:+.1%}",
        "" if other is None else f"{other.overhead:+.1%}",
        f"{row.recomputed_flops / row.plain_flops:.1%}",
        _published(row),
        " / ".join(f"{1000 * seconds:.1f}" for seconds in times if seconds),
    )
    return f"| {' | '.join(cells)} |"


def _published(row: MonetRow) -> str:
    theirs = published(row.model, row.share)
    if theirs is None:
        return "none"
    if theirs.share > row.share:
        return f"{theirs.overhead:+.1%}, its least, at {theirs.share:.1%}"
    return f"{theirs.overhead:+.1%}"


if __name__ == "__main__":
    sys.stdout.write(page(read(Path(sys.argv[1]), MonetRow)) + "\n")
