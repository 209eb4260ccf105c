"""Does a run survive faults that bare training survives, with equal weights?

Each trial trains a small model for a few steps, bare and under a session, on the
simulated device with arithmetic. It injects one fault into one step: at a random
allocation, line of the library, job of the worker thread, or byte of a file. Bare
training is a loop that catches a step's error, drops the gradients and goes on. Each
step has another seed, so that weights do not depend on lost steps.

    python -m benchmarks.proofs faults

A fault counts only if it occurred. A session must lose no step that bare training does
not lose. (If a fault takes memory, bare training has 2 MiB less.) It must end with the
weights of a bare run of the same steps, bit by bit, and leave no patch, hook, thread,
open file or limit of the allocator. If a trial hangs for five minutes, the run ends and
says where.

Each trial is drawn from the seed and its number, and counts are written after it.
Ctrl-C or SIGTERM ends a run with the table and the bars so far; ``--resume`` continues
it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import gc
import itertools
import json
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import mimose
import mimose.worker
from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Settings
from mimose.bench.child import RunFailedError
from mimose.bench.device import SIM
from mimose.exceptions import first_line
from mimose.memory.wall import active_walls
from mimose.records import read_records
from mimose.worker import Job, Worker

QUESTION = "Does a run live through what bare training lives through?"
OPTIONS = (
    common.count("--faults", 2000, "that strike"),
    common.RESUME,
)
DEFAULTS = {"device": SIM}

WIDTH = 16
_STEPS, _ROWS, _LAYERS = 4, (1024, 2048, 3072, 4096), 6
_LIBRARY = f"{Path(mimose.__file__).parent}/"
_AHEAD = tuple(f"{_LIBRARY}{name}" for name in ("policy", "planners", "cost"))
"""What runs as a plan is made before its batch comes."""
_LINES = {"attach": 9000, "watch": 1500, "forward": 4000, "backward": 1500}
_LINES |= {"optimizer": 150, "detach": 400}
_ALLOCATIONS = {"forward": 90, "backward": 130, "optimizer": 30}
_HANG_SECONDS, _HUNG_SECONDS = 300, 0.3
_SEGMENT_BYTES = 2 * 2**20
"""The allocator's segment for small tensors."""
_WRONG = "lost by the session alone", "changed results", "left behind"
_COUNTS = ("trials", "struck", "lost bare too", *_WRONG)


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Injects faults, and counts their effects."""
    path, ended = settings.out / "faults.csv", 0
    answer = Answer.begun(path, resume=options.resume)
    found = {row["fault"]: {n: row[n] for n in _COUNTS} for row in answer.rows}
    task = {"faults": options.faults, "found": found}
    try:
        for row in common.said_by("faults", settings, **task):
            line = found.setdefault(row["fault"], dict.fromkeys(_COUNTS, 0))
            line |= {name: line[name] + row[name] for name in _COUNTS}
            for note in row["notes"]:
                common.progress(f"{row['fault']}: {note}")
            where = settings.provenance()
            answer.rows = [{"fault": f, **found[f], **where} for f in sorted(found)]
            common.write(path, answer.rows)
    except KeyboardInterrupt:
        answer.notes = ["stopped"]
    except RunFailedError as error:
        ended, answer.notes = 1, [str(error)]
    answer.table = [{"fault": name, **found[name]} for name in sorted(found)]
    _, struck, _, *wrong = _sums(found)
    answer.bars = [
        Bar("faults that struck", struck, at_least=options.faults),
        *(Bar(name, n, at_most=0) for name, n in zip(_WRONG, wrong, strict=True)),
        Bar("hangs, and ends of the process", ended, at_most=0),
    ]
    return answer


def _sums(found: Mapping[str, Mapping[str, int]]) -> list[int]:
    return [sum(line[name] for line in found.values()) for name in _COUNTS]


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Run trials until so many faults have struck."""
    first, struck, *_ = _sums(task["found"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with (
        torch.autograd.set_multithreading_enabled(False),
        patch.object(mimose.worker, "HUNG_SECONDS", _HUNG_SECONDS),
        # Where an interrupt comes in a weak reference's callback, Python drops it.
        patch.object(sys, "unraisablehook", lambda _: None),
        contextlib.ExitStack() as undo,
    ):
        undo.callback(faulthandler.cancel_dump_traceback_later)
        learned = _learned(task["seed"])
        for number in itertools.count(first):
            if struck >= task["faults"]:
                return
            faulthandler.dump_traceback_later(_HANG_SECONDS, exit=True)
            name, notes, *counts = _trial(f"{task['seed']} {number}", learned)
            struck += counts[0]
            told = {"fault": name, **dict(zip(_COUNTS, (1, *counts), strict=True))}
            yield told | {"notes": [f"{note} (trial {number})" for note in notes]}


# ------------------------------------------------------------------ the job


def model(n_layers: int = _LAYERS) -> nn.Module:
    """Return layers one after the other."""

    def layer() -> nn.Module:
        up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        return nn.Sequential(up, nn.Tanh(), down, nn.Dropout(0.1))

    return nn.Sequential(*(layer() for _ in range(n_layers)))


class _KilledError(BaseException):
    """The process is gone, and all that was in its memory."""


_SURVIVED = (Exception, KeyboardInterrupt)
"""What a loop catches, to go on with the next batch."""


@dataclass
class _Training:
    """One job, bare (without options of a session) or planned."""

    batches: list[torch.Tensor]
    fault: _Fault
    options: Mapping[str, Any] | None = None
    learned: Any = None
    by_step: bool = False
    quits: bool = False
    skipped: Collection[int] = ()
    session: mimose.Session | None = None
    lost: dict[int, str] = field(default_factory=dict)
    _saved: tuple[Any, Any] | None = None

    def run(self) -> _Training:
        step = 0
        with self.fault.undo:
            while step < _STEPS:
                self._begin()
                step = self._go_on(step)
        self._detach()
        weights = [p.detach().cpu().flatten() for p in self.model.parameters()]
        self.weights = torch.cat(weights)
        del self.optimizer
        if self.options is None:
            del self.model  # the next job finds the device as this one did
        return self

    def _begin(self) -> None:
        torch.manual_seed(1)
        _sim().empty_cache()  # an allocator looks at its limit for a new segment only
        self.model = model().to(SIM)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        if self._saved is not None:
            self.model.load_state_dict(self._saved[0])
            self.optimizer.load_state_dict(self._saved[1])
        if self.options is not None:
            with self._phase("attach"):
                self.session = mimose.attach(self.model, **self.options)
                if self.learned is not None:
                    self.session.load_state_dict(self.learned)

    def _save(self) -> None:
        states = self.model.state_dict(), self.optimizer.state_dict()
        self._saved = copy.deepcopy(states)
        if self.session is not None:
            self.learned = json.loads(json.dumps(self.session.state_dict()))

    def _detach(self) -> None:
        if self.session is not None:
            with self._phase("detach"):
                self.session.detach()
            self.session.detach()

    @contextlib.contextmanager
    def _phase(self, name: str, step: int = -1) -> Iterator[None]:
        """Inject the fault if it is due; the loop catches a step's error."""
        is_here = (self.fault.phase, self.fault.step) == (name, step)
        is_here &= not self.fault.struck
        try:
            with self.fault.during(self) if is_here else contextlib.nullcontext():
                yield
        except _SURVIVED:
            if step >= 0:
                raise

    def _from(self, step: int) -> Iterator[torch.Tensor]:
        batches = self.batches[step:]
        return iter(batches if self.session is None else self.session.watch(batches))

    def _go_on(self, first: int) -> int:
        """Train from a step on; return the one to begin with again."""
        watched = self._from(first)
        for step in range(first, _STEPS):
            self.fault.between(self, step)
            try:
                with self._phase("watch", step):
                    batch = next(watched)
                if step not in self.skipped:
                    torch.manual_seed(step)
                    self._step(batch, step)
            except _KilledError:
                self._detach()  # as the end of a process does
                self.session = None
                return step
            except _SURVIVED as error:
                self.lost[step] = first_line(error)
                if self.quits:
                    self._detach()
                watched = self._from(step + 1)
            self.optimizer.zero_grad(set_to_none=True)
            if isinstance(self.fault, _Restart):
                self._save()
        return _STEPS

    def _step(self, batch: torch.Tensor, step: int) -> None:
        def both() -> None:
            with self._phase("forward", step):
                loss = self.model(batch.to(SIM)).square().mean()
            with self._phase("backward", step):
                loss.backward()

        session = None if self.quits and self.lost else self.session
        session.step(both) if session is not None and self.by_step else both()
        with self._phase("optimizer", step):
            self.optimizer.step()


# ------------------------------------------------------------------ faults


class _Fault:
    """Something that goes wrong in a phase of one step; this one is nothing."""

    phases: tuple[str, ...] = ("forward", "backward", "optimizer")
    kinds: tuple[str, ...] = ()
    steps = range(_STEPS)
    most: Mapping[str, int] = _LINES
    """By phase, the places where it may strike."""
    struck = False

    def __init__(self, seed: float) -> None:
        self.random = draw = random.Random(seed)
        self.phase, self.step = draw.choice(self.phases), draw.choice(self.steps)
        self.kind = draw.choice(self.kinds or (self.phase,))
        if self.phase in ("attach", "detach"):
            self.step = -1
        self.nth = 1 + int(self.most[self.phase] * draw.random() ** 2)
        self.share = draw.uniform(-0.1, 1.1)
        self.undo = contextlib.ExitStack()
        """Puts everything back as the job ends."""

    def options(self) -> dict[str, Any]:
        """Return options of `mimose.attach`; a session is about to be made."""
        return {}

    def between(self, job: _Training, step: int) -> None:
        """Do something before each step."""

    def during(self, job: _Training) -> contextlib.AbstractContextManager[None]:
        """Do something in the phase of the step."""
        return contextlib.nullcontext()


class _Allocation(_Fault):
    """An allocation of the device fails, once."""

    most = _ALLOCATIONS

    @contextlib.contextmanager
    def during(self, job: _Training) -> Iterator[None]:
        is_fewer = job.options is None and self.phase != "optimizer"
        _sim().fail_allocation(min(self.nth, 20) if is_fewer else self.nth)
        before = torch.accelerator.memory_stats()["num_ooms"]
        try:
            yield
        finally:
            _sim().fail_allocation(0)
            self.struck = torch.accelerator.memory_stats()["num_ooms"] > before


class _AtLine(_Fault):
    """Something at the nth line of the library; bare before the phase begins."""

    within: tuple[str, ...] = (_LIBRARY,)

    @contextlib.contextmanager
    def during(self, job: _Training) -> Iterator[None]:
        self._job, self._left, self._before = job, self.nth, sys.gettrace()
        try:
            if job.options is not None:
                sys.settrace(self._trace)
            elif self.within != _AHEAD:  # it has no such lines
                self.strike(job)
            yield
        finally:
            self._left = 0
            sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not self._left or not frame.f_code.co_filename.startswith(self.within):
            return None
        self._left -= event == "line"
        if not self._left:
            sys.settrace(self._before)
            self.struck = True
            self.strike(self._job)
        return self._trace

    def strike(self, job: _Training) -> None:
        raise MemoryError


class _HostMemory(_AtLine):
    """The host has no more memory for an object of Python's."""


class _Ahead(_AtLine):
    """A plan for the batch behind this one cannot be made; bare there is none."""

    phases, within, most = ("watch",), _AHEAD, {"watch": 200}
    steps = range(1, _STEPS - 1)  # the others have none behind them

    def options(self) -> dict[str, Any]:
        return {"refine": False}


class _Interrupt(_AtLine):
    """Ctrl-C: the signal's handler raises."""

    phases = ("attach", "watch", "forward", "backward", "optimizer", "detach")

    def strike(self, job: _Training) -> None:
        signal.raise_signal(signal.SIGINT)


class _Handler(_AtLine):
    """A handler of SIGUSR1 saves what was learned, and reports; training goes on."""

    phases = ("watch", "forward", "backward", "optimizer")

    def strike(self, job: _Training) -> None:
        session = job.session
        if session is not None:

            def ask(*_: Any) -> None:
                json.dumps(session.state_dict())
                session.report()

            before = signal.signal(signal.SIGUSR1, ask)
            signal.raise_signal(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, before)


class _TakenWithin(_AtLine):
    """Another process takes memory in the midst of a step."""

    phases = ("forward", "backward")

    def strike(self, job: _Training) -> None:
        self.undo.callback(_sim().set_others, 0)
        _sim().set_others(_total() - _room(job, self.share))


class _Limit(_Fault):
    """Another process takes memory, or a limit comes; it may go again."""

    kinds = tuple(
        f"{what} {how}"
        for what in ("others", "limit")
        for how in ("comes", "goes", "flutters")
    )

    def between(self, job: _Training, step: int) -> None:
        what, how = self.kind.split()
        is_tight = step >= self.step if how == "comes" else step <= self.step
        share = self.share
        if how == "flutters":
            is_tight, share = self.random.random() < 0.7, self.random.random()
        self.struck = self.struck or is_tight
        room = _room(job, share) if is_tight else _total()
        self.undo.callback(_sim().set_limit, None)
        self.undo.callback(_sim().set_others, 0)
        _sim().set_limit(room) if what == "limit" else _sim().set_others(
            _total() - room
        )


class _Thread(_Fault):
    """The worker thread's nth job fails, ends it or hangs; or all come late."""

    kinds = ("fails", "dies", "hangs", "starves")
    most = dict.fromkeys(_Fault.phases, 4)

    def options(self) -> dict[str, Any]:
        submit, self._n_jobs, self._goes_on = Worker.submit, 0, threading.Event()

        def faulty(worker: Worker, kind: Any, key: Any, job: Job) -> None:
            submit(worker, kind, key, partial(self._do, job))

        self.undo.enter_context(patch.object(Worker, "submit", faulty))
        self.undo.callback(self._goes_on.set)
        return {"refine": True}

    def _do(self, job: Job) -> Iterator[None] | None:
        if threading.current_thread() is threading.main_thread():
            return job()
        self._n_jobs += 1
        if self.kind == "starves" or self._n_jobs == self.nth:
            self.struck = True
            if self.kind == "fails":
                raise MemoryError
            if self.kind == "dies":
                raise SystemExit
            self._goes_on.wait(0.02 if self.kind == "starves" else None)
        return job()


class _Disk(_Fault):
    """The disk is full as a record is written: no file can grow beyond a size."""

    def options(self) -> dict[str, Any]:
        folder = self.undo.enter_context(tempfile.TemporaryDirectory())
        path, n_bytes = Path(folder) / "records.jsonl", self.random.randrange(4000)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

        def look() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            self.struck = path.stat().st_size >= n_bytes
            if n_bytes > 2000:  # at least a record is whole
                read_records(path)

        self._limit = n_bytes, hard
        self.undo.callback(look)
        return {"record_to": path}

    def between(self, job: _Training, step: int) -> None:
        if job.options is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, self._limit)


class _Clock(_Fault):
    """Clocks jump, backwards too, or stand still."""

    kinds = ("jumps", "stops")

    def between(self, job: _Training, step: int) -> None:
        if step == self.step:
            self.struck = True
            for name in ("time", "monotonic", "perf_counter", "process_time"):
                other = partial(self._other, getattr(time, name))
                self.undo.enter_context(patch.object(time, name, other))

    def _other(self, clock: Callable[[], float]) -> float:
        if self.kind == "stops":
            return 1.0
        draw = self.random
        return clock() + (draw.random() < 0.3) * draw.uniform(-1e6, 1e6)


class _Restart(_Fault):
    """The process is killed, and begins again with what was saved and learned."""

    def during(self, job: _Training) -> contextlib.AbstractContextManager[None]:
        self.struck = True
        raise _KilledError


_FAULTS: tuple[type[_Fault], ...] = (
    *(_Allocation, _Allocation, _Allocation, _Interrupt, _Interrupt, _HostMemory),
    *(_Ahead, _Handler, _Limit, _Limit, _TakenWithin, _Thread, _Disk, _Clock),
    _Restart,
)


# ------------------------------------------------------------------ trials


def _sim() -> Any:
    return torch.get_device_module(SIM)


def _total() -> int:
    return int(_sim().mem_get_info()[1])


_peaks: list[int] = []
"""Reserved with the largest batch, everything recomputed and everything kept."""


def _between(share: float) -> int:
    least, most = _peaks
    return int(least + share * (most - least))


def _room(job: _Training, share: float) -> int:
    """Return the memory that a fault leaves: for bare training a segment less.

    Recomputation frees and allocates in another order, and a layer's first one is
    compared with its forward. In the few segments of a small model this can take one
    more. Cached blocks are freed, because no other process gets reserved memory, and
    bare training, which has reserved more, would use it.
    """
    _sim().empty_cache()
    return _between(share) - (_SEGMENT_BYTES if job.options is None else 0)


def _learned(seed: int) -> str:
    """Measure what budgets are drawn from; return the state of a session as JSON."""

    def planned(rows: Collection[int], **options: Any) -> mimose.Session:
        torch.manual_seed(seed)
        batches = [torch.randn(n, WIDTH) for n in rows]
        how = {**options, "refine": False}
        session = _Training(batches, _Fault(0), how).run().session
        assert session is not None
        gc.collect()
        return session

    largest, ample = [max(_ROWS)] * _STEPS, {"budget": "1TiB"}
    _peaks[:] = [
        planned(largest, planner=name, **ample).peak_bytes for name in ("full", "none")
    ]
    learned = json.dumps(planned(_ROWS, budget=_between(0.7)).state_dict())
    gc.collect()
    gc.freeze()
    return learned


def _trial(told: str, learned: str) -> tuple[Any, ...]:
    """Train bare and planned with the same fault; return what differs, and counts."""
    draw, before = random.Random(told), _held()
    kind, seed = draw.choice(_FAULTS), draw.random()
    torch.manual_seed(draw.randrange(2**32))
    batches = [torch.randn(n, WIDTH) for n in draw.sample(_ROWS, k=_STEPS)]
    fault, by_step = kind(seed), draw.random() < 0.4
    options = {"budget": _between(draw.uniform(0.4, 1.1)), "wall": by_step}
    options |= {"refine": draw.random() < 0.4, **fault.options()}
    state = json.loads(learned) if draw.random() < 0.7 else None
    quits = draw.random() < 0.3

    def bare(fault: _Fault, lost: Collection[int] = ()) -> _Training:
        return _Training(batches, fault, skipped=lost).run()

    struck = bare(kind(seed))
    planned = _Training(batches, fault, options, state, by_step, quits).run()

    lost, lost_bare = set(planned.lost), set(struck.lost)
    expected = struck if lost == lost_bare else bare(_Fault(0), lost)
    is_equal = torch.equal(planned.weights, expected.weights)
    if not is_equal and fault.phase == "optimizer":
        # It struck behind the step itself, where bare training has no place.
        expected = bare(_Fault(0), lost ^ {fault.step})
        is_equal = torch.equal(planned.weights, expected.weights)
    left = _left(planned.model, before)
    alone = [f"step {n}: {planned.lost[n]}" for n in sorted(lost - lost_bare)]
    notes = [*left, *alone, *([] if is_equal else ["the weights differ"])]
    name, wrong = f"{kind.__name__[1:]}: {fault.kind}", (len(alone), 1 - is_equal)
    return name, notes, int(fault.struck), len(lost & lost_bare), *wrong, len(left)


def _held() -> tuple[int, int]:
    """Count open files and threads."""
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


def _left(trained: nn.Module, before: tuple[int, int]) -> list[str]:
    """Name all that a session has left behind."""
    until = time.monotonic() + 10
    while _held() > before and time.monotonic() < until:
        time.sleep(0.001)
    found = [
        f"{what} of {name or 'the model'}"
        for name, module in trained.named_modules()
        for what, value in vars(module).items()
        if what == "forward" or (what.endswith("_hooks") and value)
    ]
    for when in ("pre", "post"):
        hooks = getattr(torch_optimizer, f"_global_optimizer_{when}_hooks")
        found += [f"{len(hooks)} hooks of optimizers"] * bool(hooks)
    found += ["a wall"] * bool(active_walls)
    fraction = _sim().get_per_process_memory_fraction()
    found += [f"a limit of {fraction}"] * (fraction != 1.0)
    held, names = _held(), [thread.name for thread in threading.enumerate()]
    more = f"files and threads: {before}, then {held}: {names}"
    return found + [more] * (held > before)
