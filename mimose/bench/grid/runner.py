"""Runs the grid: all strategies of a workload take turns on the same batches.

Each strategy trains at each budget in a separate process, with the same weights,
batches, threads and allocator settings. They take turns of a few steps, in a rotating
order, so that other load of the machine affects all of them. Then FLOPs are counted for
strategies that do not report them. At last, chosen strategies train once more under a
hard limit, each alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from mimose.bench.child import Child, RunFailedError
from mimose.bench.device import kind_of
from mimose.bench.grid.strategies import STRATEGIES
from mimose.bench.grid.traces import Sizes
from mimose.bench.grid.worker import Task
from mimose.bench.grid.workloads import workload_named
from mimose.bench.machine import available_bytes
from mimose.bench.rows import Row, RunSettings
from mimose.exceptions import first_line

INTERRUPTED = "interrupted"
"""The `problem` of a strategy that was stopped from outside."""
_LINES = 10
"""The number of lines in a log about the progress."""
TURN = 4
"""The number of steps in a turn of a strategy."""
_MODULE = "mimose.bench.grid.worker"
_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class GridRow(Row):
    """One training step; or, with `problem`, why there is none."""

    workload: str
    scale: str
    """``"tiny"``, ``"small"`` or ``"base"``."""
    is_synthetic: bool
    """Whether the lengths were generated."""
    strategy: str
    budget_share: float | None
    """The budget between recomputing everything on the longest batch (0) and keeping
    everything (1); None for strategies without a budget."""
    headroom_bytes: int | None
    """The budget minus what is held when training begins."""
    step: int
    """The step from 0; -1 if the strategy did not run at all."""
    is_measured: bool
    """Whether the warm-up is over."""
    sizes: str
    """The batch's sizes by name, as JSON."""
    phase: str = ""
    """The phase of the step; empty without a session."""
    plan: str = ""
    """A letter for each layer call: k keep, r recompute; empty if not known."""
    base_bytes: int = 0
    """What is held before training begins, with the optimizer's state."""
    start_bytes: int = 0
    """What is held when the step begins."""
    peak_bytes: int = 0
    """The peak of forward, backward and optimizer step."""
    reserved_bytes: int = 0
    """The most reserved memory so far; on a CPU the peak."""
    host_bytes: int | None = None
    """The most pinned host memory of the process so far, in blocks of powers of two; 0
    on a CPU, None if the accelerator does not report it."""
    predicted_growth_bytes: float | None = None
    seconds: float = 0.0
    """Seconds of forward, backward and optimizer step."""
    plan_seconds: float = 0.0
    cache_hit: bool = False
    recomputed_flops: int | None = None
    """Recomputed FLOPs; None if they cannot be counted."""
    retries: int = 0
    loss: float = float("nan")
    problem: str = ""
    """Why the strategy did not run or stopped; empty if it did not."""
    dtype: str
    is_limited: bool = False
    """Whether the system enforced the budget."""
    accuracy: float | None = None
    """Accuracy on held-out data after the last step; None if there is none."""

    @property
    def growth_bytes(self) -> int:
        """The peak minus what was held before training began."""
        return self.peak_bytes - self.base_bytes

    @property
    def shape(self) -> Mapping[str, int]:
        """The batch's sizes by name."""
        sizes: Mapping[str, int] = json.loads(self.sizes)
        return sizes


@dataclass(frozen=True, slots=True)
class Cell:
    """A strategy at one budget, or without a budget."""

    strategy: str
    share: float | None = None
    headroom_bytes: int | None = None
    is_limited: bool = False
    """Whether the system enforces the budget."""


_PLAIN, _FULL = Cell("none"), Cell("full")


@dataclass(frozen=True, kw_only=True, slots=True)
class GridSettings(RunSettings):
    """What a grid compares, and on which batches."""

    workloads: tuple[str, ...]
    strategies: tuple[str, ...]
    budgets: tuple[float, ...] = (0.35, 0.5, 0.7)
    """Budgets between recomputing everything (0) and keeping everything (1)."""
    limited: tuple[str, ...] = ()
    """Strategies that train once more at each budget, alone, with the budget as a hard
    limit of their process; on a CPU."""
    steps: int = 60
    """Measured steps of each cell."""
    warm_up: int = 12
    """Steps before them, to learn and to fill caches."""
    scale: str = "tiny"
    dtype: str = "float32"
    trace: tuple[Sizes, ...] = ()
    """Sizes of the batches, instead of the workloads' own."""

    @property
    def n_batches(self) -> int:
        """The number of batches of each strategy."""
        return self.warm_up + self.steps

    @property
    def n_steps(self) -> int:
        """The number of steps of a workload if nothing fails."""
        n_limited = len(self.limited) * len(self.budgets)
        return (len(self.places()) + n_limited) * self.n_batches

    def cells(self, growths: Mapping[str, int]) -> list[Cell]:
        """Return the cells that take turns.

        Args:
            growths: Bytes that the longest batch needs: ``"none"`` with everything
                kept, ``"full"`` with everything recomputed.
        """
        return [
            Cell(name, share, None if share is None else _headroom(share, growths))
            for name, share in self.places()
        ]

    def limited_cells(self, growths: Mapping[str, int]) -> list[Cell]:
        """Return the cells that run afterwards, under a hard limit."""
        return [
            Cell(name, share, _headroom(share, growths), is_limited=True)
            for share in self.budgets
            for name in self.limited
        ]

    def places(self) -> list[tuple[str, float | None]]:
        """Return each strategy, at each budget if it depends on the budget."""
        return [
            (name, share)
            for name in self.strategies
            for share in (self.budgets if STRATEGIES[name].heeds_budget else (None,))
        ]


def _headroom(share: float, growths: Mapping[str, int]) -> int:
    least, most = growths["full"], growths["none"]
    return least + int(share * (most - least))


def sizes_of(settings: GridSettings, workload: str) -> list[Sizes]:
    """Return the sizes of a workload's batches, the same for every strategy.

    Raises:
        ValueError: See `raise_if_impossible`.
    """
    raise_if_impossible(settings, workload)
    own = workload_named(workload)
    if own.trace is not None and not settings.trace:
        return own.trace(np.random.default_rng(settings.seed), settings.n_batches)
    batches = itertools.islice(itertools.cycle(settings.trace), settings.n_batches)
    return [{name: each[name] for name in own.sizes} for each in batches]


def raise_if_impossible(settings: GridSettings, workload: str) -> None:
    """Check that a workload exists, and can run with the given lengths.

    Raises:
        ValueError: There is no such workload, or lengths are missing, or the given ones
            have other names.
    """
    own = workload_named(workload)
    if settings.trace and not set(own.sizes) <= settings.trace[0].keys():
        msg = (
            f"the given lengths have {', '.join(settings.trace[0])}, and {workload} "
            f"needs {', '.join(own.sizes)}"
        )
        raise ValueError(msg)
    if own.trace is None and not settings.trace:
        names = ",".join(own.sizes)
        msg = (
            f"{own.name} has no lengths, and what is best depends on them: "
            f"give those you train on, with --lengths mine.csv, a file with the line "
            f"'{names}' and then a line of numbers for each batch"
        )
        raise ValueError(msg)


class WorkloadRun:
    """Runs all strategies on one workload.

    Args:
        settings: What to compare.
        workload: Its name.
        on_step: Called before each step.
        on_skip: Called with the number of steps that a failed strategy will not run.
    """

    def __init__(
        self,
        settings: GridSettings,
        workload: str,
        on_step: Callable[[Cell], None] = lambda _: None,
        on_skip: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._settings = settings
        self._workload = workload_named(workload)
        self._sizes = sizes_of(settings, workload)
        self._longest: Sizes | None = None
        self._is_on_cpu = kind_of(settings.device) == "cpu"
        self._on_step, self._on_skip = on_step, on_skip
        self._stack = contextlib.ExitStack()
        self._shared = ""
        self._children: dict[Cell, Child] = {}
        self._rows: dict[Cell, list[GridRow]] = {}

    def run(self) -> None:
        """Run everything. After an error, `rows` still has the finished steps.

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
            for cell in self._children:
                own = self._rows.setdefault(cell, [])
                step = min(len(own), self._settings.n_batches - 1)
                own.append(self._failure(cell, step, INTERRUPTED))
            raise

    @property
    def rows(self) -> list[GridRow]:
        """The rows so far, by strategy and budget. FLOPs are counted at the end."""
        names = [*self._settings.strategies, *self._settings.limited]
        cells = sorted(
            self._rows,
            key=lambda c: (c.is_limited, names.index(c.strategy), c.share or 0),
        )
        return [row for cell in cells for row in self._rows[cell]]

    def _probe(self) -> dict[str, int]:
        """Return the bytes of the longest batch, everything kept and recomputed.

        Raises:
            RunFailedError: Memory runs out, or there is nothing to plan.
        """
        growths: dict[str, int] = {}
        pair = _PLAIN, _FULL
        for cell in pair if self._is_on_cpu else ():  # at once
            self._start(cell)
        for cell in pair:
            child = self._children.get(cell) or self._start(cell)
            child.receive()
            said = child.ask(["probe", {}])
            self._longest = self._longest or said["longest"]
            growths[cell.strategy] = said["growth_bytes"]
        if "full" not in self._settings.strategies:
            self._children.pop(_FULL).close()
        if growths["none"] <= growths["full"]:
            msg = (
                f"there is nothing to plan: on the longest batch a step grows by "
                f"{growths['none']} bytes with every layer kept, and by "
                f"{growths['full']} with every layer recomputed"
            )
            raise RunFailedError(msg)
        private, available = said["private_bytes"], available_bytes()
        n_more = len(self._settings.places()) - len(self._children)
        if private is not None and available is not None:
            each = private + growths["none"]
            if n_more * each > available:
                msg = (
                    f"{n_more} more processes of {each / _GIB:.1f} GiB each need more "
                    f"than the {available / _GIB:.1f} GiB that are available: choose "
                    f"fewer strategies or budgets, or a smaller scale"
                )
                raise RunFailedError(msg)
        return growths

    def _start_all(self, growths: Mapping[str, int]) -> None:
        cells = self._settings.cells(growths)
        self._start_each([cell for cell in cells if cell not in self._children])

    def _start_each(self, started: Sequence[Cell]) -> None:
        for cell in started:
            with self._noting_failure(cell, -1):
                self._start(cell)
                if not self._is_on_cpu:  # they share its memory
                    self._children[cell].receive()
        for cell in started:
            if cell in self._children and self._is_on_cpu:
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
        values = dataclasses.asdict(task)
        child = Child(cell.strategy, _MODULE, values, settings.threads)
        self._stack.callback(child.close)
        self._children[cell] = child
        return child

    def _take_turns(self) -> None:
        order = list(self._children)
        for first in range(0, self._settings.n_batches, TURN):
            last = min(first + TURN, self._settings.n_batches)
            for cell in order:
                for step in range(first, last):
                    if cell in self._children:
                        self._on_step(cell)
                        with self._noting_failure(cell, step):
                            said = self._children[cell].ask(["step", {"index": step}])
                            row = self._row(cell, step, **said)
                            self._rows.setdefault(cell, []).append(row)
                if not self._is_on_cpu and cell in self._children:
                    with self._noting_failure(cell, last - 1):  # the others' memory
                        self._children[cell].ask(["rest", {}])
            order = order[1:] + order[:1]

    def _count(self) -> None:
        """Count the FLOPs that strategies do not report, outside the timed steps.

        Recomputed FLOPs are those of a forward and backward, minus those of plain
        training on the same batch. Equal steps are counted once.
        """
        if _PLAIN not in self._children:
            return
        plain: dict[str, int | None] = {}
        for cell in [c for c in self._children if c != _PLAIN]:
            own: dict[tuple[str, str, str], int | None] = {}
            for i, row in enumerate(self._rows.get(cell, [])):
                if row.recomputed_flops is not None or row.problem:
                    continue
                if row.sizes not in plain:
                    plain[row.sizes] = self._flops(_PLAIN, row.step, "")
                case = row.sizes, row.phase, row.plan
                if case not in own:
                    own[case] = self._flops(cell, row.step, row.phase)
                total, base = own[case], plain[row.sizes]
                if total is not None and base is not None:
                    counted = dataclasses.replace(row, recomputed_flops=total - base)
                    self._rows[cell][i] = counted
        self._rows[_PLAIN] = [
            dataclasses.replace(row, recomputed_flops=0)
            for row in self._rows.get(_PLAIN, [])
        ]

    def _flops(self, cell: Cell, step: int, phase: str) -> int | None:
        """Count the FLOPs of a forward and backward; None if it fails."""
        message = ["count", {"index": step, "phase": phase}]
        try:
            flops: int | None = self._children[cell].ask(message)["flops"]
        except RunFailedError:
            return None
        return flops

    def _limit(self, cells: Sequence[Cell]) -> None:
        """Run strategies with the budget as a hard limit, which a device has once."""
        for group in [cells] if self._is_on_cpu else [[cell] for cell in cells]:
            while self._children:
                self._children.popitem()[1].close()
            self._start_each(group)
            self._take_turns()

    @contextlib.contextmanager
    def _noting_failure(self, cell: Cell, step: int) -> Iterator[None]:
        """Drop a strategy that fails, and add a row with the reason."""
        try:
            yield
        except RunFailedError as error:
            child = self._children.pop(cell, None)
            if child is not None:
                child.close()
            row = self._failure(cell, step, first_line(error))
            self._rows.setdefault(cell, []).append(row)
            self._on_skip(self._settings.n_batches - 1 - step)

    def _row(self, cell: Cell, step: int, **said: Any) -> GridRow:
        settings = self._settings
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
            **said,
            **settings.provenance(),
        )

    def _failure(self, cell: Cell, step: int, why: str) -> GridRow:
        sizes = "{}" if step < 0 else json.dumps(self._sizes[step])
        return self._row(cell, step, sizes=sizes, problem=why)


def measure(
    settings: GridSettings,
    keep: Callable[[list[GridRow]], None],
    command: str,
) -> int:
    """Run workloads one after the other, with a progress bar, or a few lines in a log.

    Args:
        settings: What to compare.
        keep: Called with a workload's rows, even if its run fails.
        command: The command's name in error messages.

    Returns:
        The exit status: 0; 1 if a workload could not run; 130, as a shell expects,
        after Ctrl-C.
    """
    console = Console(stderr=True, soft_wrap=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps, about"),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=console,
        disable=not console.is_terminal,
        speed_estimate_period=3600.0,  # strategies take turns at different speeds
    )
    n_steps = len(settings.workloads) * settings.n_steps
    line = bar.add_task("starting", total=n_steps)

    def skip(n: int) -> None:
        nonlocal n_steps
        n_steps -= n
        bar.update(line, total=n_steps)

    def tell(cell: Cell) -> None:
        share = "" if cell.share is None else f" at {cell.share:g}"
        limit = ", a hard limit" if cell.is_limited else ""
        text = f"{workload}: {cell.strategy}{share}{limit}"
        bar.update(line, advance=1, description=text)
        done = int(bar.tasks[0].completed)
        is_due = done * _LINES // n_steps > (done - 1) * _LINES // n_steps
        if is_due and bar.disable:  # a log shows no bar
            left = timedelta(seconds=bar.tasks[0].time_remaining or 0)
            console.print(f"{done} of {n_steps} steps, about {left} left ({text})")

    status = 0
    try:
        with bar:
            if bar.disable:
                console.print(f"{n_steps} steps in all; loading and probing first")
            for workload in settings.workloads:
                run = WorkloadRun(settings, workload, tell, skip)
                try:
                    run.run()
                except RunFailedError as error:
                    text = f"{workload}: {first_line(error)}"
                    sys.stderr.write(f"mimose {command}: {text}\n")
                    status = 1
                finally:
                    keep(run.rows)
    except KeyboardInterrupt:
        status = 130
    return status
