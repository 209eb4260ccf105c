"""What does the thread beside training cost the steps, and what does it leave behind?

    python -m benchmarks.proofs daemon
    python -m benchmarks.proofs daemon --only waits,stalls

`waits` trains 24 small blocks, whose operators take microseconds, on shapes that are
all new, the next ones announced: the thread fits and plans without end. By turns its
work is what it is and, by computing on, a hundred times as much. `stalls` runs one
small product after another beside the same work, and beside none: what the longest
takes longer is what the thread has the interpreter's lock for. `long` trains two blocks
of width 4 on 10,000 shapes, a hundred thousand steps. `lives` begins and ends sessions,
in all ways that there are. `path` trains the benchmark's T5 and adds up what its steps
spend on plans and fits: deciding, handing over what was learned, and looking ahead.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.proofs import blocks
from benchmarks.proofs.common import (
    AMPLE_BYTES,
    Answer,
    Bar,
    Settings,
    count,
    rows_of,
)
from benchmarks.proofs.numbers import MIB, quantile
from benchmarks.proofs.weight import resident_bytes
from mimose.bench.grid.workloads import workload_named
from mimose.bench.rows import Row
from mimose.daemon import Daemon, Lane
from mimose.daemon.base import Job
from mimose.daemon.thread import NAME
from mimose.pauses import give_way
from mimose.session import Session, attach

QUESTION = "What does the thread beside training cost the steps, and what stays of it?"
OPTIONS = (
    count("--turns", 10, "of each, for waits and stalls"),
    count("--steps", 100_000, "for long"),
    count("--sessions", 1000, "for lives"),
    ("--only", {"default": "path,waits,stalls,long,lives", "help": "with commas"}),
)

_HEAVIER = 100
_N_BLOCKS = 24
_WIDTH = 16
_STEPS_A_TURN = 100
_STALL_SECONDS = 2.0
_SHAPES = 10_000
_READINGS = 10
_MOST_GROWTH = 0.05
"""Of the median step, under a hundred times the work."""
_MOST_STALL = 1e-3
_MOST_MIB = 4.0
_WORKLOAD = "tr-t5"
_PATH_BUDGET = "+190MiB"
_PATH_STEPS = 100
_MOST_ON_PATH = 0.002
_PATIENCE_SECONDS = 5.0
"""For a job that runs as its session is dropped."""
_COLUMNS = (
    *("median ms", "p99 ms", "longest ms", "ever ms", "over usual", "from", "to"),
    *("resident MiB", "learned MiB", "sessions", "threads", "objects"),
    *("seconds", "on path", "longest known ms", "planned", "ready", "proven"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DaemonRow(Row):
    """One turn, one reading or one way to end."""

    part: str
    work: str
    """``usual``, ``heavy`` or ``none``; of `lives`, the way a session ends."""
    turn: int
    count: int
    """Steps, products or sessions."""
    median_seconds: float = 0.0
    p99_seconds: float = 0.0
    longest_seconds: float = 0.0
    path_seconds: float = 0.0
    """Of all steps, on plans and fits."""
    total_seconds: float = 0.0
    known_longest_seconds: float = 0.0
    """The most that a step spent so whose inputs were planned before."""
    proven: int = 0
    """Steps whose plan was proven to cost the least."""
    ready: int = 0
    """Steps whose plan was there."""
    planned: int = 0
    held_bytes: int = 0
    """Resident set."""
    learned_bytes: int = 0
    """Of what was learned, as text."""
    threads_left: int = 0
    """Alive afterwards, but for the main one."""
    objects_left: int = 0
    """Sessions' parts alive afterwards."""


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Ask each part in a process of its own."""
    answer = Answer()
    asked = vars(options)
    for part in str(options.only).split(","):
        task = {name: asked[name] for name in ("turns", "steps", "sessions")}
        rows = rows_of(DaemonRow, "daemon", settings, part=part, **task)
        for line, bars in _SUMMARIES[part](rows):
            whole = {**dict.fromkeys(_COLUMNS), **line}
            answer.add(f"{part}: {whole.pop('work')}", [], whole, bars, head="part")
        answer.rows += rows
    return answer


_Summary = Iterator[tuple[dict[str, Any], list[Bar]]]


def _by_work(rows: Sequence[DaemonRow]) -> Iterator[tuple[str, list[DaemonRow]]]:
    for work in dict.fromkeys(row.work for row in rows):
        yield work, [row for row in rows if row.work == work]


def _waits(rows: Sequence[DaemonRow]) -> _Summary:
    usual = [row for row in rows if row.work == "usual"]
    for work, own in _by_work(rows):
        ratios = [
            row.median_seconds / other.median_seconds
            for row, other in zip(own, usual, strict=True)
        ]
        far = statistics.median(row.p99_seconds for row in own)
        far_usual = statistics.median(row.p99_seconds for row in usual)
        line = {
            "work": work,
            "median ms": 1e3 * statistics.median(r.median_seconds for r in own),
            "p99 ms": 1e3 * far,
            "over usual": statistics.median(ratios) - 1.0,
            "from": min(ratios) - 1.0,
            "to": max(ratios) - 1.0,
        }
        bars = []
        if work == "heavy":
            more = statistics.median(ratios) - 1.0, far / far_usual - 1.0
            bars = [
                Bar(f"{what} over usual", value, _MOST_GROWTH, is_share=True)
                for what, value in zip(("median", "p99"), more, strict=True)
            ]
        yield line, bars


def _stalls(rows: Sequence[DaemonRow]) -> _Summary:
    for work, own in _by_work(rows):
        longest = statistics.median(r.longest_seconds for r in own)
        line = {
            "work": work,
            "median ms": 1e3 * statistics.median(r.median_seconds for r in own),
            "p99 ms": 1e3 * statistics.median(r.p99_seconds for r in own),
            "longest ms": 1e3 * longest,
            "ever ms": 1e3 * max(r.longest_seconds for r in own),
        }
        is_none = work == "none"
        yield line, [] if is_none else [Bar("longest stall", longest, _MOST_STALL)]


def _long(rows: Sequence[DaemonRow]) -> _Summary:
    for row in rows:
        yield (
            {
                "work": str(row.count),
                "resident MiB": row.held_bytes / MIB,
                "learned MiB": row.learned_bytes / MIB,
            },
            [],
        )
    half = rows[len(rows) // 2]
    grown = (rows[-1].held_bytes - half.held_bytes) / MIB
    line = {"work": "second half", "resident MiB": grown}
    yield line, [Bar("MiB grown in the second half", grown, _MOST_MIB)]


def _lives(rows: Sequence[DaemonRow]) -> _Summary:
    for row in rows:
        line = {
            "work": row.work,
            "sessions": row.count,
            "threads": row.threads_left,
            "objects": row.objects_left,
        }
        left = float(row.threads_left + row.objects_left)
        yield line, [Bar("left behind", left, 0.0)]


def _path(rows: Sequence[DaemonRow]) -> _Summary:
    for row in rows:
        share = row.path_seconds / row.total_seconds
        line = {
            "work": row.work,
            "seconds": row.total_seconds,
            "on path": share,
            "longest known ms": 1e3 * row.known_longest_seconds,
            "planned": row.planned,
            "ready": row.ready,
            "proven": row.proven,
        }
        bar = Bar("on the steps' path", share, _MOST_ON_PATH, is_share=True)
        yield line, [bar] if row.work == "watched" else []


_SUMMARIES: Mapping[str, Callable[[Sequence[DaemonRow]], _Summary]] = {
    "path": _path,
    "waits": _waits,
    "stalls": _stalls,
    "long": _long,
    "lives": _lives,
}


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Do one part."""
    torch.manual_seed(task["seed"])
    parts: dict[str, Callable[[], Iterator[Mapping[str, Any]]]] = {
        "path": _work_path,
        "waits": partial(_work_waits, task["turns"]),
        "stalls": partial(_work_stalls, task["turns"]),
        "long": partial(_work_long, task["steps"]),
        "lives": partial(_work_lives, task["sessions"]),
    }
    for said in parts[task["part"]]():
        yield {"part": task["part"], **said}


def _work_path() -> Iterator[Mapping[str, Any]]:
    """Train the same batches without a thread, with it, and looking ahead as well."""
    workload = workload_named(_WORKLOAD)
    assert workload.trace is not None
    sizes = workload.trace(np.random.default_rng(0), _PATH_STEPS)
    for kind in ("inline", "thread", "watched"):
        torch.manual_seed(0)
        model = workload.build("tiny")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        batches = (
            workload.batch(each, "tiny", torch.Generator().manual_seed(i))
            for i, each in enumerate(sizes)
        )
        with attach(model, _PATH_BUDGET, refine=kind != "inline") as session:
            spent = _Spent(session)
            each = session.watch(batches) if kind == "watched" else batches
            began = time.perf_counter()
            for batch in each:
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                spent.next()
            total = time.perf_counter() - began
            planned = [r for r in session.records if r.phase == "plan"]
            known = [
                seconds
                for seconds, before in zip(
                    spent.by_step[1:], session.records, strict=False
                )
                if before.phase == "plan"
            ]
            yield {
                "work": kind,
                "turn": 0,
                "count": len(sizes),
                "path_seconds": sum(spent.by_step),
                "known_longest_seconds": max(known, default=0.0),
                "total_seconds": total,
                "planned": len(planned),
                "ready": sum(r.cache_hit for r in planned),
                "proven": sum(r.is_optimal for r in planned),
            }


class _Spent:
    """Adds up, by step, what a session spends on plans and fits in the loop's thread.

    Args:
        session: The session.
    """

    def __init__(self, session: Session) -> None:
        engine = session._engine
        self.by_step = [0.0]
        for part, name in (
            (engine.driver, "_decide"),
            (engine.writers, "absorb"),
            (engine.ahead, "hand"),
            (engine.epoch, "check"),
        ):
            setattr(part, name, self._timed(getattr(part, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.by_step[-1] += time.perf_counter() - began

        return timed

    def next(self) -> None:
        """Begin another step."""
        self.by_step.append(0.0)


class _Loaded:
    """A daemon whose jobs go on computing until they have taken a hundred times."""

    is_inline = False

    def __init__(self) -> None:
        self._daemon = Daemon()
        self.is_heavy = False
        self.take_failure = self._daemon.take_failure
        self.expect_wait = self._daemon.expect_wait
        self.catch_up = self._daemon.catch_up
        self.close = self._daemon.close

    def submit(self, lane: Lane, key: Hashable, job: Job) -> None:
        self._daemon.submit(lane, key, partial(self._run, job))

    def _run(self, job: Job) -> None:
        before = time.thread_time()
        job()
        spent = time.thread_time() - before
        while self.is_heavy and time.thread_time() < before + _HEAVIER * spent:
            sum(range(200))
            give_way()


class _Training:
    """Blocks, a session and shapes that never come twice."""

    def __init__(self) -> None:
        self.model = blocks.Blocks(_N_BLOCKS, _WIDTH)
        self.session = attach(self.model, AMPLE_BYTES, planner=_Half())
        engine = self.session._engine
        self.daemon = _Loaded()
        engine.background.close()
        engine.background = engine.learner.background = self.daemon
        self._rows = itertools.count(600)
        for step in range(40):
            self.step((4, 600, 8, 300, 1200, 900)[step % 6])

    def announce(self) -> None:
        """Have the daemon plan for shapes that never come."""
        engine = self.session._engine
        last = engine.describer.last
        assert last is not None
        facts, table = last
        memory = engine.driver.memory_now()
        for n in range(8):
            sizes = table.fill(
                {"states.0": next(self._rows) % 600 + n + 1}, facts.sizes
            )
            engine.policy.prepare(facts._replace(sizes=sizes), table, memory)

    def step(self, n_rows: int) -> float:
        states = torch.rand(n_rows, _WIDTH)
        began = time.perf_counter()
        self.model(states).loss.backward()
        self.model.zero_grad(set_to_none=True)
        return time.perf_counter() - began


class _Half(blocks.Told):
    """Every second block is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.choice = (1, 0) * (_N_BLOCKS // 2)


def _work_waits(turns: int) -> Iterator[Mapping[str, Any]]:
    training = _Training()
    sizes = itertools.count(5)
    for turn in range(turns):
        kinds = ("usual", "heavy") if turn % 2 else ("heavy", "usual")
        for kind in kinds:
            training.daemon.is_heavy = kind == "heavy"
            training.announce()
            seconds = []
            for _ in range(_STEPS_A_TURN):
                seconds.append(training.step(next(sizes) % 500 + 5))
                training.announce()
            training.daemon.is_heavy = False
            yield {"work": kind, "turn": turn, **_times(seconds)}
            time.sleep(0.5)


def _times(seconds: Sequence[float]) -> dict[str, Any]:
    return {
        "count": len(seconds),
        "median_seconds": statistics.median(seconds),
        "p99_seconds": quantile(seconds, 0.99),
        "longest_seconds": max(seconds),
    }


def _work_stalls(turns: int) -> Iterator[Mapping[str, Any]]:
    training = _Training()
    left, right = torch.rand(2, 64, 64)
    for turn in range(turns):
        for kind in ("none", "heavy"):
            training.daemon.is_heavy = kind == "heavy"
            seconds = []
            end = time.perf_counter() + _STALL_SECONDS
            while (began := time.perf_counter()) < end:
                torch.mm(left, right)
                seconds.append(time.perf_counter() - began)
                if kind == "heavy" and len(seconds) % 1000 == 0:
                    training.announce()
            training.daemon.is_heavy = False
            yield {"work": kind, "turn": turn, **_times(seconds)}
            time.sleep(0.5)


def _work_long(steps: int) -> Iterator[Mapping[str, Any]]:
    model = blocks.Blocks(2, 4)
    order = torch.randint(1, _SHAPES + 1, (steps,)).tolist()
    with attach(model, AMPLE_BYTES) as session:
        for done, n_rows in enumerate(order, start=1):
            model(torch.rand(n_rows, 4)).loss.backward()
            model.zero_grad(set_to_none=True)
            if done % (steps // _READINGS) == 0:
                learned = len(repr(session.state_dict()))
                gc.collect()
                yield {
                    "work": "usual",
                    "turn": 0,
                    "count": done,
                    "held_bytes": resident_bytes(),
                    "learned_bytes": learned,
                }


def _work_lives(sessions: int) -> Iterator[Mapping[str, Any]]:
    for end in (_detach, _drop, _raise, _interrupt):
        for _ in range(sessions):
            end(_lived())
        until = time.perf_counter() + _PATIENCE_SECONDS
        while (left := _left()) != (0, 0) and time.perf_counter() < until:
            time.sleep(0.1)
        threads_left, objects_left = left
        yield {
            "work": end.__name__.strip("_"),
            "turn": 0,
            "count": sessions,
            "threads_left": threads_left,
            "objects_left": objects_left,
            "held_bytes": resident_bytes(),
        }


def _left() -> tuple[int, int]:
    """Return how many threads and sessions' parts are alive."""
    gc.collect()
    kinds = (Session, Daemon)
    threads = [each for each in threading.enumerate() if each.name == NAME]
    return len(threads), sum(type(each) in kinds for each in gc.get_objects())


def _lived() -> Session:
    model = blocks.Blocks(2, 4)
    session = attach(model, AMPLE_BYTES)
    for n_rows in (4, 8, 6):
        model(torch.rand(n_rows, 4)).loss.backward()
    return session


def _detach(session: Session) -> None:
    session.detach()


def _drop(session: Session) -> None:
    del session


def _raise(session: Session) -> None:
    session._engine.learner._teach(lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
    del session


def _interrupt(session: Session) -> None:
    try:
        with session:
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
