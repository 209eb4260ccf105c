"""How far a grid is, while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from mimose.bench.grid.settings import Cell


@contextlib.contextmanager
def progress(n_steps: int) -> Iterator[Callable[[str, Cell], None]]:
    """Show which step is running, and about how long the rest takes.

    Yields:
        What is to be told of each step: its workload and cell.
    """
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    line = bar.add_task("starting", total=n_steps)

    def tell(workload: str, cell: Cell) -> None:
        share = "" if cell.share is None else f" at {cell.share:g}"
        limit = ", a hard limit" if cell.is_limited else ""
        description = f"{workload}: {cell.strategy}{share}{limit}"
        bar.update(line, advance=1, description=description)

    with bar:
        yield tell
