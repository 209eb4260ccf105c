"""Strategies that take turns on the same batches, and then meet a hard limit.

Every strategy trains in a process of its own, with the same thread and allocator
settings. They take turns, a step each, so that whatever else the machine does meets
all of them. The budget is a share of what plain training grows by on the longest
batch.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mimose.bench.process import Runner, StrategyFailedError, StrategyProcess
from mimose.bench.rows import StepRow
from mimose.bench.tasks import LIMITED, STRATEGIES, Task, Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentSettings:
    """What is trained, for how long, and within what."""

    workload: Workload = field(default_factory=Workload)
    """The model and its batches."""

    steps: int = 100
    """Training steps a strategy."""

    threads: int = 2
    """For torch's operators, in every process."""

    budget_share: float = 0.5
    """Of plain training's growth on the longest batch."""


@dataclass(slots=True)
class ExperimentResult:
    """What has been measured so far; it stays readable when cut short."""

    budget_bytes: int | None = None
    """None until plain training was probed."""

    rows: list[StepRow] = field(default_factory=list)
    """Every step of every strategy, in the order in which they ran."""

    failures: dict[str, str] = field(default_factory=dict)
    """``"run/strategy"`` and why it could not go on."""

    is_complete: bool = False
    """Whether nothing was cut short."""

    def of(self, run: str) -> list[StepRow]:
        """Return the rows of one run."""
        return [row for row in self.rows if row.run == run]


class Experiment:
    """Three runs: find a budget, compare all strategies, enforce the budget.

    Args:
        settings: What to train.
        corpus: An `EncodedCorpus`, saved.
        launch: Starts a strategy.
        on_step: Is told of each step before it runs: the run, the strategy, the step.
    """

    def __init__(
        self,
        settings: ExperimentSettings,
        corpus: Path,
        launch: Callable[[Task], Runner] = StrategyProcess,
        on_step: Callable[[str, str, int], None] = lambda *_: None,
    ) -> None:
        self.result = ExperimentResult()
        self._settings = settings
        self._corpus = corpus
        self._launch = launch
        self._on_step = on_step
        self._date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")

    def run(self) -> None:
        """Run everything. What was measured is in `result`, also after an error.

        Raises:
            StrategyFailedError: Plain training without a limit failed.
            KeyboardInterrupt: Somebody had enough.
        """
        self._probe()
        self._compare()
        self._limit()
        self.result.is_complete = True

    def _probe(self) -> None:
        """Find the budget: two steps on the longest batch, the optimizer's state in."""
        with contextlib.closing(self._launch(self._task("probe", "none"))) as runner:
            longest = runner.lengths.index(max(runner.lengths))
            for step in range(2):
                self._on_step("probe", "none", step)
                row = runner.advance(longest)
                self.result.rows.append(row)
        growth = self._settings.budget_share * row.growth_bytes
        self.result.budget_bytes = row.start_bytes + int(growth)

    def _compare(self) -> None:
        """Let all strategies take turns on the same batches."""
        with contextlib.ExitStack() as stack:
            runners = {name: self._start(stack, "compare", name) for name in STRATEGIES}
            self._take_turns("compare", runners)

    def _limit(self) -> None:
        """Let the system enforce the budget, on plain training and on mimose."""
        for name in LIMITED:
            with contextlib.ExitStack() as stack:
                self._take_turns("limit", {name: self._start(stack, "limit", name)})

    def _start(self, stack: contextlib.ExitStack, run: str, strategy: str) -> Runner:
        runner = self._launch(self._task(run, strategy))
        stack.callback(runner.close)
        return runner

    def _take_turns(self, run: str, runners: dict[str, Runner]) -> None:
        """Give each strategy a step at a time, once all of them are ready."""
        for name in list(runners):
            with self._noting_failure(run, name, runners):
                _ = runners[name].lengths  # waits
        last = self._settings.steps - 1
        for step in range(self._settings.steps):
            for name in list(runners):
                self._on_step(run, name, step)
                with self._noting_failure(run, name, runners):
                    row = runners[name].advance(step, evaluates=step == last)
                    self.result.rows.append(row)

    @contextlib.contextmanager
    def _noting_failure(
        self, run: str, name: str, runners: dict[str, Runner]
    ) -> Iterator[None]:
        """Go on without a strategy that fails."""
        try:
            yield
        except StrategyFailedError as error:
            self.result.failures[f"{run}/{name}"] = str(error)
            runners.pop(name).close()

    def _task(self, run: str, strategy: str) -> Task:
        settings = self._settings
        return Task(
            run=run,
            strategy=strategy,
            workload=settings.workload,
            corpus=self._corpus,
            steps=settings.steps,
            budget_bytes=self.result.budget_bytes,
            is_limited=run == "limit",
            threads=settings.threads,
            date=self._date,
        )
