"""Measures all methods: first memory, one by one, then seconds, by turns.

Steps run in child processes, which answer messages (`work`). Seconds are measured in
rounds. In a round each method takes one turn, in a random order; a turn builds a new
model. On an accelerator one process does everything. On a CPU there is one process for
memory, one for turns with a session and one for those without, because a session makes
the heap return memory, which takes time.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mimose.bench.advise.methods import METHODS, PLAIN, Method, Training
from mimose.bench.advise.settings import Settings
from mimose.bench.advise.source import make
from mimose.bench.child import Child, RunFailedError
from mimose.bench.device import SIM, is_cpu, kind_of
from mimose.bench.machine import available_bytes
from mimose.bench.rows import RunSettings
from mimose.bench.serve import messages
from mimose.bench.step_meter import RunningStep, budget_meter, step_meter
from mimose.bench.usage import UsageError
from mimose.budget import parse_budget
from mimose.exceptions import MimoseError, first_line
from mimose.memory.out_of_memory import is_out_of_memory

Tell = Callable[[str, float], None]
"""Takes the current work as text, and the finished share, from 0 to 1."""

MORE = "give it more minutes"
"""The end of a reason that more time would remove."""
ENOUGH_ROUNDS = 7
MOST_ROUNDS = 40
_SURVEY_SHARE = 0.4
"""The largest share of the time for memory."""
_LEAVING = 0.9
"""The share of the machine's free memory that is used at most."""
_SIZES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)
"""Batch sizes relative to the sample's."""
_FEWEST = 5
"""The least number of batches for a curve, if there are as many."""
_STEPS = 12
"""About this many steps of the longest allowed time fill a method's share of it."""
_PATIENCE = 8.0
"""The first steps may take this many times longer, because a line needs them."""
_SETTLING, _PLANNING = 2, 5
"""Steps before those that count, in which caches fill; a session also measures and
plans."""
_TURN_SECONDS = 0.1
"""Least time of a size in a turn; shorter steps run several times."""
_BEGINNING = 0.3
"""About the seconds in which a turn builds its model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The needs of a step of one size."""

    batch: int
    peak_bytes: float
    """On a CPU the process's resident memory, otherwise requested memory. For a method
    that plans, the least budget that a plan keeps."""
    reserved_bytes: float
    """Reserved memory; equal to the peak on a CPU, and for a method that plans."""
    seconds: float
    """Rough seconds, from the measurement of memory."""
    rounds: tuple[float, ...] | None = ()
    """Seconds in each round; empty if it was not timed, None if a session made no plan
    for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One method."""

    method: str
    why_not: str = ""
    """Why it could not be measured; empty if it was."""
    is_exact: bool = True
    """Whether gradients are equal to plain training's, except for rounding."""
    steps: tuple[Step, ...] = ()
    """The smaller batches first."""
    stopped: str = ""
    """Why no larger batch was tried, or why turns ended."""

    @property
    def timed(self) -> list[Step]:
        """The steps that were timed."""
        return [each for each in self.steps if each.rounds]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurements:
    """All methods, and the conditions."""

    model: str
    batch: int
    """The sample's batch."""
    budget_bytes: int
    device: str
    dtype: str
    optimizer: str
    machine: Mapping[str, Any]
    """Device, versions, threads, seed, load average and date."""
    promised_seconds: float
    taken_seconds: float
    is_interrupted: bool
    methods: tuple[Measured, ...]
    notes: tuple[str, ...] = ()
    """Notes for the user, for example that the model returned no loss."""

    def write(self, path: Path) -> None:
        """Write a JSON file for `read`."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> Measurements:
    """Read what `Measurements.write` wrote.

    Raises:
        OSError: It cannot be read.
        ValueError: It has other content.
    """
    try:
        reply = _tuples(json.loads(path.read_text(encoding="utf-8")))
        for each in reply["methods"]:
            each["steps"] = tuple(Step(**step) for step in each["steps"])
        reply["methods"] = tuple(Measured(**each) for each in reply["methods"])
        return Measurements(**reply)
    except (KeyError, TypeError, ValueError) as error:
        msg = f"{path} was not written by mimose advise: {error}"
        raise ValueError(msg) from error


def _tuples(reply: Any) -> Any:
    """Replace lists by tuples, recursively."""
    if isinstance(reply, dict):
        return {key: _tuples(value) for key, value in reply.items()}
    return tuple(map(_tuples, reply)) if isinstance(reply, list) else reply


def work(task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Answer messages: ``[name of a function below, its arguments]``.

    Args:
        task: The fields of `Settings`.
    """
    torch.set_num_threads(task["threads"])
    does: dict[str, Callable[..., dict[str, Any]]] = {"survey": _survey, "turn": _turn}
    for name, arguments in messages():
        torch.manual_seed(task["seed"])
        yield does[name](task, **arguments)
        gc.collect()
        if not is_cpu(task["device"]):
            torch.accelerator.empty_cache()


def begin(task: Mapping[str, Any], method: str) -> tuple[Training, bool]:
    """Return a method's training, and whether it is exact for this model.

    Raises:
        UsageError: The method is not possible for this model.
    """
    model, sample = make(task["source"])
    parameters = list(model.parameters())
    why_not = METHODS[method].why_not(model, kind_of(task["device"]))
    if not any(each.requires_grad for each in parameters):
        why_not = "the model has no parameter that is trained"
    if any(each.is_meta for each in parameters):
        why_not = "the model is on the meta device: give one with weights"
    if why_not:
        raise UsageError(why_not)
    device, how = torch.device(task["device"]), METHODS[method]
    options = {"optimizer": task["optimizer"], "dtype": task["dtype"]}
    is_exact = how.is_exact_for(model)
    return Training(model, sample, how, device=device, **options), is_exact


def _survey(
    task: Mapping[str, Any], method: str, budget: float | str, most_seconds: float
) -> dict[str, Any]:
    """Return a method's memory, and what a session has learned.

    Args:
        task: As for `work`.
        method: Its name.
        budget: The most that a step may need, unless too few steps fit.
        most_seconds: A step that takes longer is the last one.
    """
    plans = METHODS[method].plans
    try:
        training, is_exact = begin(task, method)
        meter = (budget_meter if plans else step_meter)(training.device)
        held, there = meter.settled_bytes(0), meter.total_bytes()
        budget_bytes = parse_budget(budget, there, lambda: held)
        if is_cpu(task["device"]):
            there = available_bytes()
        training.attach(budget_bytes if plans else None, meter)
    except Exception as error:  # whatever the user's model raises
        return {"why_not": _reason_of(error)}
    used = held if is_cpu(task["device"]) else 0
    machine_bytes = used + int(_LEAVING * there) if there else budget_bytes
    ladder = Ladder(training, meter, METHODS[method], most_seconds)
    try:
        ladder.climb(min(budget_bytes, machine_bytes), machine_bytes)
    except _StoppedError as stopped:
        ladder.stopped = str(stopped)
    found = sorted(ladder.found, key=lambda each: each.batch)
    session = training.session
    learned = session.state_dict() if plans and session is not None else None
    training.close()
    return {
        "batch": training.sample.batch,
        "budget_bytes": budget_bytes,
        "is_exact": is_exact,
        "has_loss": training.has_loss,
        "steps": [asdict(each) for each in found],
        "stopped": ladder.stopped,
        "learned": learned,
    }


class _StoppedError(Exception):
    """No larger batch can be tried; the message says why."""


@dataclass(slots=True)
class Ladder:
    """Steps of growing size of one method."""

    training: Training
    meter: Any
    method: Method
    most_seconds: float
    """A step that takes longer is the last one."""
    found: list[Step] = field(default_factory=list)
    """The steps that ran."""
    stopped: str = ""
    """Why no larger batch was tried."""

    def climb(self, most_bytes: int, machine_bytes: int) -> None:
        """Run doubled batches, then the largest that fits.

        If only few fit, and the method does not depend on the budget, larger batches
        run on all memory of the machine.

        Raises:
            _StoppedError: A step failed, took too long, or would need too much.
        """
        own, parts, found = self.training.sample.batch, self.method.parts, self.found
        sizes = {parts * max(1, round(share * own / parts)) for share in _SIZES}
        for batch in sorted(sizes):
            needed = _line(found, batch) if len(found) > 1 else 0.0
            few = len(found) < _FEWEST and not self.method.plans
            if needed > (machine_bytes if few else most_bytes):
                self.stopped = f"a batch of {batch} would not fit"
                break
            try:
                self.weigh(batch)
            except _StoppedError:
                # For example, batch normalisation of one sample fails.
                if found or batch >= own:
                    raise
        if len(found) > 1:
            most = _line(found, most_bytes, inverse=True) // parts * parts
            most = min(most, _SIZES[-1] * own)
            near = [e.batch for e in found if 0.95 < e.batch / max(most, 1) < 1.05]
            if most >= found[0].batch and not near:
                self.weigh(int(most))

    def weigh(self, batch: int) -> None:
        """Run steps of a size; record peak and time of the last one."""
        training = self.training
        device, plans = training.device, self.method.plans
        try:
            for _ in range(_PLANNING if plans else _SETTLING):
                training.step(batch)
            self.meter.settled_bytes(0)
            running = RunningStep(self.meter, device)
            training.step(batch)
            measured = running.end()
            peak = reserved = measured.peak_bytes
            if plans:
                peak = reserved = training.least_budget()
            elif device.type != "cpu":  # cached blocks of other sizes do not count
                torch.accelerator.empty_cache()
                training.step(batch)
                reserved = int(torch.accelerator.memory_reserved(device))
        except Exception as error:
            training.forget()
            why = "memory ran out" if is_out_of_memory(error) else _reason_of(error)
            msg = f"{why}, at a batch of {batch}"
            raise _StoppedError(msg) from error
        seconds = measured.seconds
        self.found.append(
            Step(batch=batch, peak_bytes=peak, reserved_bytes=reserved, seconds=seconds)
        )
        patience = 1.0 if len(self.found) >= _FEWEST else _PATIENCE
        if seconds > patience * self.most_seconds:
            msg = f"a batch of {batch} takes {seconds:.1f} s, too long: {MORE}"
            raise _StoppedError(msg)


def _reason_of(error: Exception) -> str:
    is_ours = isinstance(error, (UsageError, MimoseError))
    return ("" if is_ours else f"{type(error).__name__}: ") + first_line(error)


def _line(found: Sequence[Step], at: float, *, inverse: bool = False) -> float:
    """Extrapolate from the two largest steps: bytes for a batch, or the inverse."""
    low, high = sorted(found, key=lambda each: each.batch)[-2:]
    beyond = high.reserved_bytes / high.peak_bytes
    slope = beyond * (high.peak_bytes - low.peak_bytes) / (high.batch - low.batch)
    if inverse:
        spare = at - high.reserved_bytes
        return high.batch + spare / slope if slope > 0 else math.inf
    return high.reserved_bytes + slope * (at - high.batch)


def _turn(
    task: Mapping[str, Any],
    method: str,
    batches: Sequence[int],
    budget_bytes: int,
    learned: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return for each batch size the seconds of a step, and their ratio to the pace.

    Args:
        task: As for `work`.
        method: Its name.
        batches: The batch sizes. For short steps the medians of several count.
        budget_bytes: The budget of methods that plan.
        learned: The state of an earlier session of the method.
    """
    training, _ = begin(task, method)
    pace, found = pace_of(task["device"]), list[list[float]]()
    try:
        plans = METHODS[method].plans
        meter = budget_meter(training.device) if plans else None
        training.attach(budget_bytes if plans else None, meter)
        if training.session is not None and learned is not None:
            training.session.load_state_dict(learned)
        for batch in batches:
            for _ in range(_PLANNING if plans else _SETTLING):
                seconds = training.step(batch)
            n_steps = round(_TURN_SECONDS / seconds) if seconds > 0.0 else 1
            before, steps = pace(), list[tuple[float, float]]()
            for _ in range(min(8, max(1, n_steps))):
                seconds, after = training.step(batch), pace()
                steps.append((seconds, 2.0 * seconds / (before + after)))
                before = after
            planned = [each for each in steps if not math.isnan(each[0])]
            found.append(np.median(planned or steps, axis=0).tolist())
    finally:
        training.close()
    return {"seconds": found}


def pace_of(device: str) -> Callable[[], float]:
    """Return a function that measures the seconds of a fixed small piece of work.

    A shared CPU changes its speed within seconds, by more than most methods differ.
    Work right before and after a step has the same speed: products, passes over a
    larger tensor and many small calls, together a few milliseconds. An accelerator that
    is not shared keeps its speed, so there the result is always 1.
    """
    if kind_of(device) not in ("cpu", SIM):
        return lambda: 1.0
    matrix, long, row = torch.ones(96, 96), torch.ones(200_000), torch.ones(96)
    product, raised, added = map(torch.empty_like, (matrix, long, row))

    # It allocates nothing, because that time depends on the heap after a method.
    def pace() -> float:
        began = time.perf_counter()
        for _ in range(20):
            torch.matmul(matrix, matrix, out=product).tanh_()
        for _ in range(4):
            torch.mul(long, 1.01, out=raised).add_(1.0)
        for _ in range(150):
            torch.add(row, 1.0, out=added)
        return time.perf_counter() - began

    pace()
    return pace


def measure(settings: Settings, tell: Tell = lambda _, __: None) -> Measurements:
    """Measure every possible method.

    Ctrl-C ends it early; then it returns the measurements so far.

    Raises:
        UsageError: Plain training itself cannot be measured.
        KeyboardInterrupt: Ctrl-C came before anything was measured.
    """
    with contextlib.closing(Run(settings, tell)) as run:
        with contextlib.suppress(KeyboardInterrupt):
            run.survey()
            run.time()
            run.is_interrupted = False
        if not run.measured:
            raise KeyboardInterrupt
        return run.found()


class Run:
    """One measurement, until it is closed.

    Attributes:
        is_interrupted: True until everything is done.
        budget_bytes: The budget; 0 before the first steps.
        measured: The memory of each method.
        readings: By method and batch size, one for each round: a step's seconds, and
            their ratio to the machine's pace around it.
    """

    def __init__(self, settings: Settings, tell: Tell = lambda _, __: None) -> None:
        self.is_interrupted = True
        self.budget_bytes = 0
        self.measured: dict[str, Measured] = {}
        self.readings: dict[str, dict[int, list[tuple[float, float]]]] = {}
        self._settings = settings
        self._progress = tell
        self._began = time.monotonic()
        self._until = self._began + 60.0 * settings.minutes
        self._batch = 0
        self._learned: dict[str, Mapping[str, Any] | None] = {}
        self._notes: list[str] = []
        self._children: dict[str, Child] = {}
        self._order = random.Random(settings.seed)

    def survey(self) -> None:
        """Measure the memory of each method.

        Raises:
            UsageError: Plain training cannot be measured.
        """
        settings = self._settings
        names = list(dict.fromkeys((PLAIN, *settings.methods)))
        most = _SURVEY_SHARE * 60.0 * settings.minutes
        for index, name in enumerate(names):
            self._progress(f"memory of {name}", _SURVEY_SHARE * index / len(names))
            asked = {
                "method": name,
                "budget": self.budget_bytes or settings.budget,
                "most_seconds": most / len(names) / _STEPS,
            }
            is_late = time.monotonic() - self._began > most
            late = dict[str, Any](why_not=f"no time was left to measure it: {MORE}")
            try:
                reply = late if is_late else self._ask("memory", ["survey", asked])
            except RunFailedError as error:
                reply = {"why_not": first_line(error)}
            if name == PLAIN:
                self._resolve(reply)
            self._learned[name] = reply.get("learned")
            steps = tuple(Step(**each) for each in _tuples(reply.get("steps", [])))
            unknown = "" if steps else reply.get("stopped", "")
            self.measured[name] = Measured(
                method=name,
                why_not=reply.get("why_not", unknown),
                is_exact=reply.get("is_exact", METHODS[name].is_exact),
                steps=steps,
                stopped=reply.get("stopped", ""),
            )

    def _resolve(self, reply: Mapping[str, Any]) -> None:
        """Take the sample's batch and the budget in bytes from plain training."""
        if not reply.get("steps"):
            why = reply.get("why_not") or reply["stopped"]
            msg = f"plain training cannot be measured: {why}"
            raise UsageError(msg)
        self._batch = int(reply["batch"])
        self.budget_bytes = reply["budget_bytes"]
        if not reply["has_loss"]:
            self._notes.append(
                "the model returns no loss, so the mean of its output was trained: "
                "return the loss from forward, or put labels in the sample"
            )

    def time(self) -> None:
        """Measure the seconds of each method, in rounds, until the time is over."""
        able = [each for each in self.measured.values() if not each.why_not]
        left = max(0.0, self._until - time.monotonic())
        allowed = left / ENOUGH_ROUNDS / max(1, len(able))
        self.rounds({e.method: _chosen(e, allowed, self._batch) for e in able})

    def rounds(
        self, batches: Mapping[str, Sequence[int]], n_rounds: int | None = None
    ) -> None:
        """Let methods take turns, in a random order in each round.

        Args:
            batches: Sizes to time, by method.
            n_rounds: The number of rounds; None for as many as the time allows, at most
                `MOST_ROUNDS`.
        """
        left = {name: list(of) for name, of in batches.items()}
        until = math.inf if n_rounds else self._until
        longest = 0.0
        for done in range(n_rounds or MOST_ROUNDS):
            began = time.monotonic()
            if not left or (done and began + longest > until):
                return
            names = sorted(left, key=lambda _: self._order.random())
            names.sort(key=lambda name: name != PLAIN and not done)
            for name in names:
                if not done and name != PLAIN and time.monotonic() > until:
                    del left[name]
                    continue
                share = (time.monotonic() - self._began) / (self._until - self._began)
                self._progress(f"round {done + 1}: {name}", min(1.0, share))
                left[name] = self._turn(name, left[name])
                if not left[name]:
                    del left[name]
            longest = time.monotonic() - began

    def _turn(self, name: str, batches: Sequence[int]) -> list[int]:
        """Let a method take a turn; return the sizes at which it can be timed."""
        asked = {
            "method": name,
            "batches": batches,
            "budget_bytes": self.budget_bytes,
            "learned": self._learned.get(name),
        }
        has_session = METHODS[name].options is not None
        try:
            reply = self._ask("session" if has_session else "plain", ["turn", asked])
        except RunFailedError as error:
            failed = replace(self.measured[name], stopped=first_line(error))
            self.measured[name] = failed
            return []
        of, left = self.readings.setdefault(name, {}), []
        for batch, (clock, ratio) in zip(batches, reply["seconds"], strict=True):
            if math.isnan(clock):
                of[batch] = []
                continue
            of.setdefault(batch, []).append((clock, ratio))
            left.append(batch)
        return left

    @property
    def pace(self) -> float | None:
        """The machine's median pace; None if the clock alone is better.

        That is if the clock's seconds scatter less at most sizes. For example, if other
        processes take turns on the same core, they hit a step or the small work, but
        not both.
        """
        sizes = [of for each in self.readings.values() for of in each.values() if of]
        found = [np.transpose(each) for each in sizes]
        steadier = [scatter(clocks) < scatter(ratios) for clocks, ratios in found]
        if not found or 2 * sum(steadier) > len(steadier):
            return None
        paces = [clocks / ratios for clocks, ratios in found]
        return float(np.median(np.concatenate(paces)))

    def seconds(self, method: str, pace: float | None) -> dict[int, list[float]]:
        """Return the seconds of a step at each batch size, in each round.

        Args:
            method: Its name.
            pace: The machine's pace to convert to; None for the clock's seconds.
        """
        return {
            batch: [clock if pace is None else pace * ratio for clock, ratio in at]
            for batch, at in self.readings.get(method, {}).items()
        }

    def found(self) -> Measurements:
        """Return the measurements so far."""
        settings = self._settings
        methods, pace = [], self.pace
        for name, each in self.measured.items():
            seconds = self.seconds(name, pace)
            took = {at: tuple(of) or None for at, of in seconds.items()}
            steps = (replace(e, rounds=took.get(e.batch, ())) for e in each.steps)
            methods.append(replace(each, steps=tuple(steps)))
        run = RunSettings(
            seed=settings.seed, threads=settings.threads, device=settings.device
        )
        return Measurements(
            model=settings.model,
            batch=self._batch,
            budget_bytes=self.budget_bytes,
            device=settings.device,
            dtype=settings.dtype,
            optimizer=settings.optimizer,
            machine=run.provenance(),
            promised_seconds=60.0 * settings.minutes,
            taken_seconds=time.monotonic() - self._began,
            is_interrupted=self.is_interrupted,
            methods=tuple(methods),
            notes=tuple(self._notes),
        )

    def _ask(self, key: str, message: Any) -> dict[str, Any]:
        """Send a message to a process, which is started if it does not run.

        Raises:
            RunFailedError: The process has failed or died.
        """
        settings = self._settings
        if not is_cpu(settings.device):  # each holds memory on the device
            key = "all"
        if key not in self._children:
            known = [*sys.path, os.environ.get("PYTHONPATH", "")]  # a script's own too
            paths = {"PYTHONPATH": os.pathsep.join(filter(None, known))}
            self._children[key] = Child(
                key, __name__, asdict(settings), settings.threads, environment=paths
            )
        try:
            return self._children[key].ask(message)
        except RunFailedError:
            self._children.pop(key).close()
            raise

    def close(self) -> None:
        """End the processes. A second call does nothing."""
        for child in self._children.values():
            child.close()


def _chosen(measured: Measured, allowed: float, batch: int) -> list[int]:
    """Return the batches of a method to time: at least four, if there are as many.

    They are evenly spaced, with both ends and the sample's batch.

    Args:
        measured: The method with its memory.
        allowed: The seconds that a turn should take.
        batch: The sample's batch.
    """
    untimed = _PLANNING if METHODS[measured.method].plans else _SETTLING
    steps, found = measured.steps, list[Step]()
    for most in (9, 6, 4):
        index = np.linspace(0, len(steps) - 1, min(most, len(steps))).round()
        found = [e for i, e in enumerate(steps) if i in index or e.batch == batch]
        took = (untimed * e.seconds + max(e.seconds, _TURN_SECONDS) for e in found)
        if _BEGINNING + sum(took) <= allowed:
            break
    return [each.batch for each in found]


def scatter(readings: Sequence[float]) -> float:
    """Return the interquartile range divided by the median."""
    low, high = np.quantile(readings, (0.25, 0.75))
    return float((high - low) / np.median(readings))
