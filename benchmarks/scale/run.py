"""One run: a workload on a card under a strategy, in a separate process.

Sessions learn in the steps, not in the worker thread: its delay depends on the host's
other load, and so would the rows.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

import mimose
from benchmarks.proofs.numbers import mean, quantile
from benchmarks.scale.models import WORKLOADS, Sizes, Workload
from mimose.bench.grid.strategies import Oracle
from mimose.bench.rehearse.host import of_checkpointing, of_session
from mimose.planners import Pattern, make_planner
from mimose.sim import use
from mimose.sim.hollow import HOST, Clock

GIB = 2**30
STRATEGIES: Mapping[str, str] = {
    "plain": "keep everything",
    "hf": "transformers' own checkpointing",
    "static": "one plan for the longest batch, with everything known",
    "whole": "mimose, whole layers",
    "fine": "mimose, all exact actions",
    "oracle": "the exact optimum of whole layers, with everything known",
}
BUDGET = 0.95
"""The share of the card that strategies which plan are given."""
_MARGIN = 0.99
"""The share of the headroom that a plan with everything known may fill."""
_FIRST = 10
"""The steps before are left out of means."""
_MEANS = "seconds", "allocator_seconds", "user_seconds"
_OOM = "out of memory"
_MOST_OOMS = 10
"""Then plain training ends."""
_TAUGHT = 24
"""Sizes that strategies with everything known learn from, spread evenly."""


class _Hollow:
    """The simulated card, of any size, with its clock."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self._sim = use()
        self.most_gib = 16 * task["gib"]
        self.limit(task["gib"])
        card = self._sim.CARDS[task["card"]]
        if not task.get("attention_plans", True):
            card = replace(card, attention_plan=0.0)
        self._sim.set_hollow(card, HOST)
        self.stats: Callable[[], Mapping[str, int]] = self._sim.memory_stats

    def limit(self, gib: float) -> None:
        """Be of a size."""
        self._sim.set_total_memory(int(gib * GIB))

    def clock(self) -> Clock:
        """Return the card's own time."""
        now: Clock = self._sim.clock()
        return now


class _Real:
    """A card that is there, less of it where the allocator is given a limit."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self._total = torch.cuda.get_device_properties(0).total_memory
        self.most_gib = int(0.9 * self._total / GIB)
        self.limit(task["gib"])
        self.stats: Callable[[], Mapping[str, int]] = torch.cuda.memory_stats

    def limit(self, gib: float) -> None:
        """Be of a size, or whole."""
        share = gib * GIB / self._total
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))

    def clock(self) -> Clock:
        """Return the time as all that was launched has ended."""
        torch.cuda.synchronize()
        now = time.perf_counter()
        return Clock(now, 0.0, 0, 0.0, now, time.process_time(), 0, 0, 0, 0.0)


def _nothing() -> None:
    """Charge nothing."""


@dataclass
class Run:
    """A model on a card, and the loop that trains it."""

    workload: Workload
    device: str
    card: _Hollow | _Real
    model: nn.Module
    optimizer: torch.optim.Optimizer
    steps: list[dict[str, Any]] = field(default_factory=list)
    charge: Callable[[], None] = _nothing
    """Charges a step's Python that is no operator; see `mimose.bench.rehearse.host`."""

    def train(
        self,
        sizes: Sizes,
        rows: int | None = None,
        session: mimose.Session | None = None,
    ) -> None:
        """Run one step of the loop that a user writes.

        Args:
            sizes: Lengths of the batch.
            rows: Its samples; None for the workload's.
            session: Whose `step` runs forward and backward; None for the loop itself.
        """
        with torch.device(self.device):
            batch = self.workload.batch(rows or self.workload.rows, sizes)
        is_amp = self.workload.dtype == "amp"

        def run() -> None:
            with torch.autocast(self.device, torch.bfloat16, enabled=is_amp):
                loss = self.model(**batch).loss
            self.charge()
            loss.backward()

        session.step(run) if session else run()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @contextlib.contextmanager
    def checkpointed(self, everything: bool) -> Iterator[None]:
        """Train within the block under transformers' checkpointing, or plainly."""
        model: Any = self.model
        if not everything:
            yield
            return
        model.gradient_checkpointing_enable()
        try:
            with self.charged(of_checkpointing(model)):
                yield
        finally:
            model.gradient_checkpointing_disable()

    @contextlib.contextmanager
    def attached(self, budget: int | None, **options: Any) -> Iterator[mimose.Session]:
        """Train within the block in a session that learns in the steps."""
        options["refine"] = False
        with (
            mimose.attach(self.model, budget, **options) as session,
            self.charged(of_session(session)),
        ):
            yield session

    @contextlib.contextmanager
    def charged(self, charge: Callable[[], None]) -> Iterator[None]:
        """Charge steps within the block, where the card has a virtual clock."""
        if isinstance(self.card, _Hollow):
            self.charge = charge
        try:
            yield
        finally:
            self.charge = _nothing

    def watched(
        self,
        sizes: Sizes,
        rows: int | None = None,
        session: mimose.Session | None = None,
    ) -> None:
        """Run one, and note what the card says of it; arguments are those of `train`.

        Seconds of the processor end before the host waits for the card, which it does
        by asking again and again.
        """
        before, flushes = self.card.clock(), self._flushes()
        began, failed = time.process_time(), ""
        try:
            self.train(sizes, rows, session)
        except torch.OutOfMemoryError:
            failed = _OOM
        except mimose.InfeasibleBudgetError:
            failed = "left out"
        if failed:
            self.optimizer.zero_grad()
        cpu_seconds = time.process_time() - began
        clock = self.card.clock().since(before)
        self.steps.append(
            {
                "sizes": sizes,
                "failed": failed,
                "seconds": clock.seconds,
                "allocator_seconds": clock.allocator,
                "user_seconds": clock.user,
                "cpu_seconds": cpu_seconds,
                "flushes": self._flushes() - flushes,
                "reserved_bytes": self.card.stats()["reserved_bytes.all.peak"],
            }
        )

    @property
    def n_ooms(self) -> int:
        """How many steps ran out of memory."""
        return sum(step["failed"] == _OOM for step in self.steps)

    def _flushes(self) -> int:
        return int(self.card.stats()["num_alloc_retries"])


def work(task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Run a strategy on a workload; yield its numbers.

    Args:
        task: ``workload``, ``strategy``, ``device`` (``"sim"`` is hollow, of ``card``'s
            speed), ``gib``, ``card``, ``steps`` and ``seed``.
    """
    warnings.filterwarnings("ignore")
    run = build(WORKLOADS[task["workload"]], task)
    all_sizes = list(run.workload.sizes(task["steps"], task["seed"]))
    strategy = task["strategy"]
    with _applied(strategy, run, all_sizes, task) as session:
        for sizes in all_sizes:
            run.watched(sizes)
            if strategy == "plain" and run.n_ooms > _MOST_OOMS:
                break
        yield {**_told(run), **(_told_by(session) if session else {})}


def build(workload: Workload, task: Mapping[str, Any]) -> Run:
    """Return a workload's model on a card, and its optimizer.

    Args:
        workload: What is trained.
        task: ``device``, ``gib`` and ``card``, as for `work`.
    """
    device = task["device"]
    card = _Hollow(task) if device == "sim" else _Real(task)
    dtype = torch.float32 if workload.dtype == "amp" else getattr(torch, workload.dtype)
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = workload.build().to(dtype).train()
    torch.set_default_dtype(torch.float32)
    trained = (weight for weight in model.parameters() if weight.requires_grad)
    return Run(workload, device, card, model, torch.optim.AdamW(trained))


@contextlib.contextmanager
def _applied(
    strategy: str, run: Run, all_sizes: list[Sizes], task: Mapping[str, Any]
) -> Iterator[mimose.Session | None]:
    if strategy in ("plain", "hf"):
        with run.checkpointed(strategy == "hf"):
            yield None
        return
    budget = int(BUDGET * task["gib"] * GIB)
    known: Mapping[str, Any] | None = None
    planner: Any = "auto"
    if strategy in ("static", "oracle"):
        known, longest = _learned(run, all_sizes, task["gib"], budget)
        planner = Oracle(budget) if strategy == "oracle" else longest
    actions = "selective" if strategy == "fine" else "whole"
    with run.attached(budget, actions=actions, planner=planner) as session:
        if known is not None:
            session.load_state_dict(known)
        torch.accelerator.reset_peak_memory_stats()
        yield session


def _learned(
    run: Run, all_sizes: list[Sizes], gib: int, budget: int
) -> tuple[Mapping[str, Any], Pattern]:
    """Let a session learn sizes of the whole run, on a card that holds any.

    Returns:
        What it has learned, and the plan of the longest batch within the budget.
    """
    known = sorted(set(all_sizes))
    every = max(1, len(known) // _TAUGHT)
    most = run.card.most_gib
    run.card.limit(most)
    with mimose.attach(run.model, most * GIB, wall=False) as teacher:
        for sizes in [*known[::every], run.workload.longest] * 2:
            run.train(sizes)
        learned = teacher.state_dict()
        problem = teacher.planning_problem()
    room = _MARGIN * (budget - problem.start_bytes)
    problem = replace(problem, budget_bytes=problem.start_bytes + room)
    plan = make_planner("auto").plan(problem)
    torch.accelerator.empty_cache()
    run.card.limit(gib)
    return learned, Pattern("static", plan.actions)


def _told(run: Run) -> dict[str, Any]:
    """Return what the card says of the run; means are over the steps that fitted."""
    steps = [step for step in run.steps[_FIRST:] if not step["failed"]]
    left_out = sorted({s["sizes"] for s in run.steps if s["failed"] not in ("", _OOM)})
    return {
        "n_steps": len(run.steps),
        "ooms": run.n_ooms,
        "left_out": " ".join("x".join(map(str, sizes)) for sizes in left_out),
        **{name: mean(step[name] for step in steps) for name in _MEANS},
        "user_whole": sum(step["user_seconds"] for step in run.steps),
        "cpu_seconds": quantile((step["cpu_seconds"] for step in steps), 0.5),
        "cpu_early": mean(step["cpu_seconds"] for step in run.steps[_FIRST:60]),
        "flushes": sum(step["flushes"] for step in run.steps),
        "reserved_bytes": max(step["reserved_bytes"] for step in run.steps),
    }


def _told_by(session: mimose.Session) -> dict[str, Any]:
    """Return what the session says of the run."""
    summary, records = session.summary(), list(session.records)
    planned = [record for record in records if record.phase == "plan"]
    late = records[_FIRST:]
    told = (r.prediction_error for r in late if r.phase == "plan")
    errors = [abs(error) for error in told if error is not None]
    shares = [
        r.observed_growth_bytes / (r.budget_bytes - r.start_bytes)
        for r in planned
        if set(r.actions) != {"keep"} and r.observed_growth_bytes
    ]
    return {
        "reserved_bytes": session.peak_bytes,
        "over": summary.steps_over,
        "reruns": summary.retries,
        "first_plan": planned[0].step if planned else None,
        "planned_share": sum(r.phase == "plan" for r in late) / max(1, len(late)),
        "kept_share": sum(set(r.actions) == {"keep"} for r in late) / max(1, len(late)),
        "error_p99": quantile(errors, 0.99),
        "headroom_used": quantile(shares, 0.5),
        "fragmentation": summary.fragmentation,
    }
