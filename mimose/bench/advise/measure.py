"""Measuring all methods: memory first, one by one, then seconds, by turns."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from mimose.bench.advise.crew import Crew
from mimose.bench.advise.measured import AtSize, Measured, Measurements, Weighed
from mimose.bench.advise.methods import METHODS, PLAIN
from mimose.bench.advise.rounds import ENOUGH_ROUNDS, Rounds, points_of
from mimose.bench.advise.settings import Settings
from mimose.bench.advise.survey import Begun, begin, survey
from mimose.bench.advise.task import Task
from mimose.bench.child import Child, RunFailedError
from mimose.bench.machine import describe_machine, load_average
from mimose.budget import parse_budget
from mimose.exceptions import BudgetError, first_line
from mimose.usage import UsageError

_SURVEY_SHARE = 0.4
"""Of the time, at the most."""
_LEAVING = 0.9
"""Of what the machine has: the rest is left to others."""
_STEPS = 12
"""About so many of the longest allowed fill a method's part of that."""


def measure(
    settings: Settings, tell: Callable[[str, float], None] = lambda _, __: None
) -> Measurements:
    """Measure every method that can be had.

    Ctrl-C ends it early; what was measured until then is returned.

    Args:
        settings: The question.
        tell: Is told what is going on, and the share that is done, from 0 to 1.

    Raises:
        UsageError: Plain training itself cannot be measured.
        KeyboardInterrupt: Ctrl-C came before anything was measured.
    """
    run = Run(settings, tell)
    with contextlib.suppress(KeyboardInterrupt):
        run.survey()
        run.time()
        run.is_interrupted = False
    if not run.has_begun:
        raise KeyboardInterrupt
    return run.found()


class Run:
    """One measurement from its beginning.

    Args:
        settings: The question.
        tell: As for `measure`.

    Attributes:
        is_interrupted: Until all is done.
        budget_bytes: From the first process on.
        learned: By sessions that plan, by method.
    """

    def __init__(self, settings: Settings, tell: Callable[[str, float], None]) -> None:
        self.is_interrupted = True
        self._settings = settings
        self._tell = tell
        self._began = time.monotonic()
        self._until = self._began + 60.0 * settings.minutes
        self._measured: dict[str, Measured] = {}
        self.learned: dict[str, Mapping[str, Any]] = {}
        self._rounds: Rounds | None = None
        self._sample: tuple[int, int | None] = (0, None)
        self.budget_bytes = 0
        self._notes: list[str] = []

    @property
    def pace(self) -> float | None:
        """The machine's when steps were timed, if they are told at it; else None."""
        rounds = self._rounds
        return rounds.pace if rounds is not None and rounds.by_pace else None

    @property
    def has_begun(self) -> bool:
        """Whether anything was measured."""
        return bool(self._plain)

    def survey(self) -> None:
        """Measure memory, a process for each method."""
        settings = self._settings
        names = settings.named
        most = _SURVEY_SHARE * 60.0 * settings.minutes
        with contextlib.ExitStack() as stack:
            coming = stack.enter_context(contextlib.closing(self.child(names[0])))
            for index, name in enumerate(names):
                child = coming
                if index + 1 < len(names):  # it starts while this one is measured
                    another = contextlib.closing(self.child(names[index + 1]))
                    coming = stack.enter_context(another)
                self._tell(f"memory: {name}", _SURVEY_SHARE * index / len(names))
                begun = begin(child)
                if name == PLAIN:
                    self._resolve(begun)
                found = survey(
                    child,
                    begun,
                    METHODS[name],
                    budget_bytes=self.budget_bytes,
                    machine_bytes=self._machine_bytes(begun),
                    most_seconds=most / len(names) / _STEPS,
                    lengths=settings.lengths,
                    plain=self._plain,
                )
                self._measured[name] = found.measured
                if name == PLAIN:
                    self._need_plain()
                    with contextlib.suppress(RunFailedError):  # a batch has killed it
                        self._notes += child.ask(["notes", {}])["notes"]
                if found.learned is not None:
                    self.learned[name] = found.learned
                child.close()
                if time.monotonic() - self._began > most:
                    self._leave_out(names[index + 1 :])
                    break

    def time(self) -> None:
        """Measure seconds, by turns, in new processes."""
        points = {
            name: points_of(
                each,
                self._sample[0],
                self.budget_bytes,
                with_lengths=bool(self._settings.lengths),
            )
            for name, each in self._measured.items()
            if not each.why_not
        }
        try:
            crew = self.crew()
        except RunFailedError as error:
            self._notes.append(f"nothing could be timed: {first_line(error)}")
            return
        with contextlib.closing(crew):
            self._rounds = Rounds(
                crew,
                points,
                self.learned,
                budget_bytes=self.budget_bytes,
                seed=self._settings.seed,
            )
            began = _SURVEY_SHARE
            self._rounds.run(
                self._until,
                lambda what, done: self._tell(what, began + (1 - began) * done),
            )

    def _resolve(self, begun: Begun) -> None:
        """Learn from the first process what the sample and the device are.

        Raises:
            UsageError: It could not begin, or a fraction is of nobody knows what.
        """
        if begun.why_not:
            msg = f"plain training cannot be measured: {begun.why_not}"
            raise UsageError(msg)
        self._sample = begun.batch, begun.length
        try:
            self.budget_bytes = parse_budget(
                self._settings.budget, begun.total_bytes, lambda: begun.held_bytes
            )
        except BudgetError as error:
            raise UsageError(str(error)) from error

    @property
    def _plain(self) -> tuple[Weighed, ...]:
        return self._measured[PLAIN].weighed if PLAIN in self._measured else ()

    def _need_plain(self) -> None:
        """Make sure that plain training can be done at all, however small.

        Raises:
            UsageError: It cannot.
        """
        if not self._plain:
            msg = f"plain training cannot be measured: {self._measured[PLAIN].why_not}"
            raise UsageError(msg)

    def _machine_bytes(self, begun: Begun) -> int:
        """Return what there is for a step; the budget where nobody knows."""
        if self._settings.device == "cpu":
            if begun.available_bytes is None:
                return self.budget_bytes
            return begun.held_bytes + int(_LEAVING * begun.available_bytes)
        if begun.total_bytes is None:
            return self.budget_bytes
        return int(_LEAVING * begun.total_bytes)

    def found(self) -> Measurements:
        """Return what there is."""
        settings = self._settings
        rounds = self._rounds
        methods = list(self._measured.values())
        if rounds is not None:
            methods = [
                replace(
                    each,
                    timed=rounds.timed(each.method),
                    unplanned=tuple(
                        AtSize(batch=point.batch, length=point.length)
                        for point in rounds.unplanned.get(each.method, ())
                    ),
                    stopped=rounds.failed.get(each.method, each.stopped),
                )
                for each in methods
            ]
            self._notes += rounds.notes
        batch, length = self._sample
        return Measurements(
            model=settings.model,
            batch=batch,
            length=length,
            budget_bytes=self.budget_bytes,
            device=settings.device,
            dtype=settings.dtype,
            optimizer=settings.optimizer,
            threads=settings.threads,
            machine=dict(describe_machine(settings.device)),
            load_average=load_average(),
            promised_seconds=60.0 * settings.minutes,
            taken_seconds=time.monotonic() - self._began,
            n_rounds=0 if rounds is None else rounds.n_rounds,
            by_pace=None if rounds is None else rounds.by_pace,
            is_interrupted=self.is_interrupted,
            notes=tuple(self._notes),
            methods=tuple(methods),
            lengths=settings.lengths,
        )

    def crew(self) -> Crew:
        """Start the processes in which steps are timed.

        Raises:
            RunFailedError: One could not begin.
        """
        return Crew(lambda name: self._start(name, PLAIN, "turns"))

    def child(self, method: str) -> Child:
        """Start the process in which a method's memory is measured."""
        return self._start(method, method, "work")

    def _start(self, name: str, method: str, module: str) -> Child:
        settings = self._settings
        task = Task(
            source=settings.source,
            method=method,
            device=settings.device,
            dtype=settings.dtype,
            optimizer=settings.optimizer,
            threads=settings.threads,
            seed=settings.seed,
        )
        work = f"mimose.bench.advise.{module}"
        known = [*sys.path, os.environ.get("PYTHONPATH", "")]
        paths = os.pathsep.join(filter(None, known))
        return Child(
            name,
            work,
            asdict(task),
            settings.threads,
            environment={"PYTHONPATH": paths},  # a script's own modules among them
        )

    def _leave_out(self, names: tuple[str, ...]) -> None:
        if names:
            self._notes.append(
                f"no time was left for {', '.join(names)}: --minutes "
                f"{self._settings.minutes:g} is too short for {ENOUGH_ROUNDS} rounds "
                f"of all methods"
            )
