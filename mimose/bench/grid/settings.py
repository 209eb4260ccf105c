"""What a grid compares: workloads, strategies, budgets, and on which batches."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mimose.bench.device import kind_of
from mimose.bench.grid.registry import STRATEGIES
from mimose.bench.grid.rows import INTERRUPTED, GridRow
from mimose.bench.grid.traces import Sizes
from mimose.bench.grid.workload import Workload
from mimose.bench.grid.workloads import workload_named
from mimose.bench.rows import RunSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class GridSettings(RunSettings):
    """What is compared."""

    workloads: tuple[str, ...]
    strategies: tuple[str, ...]
    budgets: tuple[float, ...] = (0.35, 0.5, 0.7)
    """Shares of the way from recomputing everything to keeping everything."""
    limited: tuple[str, ...] = ()
    """Strategies that train once more at each budget, alone, with the budget as a hard
    limit on their process; on a CPU."""
    steps: int = 60
    """Measured steps a cell."""
    warm_up: int = 12
    """Steps before them, told apart: for learning, and for caches to fill."""
    scale: str = "tiny"
    dtype: str = "float32"
    trace: tuple[Sizes, ...] = ()
    """Sizes of the batches, in place of the workloads' own."""

    @property
    def n_batches(self) -> int:
        """Batches a strategy trains on."""
        return self.warm_up + self.steps

    @property
    def n_cells(self) -> int:
        """How many strategies run beside each other, each at each budget it heeds."""
        return sum(
            len(self._budgets(name))
            for name in self.strategies
            if not STRATEGIES[name].why_not(kind_of(self.device))
        )

    @property
    def n_steps(self) -> int:
        """How many steps a workload takes if nothing fails."""
        return (self.n_cells + len(self.limited) * len(self.budgets)) * self.n_batches

    def cells(self, growths: Mapping[str, int]) -> list[Cell]:
        """Return what runs beside each other.

        Args:
            growths: What the longest batch needs, ``"none"`` with everything kept and
                ``"full"`` with everything recomputed, in bytes.
        """
        return [
            Cell(name, share, None if share is None else _headroom(share, growths))
            for name in self.strategies
            for share in self._budgets(name)
        ]

    def limited_cells(self, growths: Mapping[str, int]) -> list[Cell]:
        """Return what runs behind it, under a hard limit."""
        return [
            Cell(name, share, _headroom(share, growths), is_limited=True)
            for share in self.budgets
            for name in self.limited
        ]

    def is_complete(self, rows: Sequence[GridRow]) -> bool:
        """Whether one workload's rows are all that is asked for, limits aside."""
        if any(row.problem == INTERRUPTED for row in rows):
            return False
        cells: dict[tuple[str, float | None], list[GridRow]] = {}
        for row in rows:
            if not row.is_limited:
                cells.setdefault((row.strategy, row.budget_share), []).append(row)
        wanted = {
            (name, share) for name in self.strategies for share in self._budgets(name)
        }
        return wanted <= cells.keys() and all(
            len(own) == self.n_batches or any(row.problem for row in own)
            for own in cells.values()
        )

    def _budgets(self, strategy: str) -> tuple[float | None, ...]:
        return self.budgets if STRATEGIES[strategy].heeds_budget else (None,)


def _headroom(share: float, growths: Mapping[str, int]) -> int:
    least, most = growths["full"], growths["none"]
    return least + int(share * (most - least))


@dataclass(frozen=True, slots=True)
class Cell:
    """A strategy at one budget; None for those that know no budget."""

    strategy: str
    share: float | None
    headroom_bytes: int | None
    is_limited: bool = False
    """Whether the system enforces the budget."""


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
