"""Does a run live through faults that bare training lives through, with equal weights?

Each trial trains a small model for a few steps, bare and under a session, on the
simulated device with arithmetic, and puts one fault into one step: at a random
allocation, line of the library, job of the worker thread, or byte of a file. Bare
training is a loop that catches what a step raises, drops the gradients and goes on.
Each step has another seed, so that weights do not depend on steps that were lost.

    python -m benchmarks.proofs faults

A fault counts once it has struck. A session must lose no step that bare training does
not lose (with 2 MiB less room, where others take memory), end with the weights of a
bare run of the same steps, to the bit, and leave nothing behind: no patch, hook,
thread, open file, or limit of the allocator. A trial that takes two minutes ends the
run, and says where it hung.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import gc
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import mimose
import mimose.worker
from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Settings
from mimose.bench.device import SIM
from mimose.exceptions import StateMismatchError, first_line
from mimose.memory.wall import standing
from mimose.records import read_records
from mimose.runtime import engine
from mimose.worker import Job, JobKind, Worker

QUESTION = "Does a run live through what bare training lives through?"
OPTIONS = (
    common.count("--faults", 2000, "that strike"),
    common.count("--every", 1, "bytes a state is cut short"),
)
NEEDS = ()

WIDTH = 16
_STEPS, _ROWS, _BLOCKS = 4, (1024, 2048, 3072, 4096), 6
_LIBRARY = f"{Path(mimose.__file__).parent}{os.sep}"
_AHEAD = tuple(f"{_LIBRARY}{name}" for name in ("policy.py", "planners", "cost"))
"""What runs as a plan is made before its batch comes."""
_LINES = {"attach": 9000, "watch": 1500, "forward": 4000, "backward": 1500}
_LINES |= {"optimizer": 150, "detach": 400}
_ALLOCATIONS = {"forward": 90, "backward": 130, "optimizer": 30}
_HANG_SECONDS, _HUNG_SECONDS = 120, 0.3
_SEGMENT_BYTES = 2 * 2**20
"""Of the allocator, for small tensors."""
_BARS = ("lost by the session alone", "changed results", "left behind")


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Let faults strike, and count what they did."""
    settings = replace(settings, device=SIM)
    found: dict[str, dict[str, int]] = {}
    how = {"faults": options.faults, "every": options.every}
    for n, row in enumerate(common.said_by("faults", settings, **how)):
        name = row.pop("fault")
        for note in row.pop("notes"):
            common.progress(f"{name}: {note}")
        line = found.setdefault(name, dict.fromkeys(row, 0))
        for column, value in row.items():
            line[column] += value
        if n % 100 == 0:
            common.progress(f"faults: {n} trials")
    answer = Answer(table=[{"fault": name, **found[name]} for name in sorted(found)])
    answer.rows = [{**line, **settings.provenance()} for line in answer.table]
    total = {n: sum(line[n] for line in found.values()) for n in ("struck", *_BARS)}
    at_least = options.faults
    answer.bars.append(Bar("faults that struck", total["struck"], at_least=at_least))
    answer.bars += [Bar(name, total[name], at_most=0) for name in _BARS]
    return answer


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Run trials until so many faults have struck, then those of a state cut short."""
    struck = 0
    with ready(random.Random(task["seed"])) as bench:
        while struck < task["faults"]:
            row = bench.trial()
            struck += row["struck"]
            yield row
        yield from bench.cut_short(task["every"])


# ------------------------------------------------------------------ the job


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.tanh(self.up(x)))
        gated: torch.Tensor = x + out * self.dropout(out[:, :1])
        return gated


class Model(nn.Module):
    """Blocks one after the other; returns a scalar loss.

    Args:
        n_blocks: How many.
    """

    def __init__(self, n_blocks: int = _BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(n_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all, and average the squares."""
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class _KilledError(BaseException):
    """The process is gone, and all that was in its memory."""


_SURVIVED = (Exception, KeyboardInterrupt)
"""What a loop catches, to go on with the next batch."""


class _Training:
    """One job, bare (without options of a session) or planned."""

    def __init__(
        self,
        weights: Mapping[str, Any],
        batches: list[torch.Tensor],
        fault: _Fault | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        learned: Any = None,
        by_step: bool = False,
        quits: bool = False,
        skipped: Iterable[int] = (),
    ) -> None:
        self.fault, self.options, self._skipped = fault or _Fault(), options, skipped
        self._batches, self._by_step, self._quits = batches, by_step, quits
        self._saved: tuple[Any, Any, Any] = weights, None, learned
        self.lost: list[int] = []
        self.errors: list[str] = []
        self.session: mimose.Session | None = None

    def run(self) -> _Training:
        step = 0
        try:
            while step < _STEPS:
                self._begin()
                step = self._go_on(step)
        finally:
            self.fault.end()
            self._detach()
        self.weights = {n: p.cpu() for n, p in self.model.state_dict().items()}
        del self.optimizer
        if self.options is None:
            del self.model  # the next job finds the device as this one did
        return self

    def _begin(self) -> None:
        weights, state, learned = self._saved
        _sim().empty_cache()  # an allocator looks at its limit for a new segment only
        self.model = Model().to(SIM)
        self.model.load_state_dict(weights)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        if state is not None:
            self.optimizer.load_state_dict(state)
        if self.options is not None:
            with self._phase("attach"):
                self.session = mimose.attach(self.model, **self.options)
                if learned is not None:
                    self.session.load_state_dict(learned)

    def _save(self) -> None:
        session, states = self.session, (self.model.state_dict(), self.optimizer)
        learned = None if session is None else json.dumps(session.state_dict())
        weights, state = copy.deepcopy((states[0], states[1].state_dict()))
        self._saved = weights, state, learned and json.loads(learned)

    def _detach(self) -> None:
        if self.session is not None:
            with self._phase("detach"):
                self.session.detach()
            self.session.detach()

    @contextlib.contextmanager
    def _phase(self, name: str, step: int = -1) -> Iterator[None]:
        """Let the fault strike, perhaps. What a step raises is the loop's to catch."""
        try:
            if (self.fault.phase, self.fault.step) == (name, step):
                self.fault.enter(self)
            yield
        except _SURVIVED:
            if step >= 0:
                raise
        finally:
            self.fault.leave()

    def _from(self, step: int) -> Iterator[torch.Tensor]:
        batches = self._batches[step:]
        return iter(batches if self.session is None else self.session.watch(batches))

    def _go_on(self, first: int) -> int:
        """Train from a step on; return the one to begin with again."""
        watched = self._from(first)
        for step in range(first, _STEPS):
            self.fault.between(self, step)
            try:
                with self._phase("watch", step):
                    batch = next(watched)
                if step not in self._skipped:
                    torch.manual_seed(step)
                    self._step(batch, step)
            except _KilledError:
                self._detach()  # as the end of a process does
                self.session = None
                return step
            except _SURVIVED as error:
                self.lost.append(step)
                self.errors.append(f"step {step}: {first_line(error)}")
                if self._quits:
                    self._detach()
                watched = self._from(step + 1)
            self.optimizer.zero_grad(set_to_none=True)
            if self.fault.saves:
                self._save()
        return _STEPS

    def _step(self, batch: torch.Tensor, step: int) -> None:
        def both() -> None:
            with self._phase("forward", step):
                loss = self.model(batch.to(SIM))
            with self._phase("backward", step):
                loss.backward()

        session = None if self._quits and self.lost else self.session
        session.step(both) if session is not None and self._by_step else both()
        with self._phase("optimizer", step):
            self.optimizer.step()


# ------------------------------------------------------------------ faults


class _Trip:
    """Calls something at the nth line that this thread runs in the library."""

    def __init__(
        self, nth: int, strike: Callable[[], None], within: tuple[str, ...]
    ) -> None:
        self._left, self._strike, self._within = nth, strike, within
        self._before = sys.gettrace()
        sys.settrace(self._enter)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        is_ours = frame.f_code.co_filename.startswith(self._within)
        return self._line if is_ours and self._left else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and self._left:
            self._left -= 1
            if not self._left:
                sys.settrace(self._before)
                self._strike()
        return self._line

    def end(self) -> None:
        self._left = 0
        sys.settrace(self._before)


class _Fault:
    """Something that goes wrong in a phase of one step; this one is nothing."""

    phases: tuple[str, ...] = ("forward", "backward", "optimizer")
    kinds: tuple[str, ...] = ()
    most: Mapping[str, int] = _LINES
    """By phase, the places where it may strike."""
    saves = False
    """Whether a checkpoint is written behind each step."""
    phase, step, struck = "", -2, False

    def draw(self, draw: random.Random) -> None:
        self.phase, self.step = draw.choice(self.phases), draw.randrange(_STEPS)
        self.kind = draw.choice(self.kinds or (self.phase,))
        if self.phase in ("attach", "detach"):
            self.step = -1
        self.nth = 1 + int(self.most[self.phase] * draw.random() ** 2)
        self.share = draw.uniform(-0.1, 1.1)
        self.random = random.Random(draw.random())

    def options(self) -> dict[str, Any]:
        """Return options of `mimose.attach`; a session is about to be made."""
        return {}

    def between(self, job: _Training, step: int) -> None:
        """Do something before each step."""

    def enter(self, job: _Training) -> None:
        """Do something as the phase of the step begins."""

    def leave(self) -> None:
        """Do it no more: a phase ends."""

    def end(self) -> None:
        """Put everything back: the job is over."""


class _Allocation(_Fault):
    """An allocation of the device fails, once."""

    most = _ALLOCATIONS
    _before: int | None = None

    def enter(self, job: _Training) -> None:
        if self.struck:
            return
        self._before = self._n_failed()
        is_fewer = job.options is None and self.phase != "optimizer"
        _sim().fail_allocation(min(self.nth, 20) if is_fewer else self.nth)

    def leave(self) -> None:
        _sim().fail_allocation(0)
        if self._before is not None:
            self.struck, self._before = self._n_failed() > self._before, None

    def _n_failed(self) -> int:
        return int(torch.accelerator.memory_stats()["num_ooms"])


class _AtLine(_Fault):
    """Something that happens at a line of the library; bare before the phase begins."""

    within: tuple[str, ...] = (_LIBRARY,)
    _trip: _Trip | None = None

    def enter(self, job: _Training) -> None:
        self.job = job
        if job.options is None:
            self.strike_bare()
        elif not self.struck:
            self._trip = _Trip(self.nth, self._strike, self.within)

    def _strike(self) -> None:
        self.struck = True
        self.strike()

    def strike_bare(self) -> None:
        self.strike()

    def strike(self) -> None:
        raise MemoryError

    def leave(self) -> None:
        if self._trip is not None:
            self._trip.end()
            self._trip = None


class _HostMemory(_AtLine):
    """The host has no more memory for an object of Python's."""


class _Ahead(_AtLine):
    """A plan for the batch behind this one cannot be made; bare there is none."""

    phases, within, most = ("watch",), _AHEAD, {"watch": 200}

    def draw(self, draw: random.Random) -> None:
        super().draw(draw)
        self.step = draw.randrange(1, _STEPS - 1)  # the others have none behind them

    def options(self) -> dict[str, Any]:
        return {"refine": False}

    def strike_bare(self) -> None:
        pass


class _Interrupt(_AtLine):
    """Ctrl-C: the signal's handler raises."""

    phases = ("attach", "watch", "forward", "backward", "optimizer", "detach")

    def strike(self) -> None:
        signal.raise_signal(signal.SIGINT)


class _Handler(_AtLine):
    """A handler of SIGUSR1 saves what was learned, and reports; training goes on."""

    phases = ("watch", "forward", "backward", "optimizer")

    def strike(self) -> None:
        before = signal.signal(signal.SIGUSR1, self._handle)
        signal.raise_signal(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, before)

    def _handle(self, *_: Any) -> None:
        if self.job.session is not None:
            json.dumps(self.job.session.state_dict())
            self.job.session.report()


class _Others(_Fault):
    """Another process takes memory of the device, and may let it go."""

    kinds = ("falls", "rises", "flutters")

    def between(self, job: _Training, step: int) -> None:
        is_tight = step >= self.step if self.kind == "falls" else step <= self.step
        share = self.share
        if self.kind == "flutters":
            is_tight, share = self.random.random() < 0.7, self.random.random()
        self.struck = self.struck or is_tight
        self.leave_room(_room(job, share) if is_tight else _sim().mem_get_info()[1])

    def leave_room(self, n_bytes: int) -> None:
        _sim().set_others(_sim().mem_get_info()[1] - n_bytes)

    def end(self) -> None:
        _sim().set_others(0)


class _Limit(_Others):
    """The limit that the user has set for the process moves."""

    def leave_room(self, n_bytes: int) -> None:
        _sim().set_per_process_memory_fraction(n_bytes / _sim().mem_get_info()[1])

    def end(self) -> None:
        _sim().set_limit(None)


class _TakenWithin(_AtLine):
    """Another process takes memory in the midst of a step."""

    phases = ("forward", "backward")

    def strike(self) -> None:
        _sim().set_others(_sim().mem_get_info()[1] - _room(self.job, self.share))

    def end(self) -> None:
        _sim().set_others(0)


class _Thread(_Fault):
    """The worker thread's nth job fails, ends it or hangs; or all come late."""

    kinds = ("fails", "dies", "hangs", "starves")
    most = dict.fromkeys(_Fault.phases, 4)
    _goes_on: threading.Event | None = None

    def options(self) -> dict[str, Any]:
        self._n_jobs, self._goes_on = 0, threading.Event()
        setattr(engine, "Worker", self._worker)  # noqa: B010 (it is imported there)
        return {"refine": True}

    def _worker(self, *, is_inline: bool) -> Worker:
        made = Worker(is_inline=is_inline)
        submit = made.submit

        def faulty(lane: JobKind, key: Hashable, job: Job) -> None:
            submit(lane, key, lambda: self._do(job))

        setattr(made, "submit", faulty)  # noqa: B010
        return made

    def _do(self, job: Job) -> Iterator[None] | None:
        if threading.current_thread() is threading.main_thread():
            return job()
        self._n_jobs += 1
        if self.kind == "starves":
            self.struck = True
            time.sleep(0.02)
        elif self._n_jobs == self.nth:
            self.struck = True
            if self.kind == "fails":
                raise MemoryError
            if self.kind == "dies":
                raise SystemExit
            assert self._goes_on is not None
            self._goes_on.wait()
        return job()

    def end(self) -> None:
        setattr(engine, "Worker", Worker)  # noqa: B010
        if self._goes_on is not None:
            self._goes_on.set()


class _Disk(_Fault):
    """The disk is full as a record is written: no file can grow beyond a size."""

    _path: Path | None = None

    def options(self) -> dict[str, Any]:
        self._path = Path(tempfile.mkdtemp()) / "records.jsonl"
        self._n_bytes = self.random.randrange(4000)
        return {"record_to": self._path}

    def between(self, job: _Training, step: int) -> None:
        if self._path is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self._n_bytes, _HARD))

    def end(self) -> None:
        if self._path is None:
            return
        resource.setrlimit(resource.RLIMIT_FSIZE, (_HARD, _HARD))
        self.struck = self._path.stat().st_size >= self._n_bytes
        if self._n_bytes > 2000:  # at least a record is whole
            read_records(self._path)
        shutil.rmtree(self._path.parent)


_HARD = resource.getrlimit(resource.RLIMIT_FSIZE)[1]


class _Clock(_Fault):
    """Clocks jump, backwards too, or stand still."""

    kinds = ("jumps", "stops")

    def between(self, job: _Training, step: int) -> None:
        if step == self.step:
            self.struck = True
            for name, clock in _CLOCKS.items():
                setattr(time, name, self._other(clock))

    def _other(self, clock: Callable[[], float]) -> Callable[[], float]:
        jump = self.random
        if self.kind == "stops":
            return lambda: 1.0
        return lambda: clock() + (jump.random() < 0.3) * jump.uniform(-1e6, 1e6)

    def end(self) -> None:
        for name, clock in _CLOCKS.items():
            setattr(time, name, clock)


_CLOCKS = {
    name: getattr(time, name)
    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time")
}


class _Restart(_Fault):
    """The process is killed, and begins again with what was saved and learned."""

    saves = True

    def enter(self, job: _Training) -> None:
        if not self.struck:
            self.struck = True
            raise _KilledError


_FAULTS: tuple[type[_Fault], ...] = (
    *(_Allocation, _Allocation, _Allocation, _Interrupt, _Interrupt, _HostMemory),
    *(_Ahead, _Handler, _Others, _Limit, _TakenWithin, _Thread, _Disk, _Clock),
    _Restart,
)


# ------------------------------------------------------------------ trials


def _sim() -> Any:
    return torch.get_device_module(SIM)


_peaks: list[int] = []
"""Reserved with the largest batch, everything recomputed and everything kept."""


def _between(share: float) -> int:
    least, most = _peaks
    return int(least + share * (most - least))


def _room(job: _Training, share: float) -> int:
    """Return the room that a fault leaves: bare training is left a segment less.

    Recomputation frees and takes in another order, and the first one of a layer is
    compared with its forward: in a toy's few segments it can take one more. Cached
    blocks are freed: no other process gets what one has reserved, and bare training,
    which has reserved more, would live on that.
    """
    _sim().empty_cache()
    return _between(share) - (_SEGMENT_BYTES if job.options is None else 0)


class _Hang:
    """Ends the process where a trial takes too long, and says where that is.

    It counts seconds that it has slept: a machine that is suspended counts as one.
    """

    def __init__(self) -> None:
        self._left = math.inf
        self._thread: threading.Thread | None = None

    def begins(self) -> None:
        self._left = _HANG_SECONDS
        if self._thread is None:
            sleep = time.sleep  # not a clock that jumps
            self._thread = threading.Thread(
                target=self._watch, args=(sleep,), daemon=True
            )
            self._thread.start()

    def ends(self) -> None:
        self._left = math.inf

    def _watch(self, sleep: Callable[[float], None]) -> None:
        while True:
            sleep(1.0)
            self._left -= 1.0
            if self._left < 0:
                faulthandler.dump_traceback()
                os._exit(1)


_hang = _Hang()


@contextlib.contextmanager
def ready(draw: random.Random) -> Iterator[Bench]:
    """Measure what budgets are drawn from, and be ready for trials."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    # Where an interrupt comes in a weak reference's callback, Python drops it.
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    before, mimose.worker.HUNG_SECONDS = mimose.worker.HUNG_SECONDS, _HUNG_SECONDS
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield Bench(draw)
    finally:
        _hang.ends()
        signal.signal(signal.SIGINT, previous)
        sys.unraisablehook = hook
        mimose.worker.HUNG_SECONDS = before


class Bench:
    """Runs trials, and says what each has shown.

    Args:
        draw: Draws faults and batches.
    """

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        torch.manual_seed(1)
        self._weights = Model().state_dict()
        largest = [torch.randn(max(_ROWS), WIDTH)] * _STEPS
        _peaks[:] = [
            self._planned(largest, budget="1TiB", planner=name).peak_bytes
            for name in ("full", "none")
        ]
        session = self._planned(self._batches(), budget=_between(0.7))
        self._learned = json.dumps(session.state_dict())
        gc.collect()
        gc.freeze()

    def _batches(self) -> list[torch.Tensor]:
        rows = [*_ROWS, *self._draw.choices(_ROWS, k=_STEPS - len(_ROWS))]
        self._draw.shuffle(rows)
        return [torch.randn(n, WIDTH) for n in rows]

    def _planned(self, batches: list[torch.Tensor], **options: Any) -> mimose.Session:
        _sim().empty_cache()
        options["refine"] = False
        session = _Training(self._weights, batches, None, options).run().session
        assert session is not None
        gc.collect()
        return session

    def _bare(self, batches: list[torch.Tensor], lost: Iterable[int] = ()) -> Any:
        """Return the weights of a run without faults and without some steps."""
        return _Training(self._weights, batches, skipped=lost).run().weights

    def trial(self, kind: type[_Fault] | None = None) -> dict[str, Any]:
        """Train bare and planned with the same fault; say what differs."""
        _hang.begins()
        draw, batches, before = self._draw, self._batches(), _held()
        fault = (kind or draw.choice(_FAULTS))()
        fault.draw(draw)
        how: dict[str, Any] = {
            "learned": json.loads(self._learned) if draw.random() < 0.7 else None,
            "by_step": draw.random() < 0.4,
            "quits": draw.random() < 0.3,
        }
        budget, refine = _between(draw.uniform(0.4, 1.1)), draw.random() < 0.4
        bare = _Training(self._weights, batches, copy.deepcopy(fault)).run()
        options = {"budget": budget, "refine": refine, "wall": how["by_step"]}
        options |= fault.options()
        planned = _Training(self._weights, batches, fault, options, **how).run()
        lost, by_bare = set(planned.lost), set(bare.lost)
        expected = bare.weights if lost == by_bare else self._bare(batches, lost)
        is_equal = _equal(planned.weights, expected)
        if not is_equal and fault.phase == "optimizer":
            # It struck behind the step itself, where bare training has no place.
            is_equal = _equal(planned.weights, self._bare(batches, lost ^ {fault.step}))
        left = _left(planned.model, before)
        notes = [*left, *([] if is_equal else ["the weights differ"])]
        notes += planned.errors if lost - by_bare else []
        how["learned"] = how["learned"] is not None
        told = {
            n: v for n, v in vars(fault).items() if isinstance(v, (int, float, str))
        }
        return {
            "fault": f"{type(fault).__name__[1:]}: {fault.kind}",
            "struck": int(fault.struck),
            "steps lost bare": len(by_bare),
            "steps lost": len(lost),
            _BARS[0]: len(lost - by_bare),
            _BARS[1]: int(not is_equal),
            _BARS[2]: len(left),
            "notes": [f"{note} ({told}, {options}, {how})" for note in notes],
        }

    def cut_short(self, every: int = 1) -> Iterator[dict[str, Any]]:
        """Load what can be made of a state that was cut short, at every byte."""
        batches = self._batches()
        options: dict[str, Any] = {"budget": _between(0.7), "refine": False}
        expected = self._bare(batches)
        with mimose.attach(Model().to(SIM), **options) as session:
            before = session.state_dict()
            for end in range(0, len(self._learned), every):
                _hang.begins()
                state, notes = _mended(self._learned[:end]), []
                try:
                    session.load_state_dict(state)
                except StateMismatchError:
                    if session.state_dict() != before:
                        notes.append(f"cut at {end}: refused, and the session changed")
                else:
                    before = session.state_dict()
                    job = _Training(
                        self._weights, batches, None, options, learned=state
                    ).run()
                    if job.lost or not _equal(job.weights, expected):
                        notes.append(f"cut at {end}: {job.errors or 'weights differ'}")
                yield _cut(notes)


def _cut(notes: list[str]) -> dict[str, Any]:
    return {
        "fault": "a state cut short",
        "struck": 1,
        **{"steps lost bare": 0, "steps lost": 0, _BARS[0]: 0},
        **{_BARS[1]: len(notes), _BARS[2]: 0, "notes": notes},
    }


def _mended(text: str) -> Any:
    """Close what is open in a text of JSON, behind the last value that is whole."""
    for end in range(len(text), max(-1, len(text) - 200), -1):
        open_, is_text = [], False
        for at, sign in enumerate(text[:end]):
            if sign == '"' and text[at - 1] != "\\":
                is_text = not is_text
            elif not is_text and sign in "[{":
                open_.append("]" if sign == "[" else "}")
            elif not is_text and sign in "]}":
                open_.pop()
        with contextlib.suppress(ValueError):
            return json.loads(text[:end].rstrip(", ") + "".join(reversed(open_)))
    return None


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def _held() -> tuple[int, int]:
    """Count open files and threads."""
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


def _left(model: nn.Module, before: tuple[int, int]) -> list[str]:
    """Name all that a session has left behind."""
    until = _CLOCKS["monotonic"]() + 10
    while _held() > before and _CLOCKS["monotonic"]() < until:
        time.sleep(0.001)
    found = [
        f"{what} of {name or 'the model'}"
        for name, module in model.named_modules()
        for what, value in vars(module).items()
        if what == "forward" or (what.endswith("_hooks") and value)
    ]
    hooks = [
        *torch_optimizer._global_optimizer_pre_hooks,
        *torch_optimizer._global_optimizer_post_hooks,
    ]
    found += [f"{len(hooks)} hooks of optimizers"] * bool(hooks)
    found += ["a wall"] * bool(standing)
    fraction = _sim().get_per_process_memory_fraction()
    found += [f"a limit of {fraction}"] * (fraction != 1.0)
    names = [thread.name for thread in threading.enumerate()]
    held = _held()
    return found + [f"files and threads: {before}, then {held}: {names}"] * (
        held > before
    )
