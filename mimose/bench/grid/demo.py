"""``mimose demo``: trains on real text in four ways, then under a hard memory limit.

It is a grid of one workload at one budget. It shows a table, a picture and a few
sentences.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mimose.bench.grid.picture import draw_demo, headline
from mimose.bench.grid.runner import INTERRUPTED, GridRow, GridSettings, measure
from mimose.bench.grid.summary import CellSummary, new_table, publish, summarise
from mimose.bench.grid.workloads import DOCSTRINGS
from mimose.bench.rows import write
from mimose.bench.usage import UsageError

_LAST = 10
"""The final loss is the mean of this many steps."""
_MIB = 2**20
_GIGA = 1e9

SETTINGS = GridSettings(
    workloads=(DOCSTRINGS.name,),
    strategies=("none", "full", "static", "mimose"),
    budgets=(0.3,),
    limited=("none", "mimose"),
    steps=60,
    warm_up=0,
)
"""The four ways: keep everything; recompute everything; one plan, for the longest
batch; a plan for each length."""


def demo(settings: GridSettings, out: Path) -> int:
    """Run the demonstration, show its results and write them.

    Args:
        settings: `SETTINGS`, or a variant.
        out: The folder for ``rows.csv``, ``demo.png`` and ``summary.json``.

    Returns:
        The exit status: 0; 1 if something failed that should not; 130, as a shell
        expects, after Ctrl-C.

    Raises:
        UsageError: The folder cannot be made.
    """
    try:  # before minutes of measuring
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        msg = f"--out {out}: it cannot be a folder: {error.strerror}"
        raise UsageError(msg) from error
    rows: list[GridRow] = []
    status = measure(settings, rows.extend, "demo")
    _show(settings, rows, out, is_complete=status == 0)
    # Plain training is expected to fail under the hard limit.
    failed = (row for row in rows if row.problem)
    return status or int(any(r.strategy != "none" or not r.is_limited for r in failed))


def _show(
    settings: GridSettings, rows: Sequence[GridRow], out: Path, *, is_complete: bool
) -> None:
    """Write the files and print the results."""
    console = Console(soft_wrap=True, highlight=False)
    files = {"rows": out / "rows.csv", "summary": out / "summary.json"}
    write(files["rows"], GridRow, rows)
    ran = [row for row in rows if not row.problem]
    cells = summarise(ran)
    if not is_complete:
        console.print("Cut short: this is what was measured until then.")
    shown = [_summary(cell, ran) for cell in cells]
    if shown:
        files["picture"] = out / "demo.png"
        draw_demo(rows, files["picture"])
        console.print(_table(shown))
        console.print(f"{headline(cells)}.", markup=False)
    for sentence in _sentences(settings, rows):
        console.print(sentence, markup=False)
    document = {
        "is_complete": is_complete,
        "strategies": shown,
        "limit": dict(Counter(row.strategy for row in ran if row.is_limited)),
        "failures": _failures(rows),
    }
    publish(document, files, console)


def _summary(cell: CellSummary, rows: Sequence[GridRow]) -> dict[str, Any]:
    """Return the summary of a strategy's steps, as JSON values."""
    own = [r for r in rows if r.strategy == cell.strategy and not r.is_limited]
    return {
        **asdict(cell),
        "step_seconds": statistics.fmean(row.seconds for row in own),
        "loss": statistics.fmean(row.loss for row in own[-_LAST:]),
        "accuracy": own[-1].accuracy,
    }


def _failures(rows: Sequence[GridRow]) -> dict[str, str]:
    """Return why strategies failed, by ``"run/strategy"``."""
    return {
        f"{'limit' if row.is_limited else 'compare'}/{row.strategy}": row.problem
        for row in rows
        if row.problem not in ("", INTERRUPTED)
    }


def _table(shown: Sequence[Mapping[str, Any]]) -> Table:
    table = new_table(
        "strategy",
        *("growth\n(MiB)", "over\nbudget", "ms\na step", "time"),
        *("redone\n(GFLOP)", "loss", "accuracy"),
    )
    for cell in shown:
        ratio, accuracy = cell["seconds_ratio"], cell["accuracy"]
        table.add_row(
            cell["strategy"],
            f"{cell['largest_growth_bytes'] / _MIB:.0f}",
            f"{cell['steps_over']} of {cell['steps']}",
            f"{cell['step_seconds'] * 1e3:.0f}",
            "" if ratio is None else f"{ratio:.2f}×",
            f"{(cell['recomputed_flops'] or 0) / _GIGA:.0f}",
            f"{cell['loss']:.4f}",
            "" if accuracy is None else f"{accuracy:.1%}",
        )
    return table


def _sentences(settings: GridSettings, rows: Sequence[GridRow]) -> Iterator[str]:
    """Yield sentences on the budget, failures, and the hard limit."""
    headroom = next((row.headroom_bytes for row in rows if row.headroom_bytes), None)
    if headroom is not None:
        yield f"Budget: {headroom / _MIB:.0f} MiB for a step's growth."
    for key, problem in _failures(rows).items():
        if not key.startswith("limit/"):
            yield f"{key} failed: {problem}"
    steps = settings.n_batches
    for strategy in settings.limited:
        own = [row for row in rows if row.is_limited and row.strategy == strategy]
        taken = sum(not row.problem for row in own)
        if own and own[-1].problem not in ("", INTERRUPTED):
            yield (
                f"Hard limit: {strategy} failed at step {taken + 1} of {steps}: "
                f"{own[-1].problem}"
            )
        elif taken:
            verb = "finished" if taken == steps else "took"
            yield f"Hard limit: {strategy} {verb} {taken} of {steps} steps."
