"""Rows and processes as an experiment has them, without measuring anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mimose.bench.corpus import EncodedCorpus, EncodedText
from mimose.bench.experiment import ExperimentSettings
from mimose.bench.process import StrategyFailedError
from mimose.bench.rows import StepRow
from mimose.bench.tasks import Task, Workload

MIB = 2**20
START = 400 * MIB
LENGTHS = (100, 512, 200, 50)
_HELD = {"none": 1.0, "full": 0.2, "static": 0.4, "mimose": 0.45}
_FLOPS = {"none": 0, "full": 100, "static": 60, "mimose": 20}


def _make_row(
    task: Task, step: int, length: int, *, evaluates: bool = False
) -> StepRow:
    """Make the row of a step whose growth is a MiB a token, or the strategy's share."""
    growth = int(length * MIB * _HELD[task.strategy])
    return StepRow(
        run=task.run,
        strategy=task.strategy,
        step=step,
        phase="plan" if task.strategy == "mimose" else "",
        texts=16,
        length=length,
        start_bytes=START,
        peak_bytes=START + growth,
        predicted_peak_bytes=(
            START + growth / 1.01 if task.strategy == "mimose" else None
        ),
        budget_bytes=task.budget_bytes,
        limit_bytes=task.budget_bytes if task.is_limited else None,
        seconds=length / 1000 * (1 + _FLOPS[task.strategy] / 300),
        plan_seconds=1e-4,
        cache_hit=step > 1,
        recomputed_flops=_FLOPS[task.strategy] * length,
        retries=0,
        loss=3.0 - step / 10,
        accuracy=0.25 if evaluates else None,
        load_average=0.5,
        seed=task.workload.seed,
        date=task.date,
        device="cpu: imagined, 2 cores",
        threads=task.threads,
        python="3.11.0",
        torch="2.13.0",
        transformers="5.0.0",
        mimose="0.1.0",
    )


@dataclass
class FakeRunner:
    """Stands in for a strategy's process: it answers at once, with `make_row`.

    Under a hard limit it fails like the allocator, at the first step over it.
    """

    task: Task
    lengths: tuple[int, ...] = LENGTHS
    is_closed: bool = False
    advanced: list[int] = field(default_factory=list)

    def advance(self, index: int, *, evaluates: bool = False) -> StepRow:
        """Return the row of a batch."""
        row = _make_row(
            self.task, len(self.advanced), self.lengths[index], evaluates=evaluates
        )
        if row.limit_bytes is not None and row.peak_bytes > row.limit_bytes:
            msg = "can't allocate memory"
            raise StrategyFailedError(msg)
        self.advanced.append(index)
        return row

    def close(self) -> None:
        """Remember that it was closed."""
        self.is_closed = True


class Launcher:
    """Starts fake strategies and remembers them."""

    def __init__(self) -> None:
        self.runners: list[FakeRunner] = []
        self.on_advance: Callable[[FakeRunner], None] = lambda _: None

    def __call__(self, task: Task) -> FakeRunner:
        """Start one."""
        runner = _WatchedRunner(task, watcher=lambda me: self.on_advance(me))
        self.runners.append(runner)
        return runner


@dataclass
class _WatchedRunner(FakeRunner):
    watcher: Callable[[FakeRunner], None] = lambda _: None

    def advance(self, index: int, *, evaluates: bool = False) -> StepRow:
        self.watcher(self)
        return super().advance(index, evaluates=evaluates)


@pytest.fixture
def launch() -> Launcher:
    """What stands in for starting processes."""
    return Launcher()


@pytest.fixture
def settings() -> ExperimentSettings:
    """An experiment of as many steps as a fake strategy has batches."""
    return ExperimentSettings(steps=len(LENGTHS))


@pytest.fixture
def make_task(tmp_path: Path) -> Callable[..., Task]:
    """Make a task; arguments replace the defaults."""

    def make(**given: object) -> Task:
        defaults = {
            "run": "compare",
            "strategy": "none",
            "workload": Workload(),
            "corpus": tmp_path / "corpus.json",
            "steps": len(LENGTHS),
            "budget_bytes": None,
            "is_limited": False,
            "threads": 2,
            "date": "2026-01-02T03:04:05+00:00",
        }
        return Task(**{**defaults, **given})

    return make


@pytest.fixture
def rows(make_task: Callable[..., Task]) -> list[StepRow]:
    """The rows of four strategies, two steps of which need more than the budget."""
    tasks = [
        make_task(strategy=name, budget_bytes=START + 180 * MIB)
        for name in ("none", "full", "static", "mimose")
    ]
    return [
        _make_row(task, step, length, evaluates=step == len(LENGTHS) - 1)
        for step, length in enumerate(LENGTHS)
        for task in tasks
    ]


@pytest.fixture
def toy_corpus() -> EncodedCorpus:
    """Texts of 3 to 20 tokens whose class is the token they are made of."""
    texts = [
        EncodedText((4 + label,) * (3 + size), label)
        for size in range(18)
        for label in range(3)
    ]
    return EncodedCorpus(("a", "b", "c"), 16, tuple(texts), tuple(texts[::5]))
