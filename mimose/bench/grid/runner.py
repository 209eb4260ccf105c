"""Running the grid: all strategies of a workload take turns on the same batches.

Each strategy, at each budget it heeds, trains in a process of its own, with the same
weights, batches, threads and allocator settings. They take turns by a few steps each,
in an order that rotates, so that whatever else the machine does meets all of them.
Then FLOPs are counted where a strategy does not tell them (`recomputation`), and those
that are to meet a hard limit train once more, each alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mimose.bench.child import Child, RunFailedError
from mimose.bench.device import kind_of
from mimose.bench.grid.recomputation import PLAIN, fill_in
from mimose.bench.grid.registry import STRATEGIES
from mimose.bench.grid.rows import INTERRUPTED as INTERRUPTED
from mimose.bench.grid.rows import NOTHING as NOTHING
from mimose.bench.grid.rows import GridRow as GridRow
from mimose.bench.grid.settings import Cell as Cell
from mimose.bench.grid.settings import GridSettings as GridSettings
from mimose.bench.grid.settings import refuse_workload as refuse_workload
from mimose.bench.grid.settings import sizes_of as sizes_of
from mimose.bench.grid.summary import TURN
from mimose.bench.grid.traces import Sizes
from mimose.bench.grid.worker import Task
from mimose.bench.grid.workloads import workload_named
from mimose.bench.machine import available_bytes
from mimose.exceptions import first_line

_MODULE = "mimose.bench.grid.worker"
_GIB = 2**30


class WorkloadRun:
    """All strategies on one workload; `on_step` is told the cell before each step."""

    def __init__(
        self,
        settings: GridSettings,
        workload: str,
        on_step: Callable[[Cell], None] = lambda _: None,
    ) -> None:
        self._settings = settings
        self._workload = workload_named(workload)
        self._sizes = sizes_of(settings, workload)
        self._longest: Sizes | None = None
        self._kind = kind_of(settings.device)
        self._on_step = on_step
        self._stack = contextlib.ExitStack()
        self._shared = ""
        self._children: dict[Cell, Child] = {}
        self._rows: dict[Cell, list[GridRow]] = {}

    def run(self) -> None:
        """Run all of it; what ran is in `rows`, whatever ends it.

        Raises:
            RunFailedError: There is nothing to compare.
        """
        try:
            with self._stack:
                folder = tempfile.TemporaryDirectory(prefix="mimose-bench-")
                self._shared = self._stack.enter_context(folder)
                self._workload.prepare(Path(self._shared))
                growths = self._probe()
                self._start_all(growths)
                self._take_turns()
                self._count()
                self._limit(self._settings.limited_cells(growths))
        except RunFailedError:
            raise
        except BaseException:
            self._note_interruption()
            raise

    def _note_interruption(self) -> None:
        for cell in self._children:
            own = self._rows.setdefault(cell, [])
            step = min(len(own), self._settings.n_batches - 1)
            own.append(self._failure(cell, step, INTERRUPTED))

    @property
    def rows(self) -> list[GridRow]:
        """What ran so far, by strategy and budget; FLOPs are counted at the end."""
        names = [*self._settings.strategies, *self._settings.limited]
        cells = sorted(
            self._rows,
            key=lambda c: (c.is_limited, names.index(c.strategy), c.share or 0),
        )
        return [row for cell in cells for row in self._rows[cell]]

    # -------------------------------------------------------------- beginning

    def _probe(self) -> dict[str, int]:
        """Return what the longest batch needs, everything kept and recomputed.

        Where it cannot be kept, that is what the device has.
        """
        growths: dict[str, Any] = {}
        rooms: list[int | None] = []
        for name in ("none", "full"):
            child = self._start(Cell(name, None, None))
            child.receive()
            said = child.ask(["probe", {}])
            self._longest = said["longest"]
            growths[name] = said["growth_bytes"]
            rooms.append(said["room_bytes"])
        if None in growths.values():
            growths["none"] = self._room(growths, rooms)
        if "full" not in self._settings.strategies:
            self._children.pop(Cell("full", None, None)).close()
        if growths["none"] <= growths["full"]:
            msg = (
                f"there is nothing to plan: on the longest batch a step grows by "
                f"{growths['none']} bytes with every layer kept, and by "
                f"{growths['full']} with every layer recomputed"
            )
            raise RunFailedError(msg)
        private = said["private_bytes"]
        self._refuse_too_many(None if private is None else private + growths["none"])
        return growths

    def _room(self, growths: Mapping[str, Any], rooms: Sequence[int | None]) -> int:
        """Return what a step can have where everything kept is too much.

        The other strategies' processes will take of it what the second one took.
        """
        longest = json.dumps(self._longest)
        before, after = rooms
        if growths["full"] is None or before is None or after is None:
            msg = f"memory ran out on the longest batch, {longest}"
            raise RunFailedError(msg)
        if "full" not in self._settings.strategies:
            msg = (
                f"plain training runs out of memory on the longest batch, {longest}: "
                f"add full to the strategies, to compare the others with it"
            )
            raise RunFailedError(msg)
        n_more = self._settings.n_cells - len(rooms)
        return after - n_more * max(0, before - after)

    def _refuse_too_many(self, each_bytes: int | None) -> None:
        """Make sure that all processes can start beside each other on a CPU."""
        available = available_bytes()
        if self._kind != "cpu" or each_bytes is None or available is None:
            return
        n_more = self._settings.n_cells - len(self._children)
        if n_more * each_bytes > available:
            msg = (
                f"{n_more} more processes of {each_bytes / _GIB:.1f} GiB each need "
                f"more than the {available / _GIB:.1f} GiB that are available: choose "
                f"fewer strategies or budgets, or a smaller scale"
            )
            raise RunFailedError(msg)

    def _start_all(self, growths: Mapping[str, int]) -> None:
        started = []
        for cell in self._settings.cells(growths):
            why = STRATEGIES[cell.strategy].why_not(self._kind)
            if why:
                self._rows[cell] = [self._failure(cell, -1, why)]
            elif cell not in self._children:
                started.append(cell)
                with self._noting_failure(cell, -1):
                    self._start(cell)
                    if self._kind != "cpu":  # they share its memory
                        self._children[cell].receive()
        for cell in started:
            if cell in self._children and self._kind == "cpu":
                with self._noting_failure(cell, -1):
                    self._children[cell].receive()

    def _start(self, cell: Cell) -> Child:
        settings = self._settings
        task = Task(
            workload=self._workload.name,
            strategy=cell.strategy,
            scale=settings.scale,
            sizes=self._sizes,
            longest=self._longest,
            headroom_bytes=cell.headroom_bytes,
            is_limited=cell.is_limited,
            seed=settings.seed,
            device=settings.device,
            dtype=settings.dtype,
            threads=settings.threads,
            shared=self._shared,
        )
        child = Child(
            cell.strategy, _MODULE, dataclasses.asdict(task), settings.threads
        )
        self._stack.callback(child.close)
        self._children[cell] = child
        return child

    # -------------------------------------------------------------- training

    def _take_turns(self) -> None:
        order = list(self._children)
        for first in range(0, self._settings.n_batches, TURN):
            last = min(first + TURN, self._settings.n_batches)
            for cell in order:
                for step in range(first, last):
                    if cell in self._children:
                        self._on_step(cell)
                        with self._noting_failure(cell, step):
                            self._step(cell, step)
                self._rest(cell, last - 1)
            order = order[1:] + order[:1]

    def _step(self, cell: Cell, step: int) -> None:
        said = self._children[cell].ask(["step", {"index": step}])
        self._rows.setdefault(cell, []).append(self._row(cell, step, **said))

    def _rest(self, cell: Cell, step: int) -> None:
        """Have a strategy leave an accelerator's memory to the others."""
        if self._kind != "cpu" and cell in self._children:
            with self._noting_failure(cell, step):
                self._children[cell].ask(["rest", {}])

    def _count(self) -> None:
        """Count what strategies do not tell."""
        if PLAIN in self._children:
            rows = {cell: self._rows.get(cell, []) for cell in self._children}
            self._rows |= fill_in(rows, self._sizes, self._count_one)

    def _count_one(self, cell: Cell, step: int, phase: str) -> int | None:
        message = ["count", {"index": step, "phase": phase}]
        try:
            flops: int | None = self._children[cell].ask(message)["flops"]
        except RunFailedError:
            return None
        return flops

    def _limit(self, cells: Sequence[Cell]) -> None:
        """Let the system enforce the budget, on one strategy after another."""
        for cell in cells:
            while self._children:
                self._children.popitem()[1].close()
            with self._noting_failure(cell, -1):
                self._start(cell).receive()
            self._take_turns()

    # -------------------------------------------------------------- rows

    @contextlib.contextmanager
    def _noting_failure(self, cell: Cell, step: int) -> Iterator[None]:
        """Go on without a strategy that fails, and say in a row why."""
        try:
            yield
        except RunFailedError as error:
            child = self._children.pop(cell, None)
            if child is not None:
                child.close()
            row = self._failure(cell, step, first_line(error))
            self._rows.setdefault(cell, []).append(row)

    def _row(self, cell: Cell, step: int, **said: Any) -> GridRow:
        settings = self._settings
        values: dict[str, Any] = {"problem": "", **said, **settings.provenance()}
        return GridRow(
            workload=self._workload.name,
            scale=settings.scale,
            is_synthetic=self._workload.is_synthetic and not settings.trace,
            strategy=cell.strategy,
            budget_share=cell.share,
            headroom_bytes=cell.headroom_bytes,
            is_limited=cell.is_limited,
            step=step,
            is_measured=step >= settings.warm_up,
            dtype=settings.dtype,
            **values,
        )

    def _failure(self, cell: Cell, step: int, why: str) -> GridRow:
        sizes = "{}" if step < 0 else json.dumps(self._sizes[step])
        return self._row(cell, step, **NOTHING, sizes=sizes, problem=why)
