"""Running the grid: all strategies of a workload take turns on the same batches.

Each strategy, at each budget it heeds, trains in a process of its own, with the same
weights, batches, threads and allocator settings. They take turns by a few steps each,
in an order that rotates, so that whatever else the machine does meets all of them.
Then, with the clock off, FLOPs are counted where a strategy does not tell them: those
of a forward and backward, less those of plain training on the same batch (see `flops`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from mimose.bench.grid.flops import count_all
from mimose.bench.grid.registry import STRATEGIES
from mimose.bench.grid.rows import INTERRUPTED, GridRow
from mimose.bench.grid.summary import TURN
from mimose.bench.grid.traces import Sizes
from mimose.bench.grid.trainer import Task
from mimose.bench.grid.workload import Workload
from mimose.bench.grid.workloads import workload_named
from mimose.bench.machine import available_bytes, describe_machine
from mimose.bench.process import Child, StrategyFailedError

_Case: TypeAlias = tuple[str, str, str]
"""Of a step: its sizes, phase and plan."""

_MODULE = "mimose.bench.grid.trainer"
_GIB = 2**30
_AT_ONCE = 2
"""Processes that count FLOPs at a time: it takes memory, and the clock is off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GridSettings:
    """What is compared."""

    workloads: tuple[str, ...]
    strategies: tuple[str, ...]
    budgets: tuple[float, ...] = (0.35, 0.5, 0.7)
    """Shares of the way from recomputing everything to keeping everything."""
    steps: int = 60
    """Measured steps a cell."""
    warm_up: int = 12
    """Steps before them, told apart: for learning, and for caches to fill."""
    scale: str = "tiny"
    seed: int = 0
    threads: int = 2
    device: str = "cpu"
    dtype: str = "float32"
    trace: tuple[Sizes, ...] = ()
    """Sizes of the batches, in place of the workloads' own."""
    date: str = field(default_factory=lambda: _now())

    @property
    def n_batches(self) -> int:
        """Batches a strategy trains on."""
        return self.warm_up + self.steps


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def sizes_of(settings: GridSettings, workload: str) -> list[Sizes]:
    """Return the sizes of a workload's batches, the same for every strategy.

    Raises:
        ValueError: As `refuse_workload` does.
    """
    refuse_workload(settings, workload)
    own = workload_named(workload)
    if own.trace is not None and not settings.trace:
        generator = np.random.default_rng(settings.seed)
        return own.trace(settings.scale)(generator, settings.n_batches)
    names = own.sizes
    batches = itertools.islice(itertools.cycle(settings.trace), settings.n_batches)
    return [{name: each[name] for name in names} for each in batches]


def refuse_workload(settings: GridSettings, workload: str) -> None:
    """Make sure that a workload is there, and can be run with the given lengths.

    Raises:
        ValueError: There is no such workload, or the given lengths are of another kind,
            or it has none.
    """
    own = workload_named(workload)
    if settings.trace and not set(own.sizes) <= settings.trace[0].keys():
        msg = (
            f"the given lengths have {', '.join(settings.trace[0])}, and {workload} "
            f"needs {', '.join(own.sizes)}"
        )
        raise ValueError(msg)
    if own.trace is None and not settings.trace:
        raise ValueError(_no_lengths(own))


def _no_lengths(workload: Workload) -> str:
    """Say how to give the sizes that a model of the user's own is trained on."""
    names = ",".join(workload.sizes)
    msg = (
        f"{workload.name} has no lengths of its own, and what is best depends on them: "
        f"give those you train on, with --lengths mine.csv, a file with the line "
        f"'{names}' and then a line of numbers for each batch"
    )
    if workload.sizes == ("length",):
        msg += ", or with --dataset texts.jsonl --column text, from your texts"
    return msg


@dataclass(frozen=True, slots=True)
class Cell:
    """A strategy at one budget; None for those that know no budget."""

    strategy: str
    share: float | None
    headroom_bytes: int | None


class WorkloadRun:
    """All strategies on one workload.

    Args:
        settings: What is compared.
        workload: Which of the workloads.
        on_step: Is told of each step before it runs: the cell.
    """

    def __init__(
        self,
        settings: GridSettings,
        workload: str,
        on_step: Callable[[Cell], None] = lambda _: None,
    ) -> None:
        self._settings = settings
        self._name = workload
        self._sizes = sizes_of(settings, workload)
        self._longest: Sizes | None = None
        self._kind = settings.device.partition(":")[0]
        self._is_synthetic = workload_named(workload).is_synthetic
        self._on_step = on_step
        self._stack = contextlib.ExitStack()
        self._shared = ""
        self._machine = describe_machine(settings.device)
        self._children: dict[Cell, Child] = {}
        self._rows: dict[Cell, list[GridRow]] = {}

    def run(self) -> None:
        """Run all of it; what ran is in `rows`, whatever ends it.

        Raises:
            StrategyFailedError: There is nothing to compare.
        """
        try:
            with self._stack:
                folder = tempfile.TemporaryDirectory(prefix="mimose-bench-")
                self._shared = self._stack.enter_context(folder)
                self._start_all()
                self._take_turns()
                self._count()
        except StrategyFailedError:
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
        names = self._settings.strategies
        cells = sorted(
            self._rows, key=lambda c: (names.index(c.strategy), c.share or 0)
        )
        return [row for cell in cells for row in self._rows[cell]]

    def _start_all(self) -> None:
        growths = self._probe()
        for cell in self._cells(growths):
            why = STRATEGIES[cell.strategy].why_not(self._kind)
            if why:
                self._rows[cell] = [self._failure(cell, -1, why)]
            elif cell not in self._children:
                with self._noting_failure(cell, -1):
                    self._start(cell)
                    if self._kind != "cpu":  # they share its memory
                        self._children[cell].receive()
        for cell in list(self._children):
            if cell.strategy not in growths and self._kind == "cpu":
                with self._noting_failure(cell, -1):
                    self._children[cell].receive()

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
            raise StrategyFailedError(msg)
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
            raise StrategyFailedError(msg)
        if "full" not in self._settings.strategies:
            msg = (
                f"plain training runs out of memory on the longest batch, {longest}: "
                f"add full to the strategies, to compare the others with it"
            )
            raise StrategyFailedError(msg)
        n_more = n_cells(self._settings) - len(rooms)
        return after - n_more * max(0, before - after)

    def _refuse_too_many(self, each_bytes: int | None) -> None:
        """Make sure that all processes can start beside each other on a CPU."""
        available = available_bytes()
        if self._kind != "cpu" or each_bytes is None or available is None:
            return
        n_more = n_cells(self._settings) - len(self._children)
        if n_more * each_bytes > available:
            msg = (
                f"{n_more} more processes of {each_bytes / _GIB:.1f} GiB each need "
                f"more than the {available / _GIB:.1f} GiB that are available: choose "
                f"fewer strategies or budgets, or a smaller scale"
            )
            raise StrategyFailedError(msg)

    def _cells(self, growths: Mapping[str, int]) -> Iterator[Cell]:
        room = growths["none"] - growths["full"]
        for name in self._settings.strategies:
            if not STRATEGIES[name].heeds_budget:
                yield Cell(name, None, None)
                continue
            for share in self._settings.budgets:
                yield Cell(name, share, growths["full"] + int(share * room))

    def _start(self, cell: Cell) -> Child:
        settings = self._settings
        task = Task(
            workload=self._name,
            strategy=cell.strategy,
            scale=settings.scale,
            sizes=self._sizes,
            longest=self._longest,
            headroom_bytes=cell.headroom_bytes,
            seed=settings.seed,
            device=settings.device,
            dtype=settings.dtype,
            threads=settings.threads,
            shared=self._shared,
        )
        child = Child(
            cell.strategy, _MODULE, settings.threads, dataclasses.asdict(task)
        )
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

    @contextlib.contextmanager
    def _noting_failure(self, cell: Cell, step: int) -> Iterator[None]:
        """Go on without a strategy that fails, and say in a row why."""
        try:
            yield
        except StrategyFailedError as error:
            child = self._children.pop(cell, None)
            if child is not None:
                child.close()
            row = self._failure(cell, step, str(error))
            self._rows.setdefault(cell, []).append(row)

    def _row(self, cell: Cell, step: int, **said: Any) -> GridRow:
        settings = self._settings
        values: dict[str, Any] = {"problem": "", **said, **self._machine}
        return GridRow(
            workload=self._name,
            scale=settings.scale,
            is_synthetic=self._is_synthetic and not settings.trace,
            strategy=cell.strategy,
            budget_share=cell.share,
            headroom_bytes=cell.headroom_bytes,
            step=step,
            is_measured=step >= settings.warm_up,
            seed=settings.seed,
            threads=settings.threads,
            dtype=settings.dtype,
            date=settings.date,
            **values,
        )

    def _failure(self, cell: Cell, step: int, why: str) -> GridRow:
        return self._row(
            cell,
            step,
            problem=why,
            sizes="{}" if step < 0 else json.dumps(self._sizes[step]),
            phase="",
            plan="",
            base_bytes=0,
            start_bytes=0,
            peak_bytes=0,
            reserved_bytes=0,
            host_bytes=None,
            predicted_growth_bytes=None,
            seconds=0.0,
            plan_seconds=0.0,
            cache_hit=False,
            recomputed_flops=None,
            retries=0,
            loss=float("nan"),
            load_average=0.0,
        )

    def _count(self) -> None:
        """Count what strategies do not tell: their FLOPs less plain training's."""
        if Cell("none", None, None) not in self._children:
            return
        pool = ThreadPoolExecutor(_AT_ONCE)
        try:
            jobs = {cell: pool.submit(self._flops, cell) for cell in self._children}
            flops = {cell: job.result() for cell, job in jobs.items()}
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        plain = flops[Cell("none", None, None)]
        for cell, own in flops.items():
            rows = self._rows.get(cell, [])
            for i, row in enumerate(rows):
                total, base = own.get(_case(row)), plain.get((row.sizes, "", ""))
                if cell.strategy == "none":
                    rows[i] = dataclasses.replace(row, recomputed_flops=0)
                elif total is not None and base is not None:
                    more = total - base
                    rows[i] = dataclasses.replace(row, recomputed_flops=more)

    def _flops(self, cell: Cell) -> dict[_Case, int | None]:
        """Count a strategy's FLOPs on every size, by phase and plan."""
        cases: dict[tuple[str, str], dict[_Case, int]] = {}
        for row in self._rows.get(cell, []):
            if row.recomputed_flops is None and not row.problem:
                alike = cases.setdefault((row.phase, row.plan), {})
                alike.setdefault(_case(row), row.step)
        found: dict[_Case, int | None] = {}
        for (phase, _), alike in cases.items():
            steps = list(alike.values())
            counted = count_all(
                [self._sizes[step] for step in steps],
                functools.partial(self._count_step, cell, steps, phase),
            )
            found.update(zip(alike, counted, strict=True))
        return found

    def _count_step(
        self, cell: Cell, steps: Sequence[int], phase: str, place: int
    ) -> int | None:
        message = ["count", {"index": steps[place], "phase": phase}]
        try:
            flops: int | None = self._children[cell].ask(message)["flops"]
        except StrategyFailedError:
            return None
        return flops


def _case(row: GridRow) -> _Case:
    """Return what a step's FLOPs depend on, under one strategy."""
    return row.sizes, row.phase, row.plan


def is_complete(settings: GridSettings, rows: Sequence[GridRow]) -> bool:
    """Whether one workload's rows are all that these settings ask for."""
    if any(row.problem == INTERRUPTED for row in rows):
        return False
    cells: dict[tuple[str, float | None], list[GridRow]] = {}
    for row in rows:
        cells.setdefault((row.strategy, row.budget_share), []).append(row)
    wanted = {
        (name, share)
        for name in settings.strategies
        for share in (settings.budgets if STRATEGIES[name].heeds_budget else (None,))
    }
    return wanted <= cells.keys() and all(
        len(own) == settings.n_batches or any(row.problem for row in own)
        for own in cells.values()
    )


def n_cells(settings: GridSettings) -> int:
    """Return how many strategies run, each at each budget it heeds."""
    kind = settings.device.partition(":")[0]
    runnable = [
        STRATEGIES[name]
        for name in settings.strategies
        if not STRATEGIES[name].why_not(kind)
    ]
    return sum(len(settings.budgets) if s.heeds_budget else 1 for s in runnable)
