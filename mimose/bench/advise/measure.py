"""Measuring all methods: memory first, one by one, then seconds, by turns."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, replace

from mimose.bench.advise.measured import Measured, Measurements
from mimose.bench.advise.rounds import ENOUGH_ROUNDS, Rounds
from mimose.bench.advise.settings import Settings
from mimose.bench.advise.survey import survey
from mimose.bench.advise.work import Task
from mimose.bench.child import Child
from mimose.bench.machine import describe_machine, load_average
from mimose.usage import UsageError

_SURVEY_SHARE = 0.4
"""Of the time, at the most."""


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
    """
    run = _Run(settings, tell)
    with contextlib.suppress(KeyboardInterrupt):
        run.survey()
        run.time()
        run.is_interrupted = False
    return run.found()


class _Run:
    """One measurement from its beginning."""

    def __init__(self, settings: Settings, tell: Callable[[str, float], None]) -> None:
        self.is_interrupted = True
        self._settings = settings
        self._tell = tell
        self._began = time.monotonic()
        self._until = self._began + 60.0 * settings.minutes
        self._measured: dict[str, Measured] = {}
        self._rounds: Rounds | None = None
        self._sample: tuple[int, int | None] = (0, None)
        self._notes: list[str] = []

    def survey(self) -> None:
        """Measure memory, a process for each method."""
        names = self._settings.named
        budget = _SURVEY_SHARE * 60.0 * self._settings.minutes
        most_seconds = budget / len(names) / 8
        with contextlib.ExitStack() as stack:
            coming = stack.enter_context(contextlib.closing(self._child(names[0])))
            for index, name in enumerate(names):
                child = coming
                if index + 1 < len(names):  # it starts while this one is measured
                    another = contextlib.closing(self._child(names[index + 1]))
                    coming = stack.enter_context(another)
                done = _SURVEY_SHARE * index / len(names)
                self._tell(f"memory: {name}", done)
                found = survey(child, self._settings, name, most_seconds)
                child.close()
                self._measured[name] = found.measured
                if name == "none":
                    self._need(found.measured)
                    self._sample = found.batch, found.length
                if time.monotonic() - self._began > budget:
                    self._leave_out(names[index + 1 :])
                    break

    def time(self) -> None:
        """Measure seconds, by turns, in new processes."""
        names = [name for name, each in self._measured.items() if not each.why_not]
        with contextlib.ExitStack() as stack:
            children = {
                name: stack.enter_context(contextlib.closing(self._child(name)))
                for name in names
            }
            self._rounds = Rounds(children, self._measured, self._settings.seed)
            began = _SURVEY_SHARE
            self._rounds.run(
                self._until,
                lambda what, done: self._tell(what, began + (1 - began) * done),
            )

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
            budget_bytes=settings.budget_bytes,
            device=settings.device,
            dtype=settings.dtype,
            optimizer=settings.optimizer,
            threads=settings.threads,
            machine=dict(describe_machine(settings.device)),
            load_average=load_average(),
            promised_seconds=60.0 * settings.minutes,
            taken_seconds=time.monotonic() - self._began,
            n_rounds=0 if rounds is None else rounds.n_rounds,
            is_interrupted=self.is_interrupted,
            notes=tuple(self._notes),
            methods=tuple(methods),
        )

    def _child(self, method: str) -> Child:
        settings = self._settings
        task = Task(
            source=settings.source,
            method=method,
            device=settings.device,
            dtype=settings.dtype,
            optimizer=settings.optimizer,
            threads=settings.threads,
            seed=settings.seed,
            budget_bytes=settings.budget_bytes,
        )
        work = "mimose.bench.advise.work"
        return Child(method, work, asdict(task), settings.threads)

    def _need(self, plain: Measured) -> None:
        if plain.why_not:
            msg = f"plain training cannot be measured: {plain.why_not}"
            raise UsageError(msg)

    def _leave_out(self, names: tuple[str, ...]) -> None:
        if names:
            self._notes.append(
                f"no time was left for {', '.join(names)}: --minutes "
                f"{self._settings.minutes:g} is too short for {ENOUGH_ROUNDS} rounds "
                f"of all methods"
            )
