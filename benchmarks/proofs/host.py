"""What does our own code take of the host: at new shapes, and for each layer call?

All on the hollow card, where a step takes only the host's time. Two models train
by turns with the same batches, each on a separate simulated device:

- kept: with all kept, beside the bare model
- card: on a card that does not hold all, beside transformers' checkpointing
- full: the same, under ``planner="full"``

Its last part, calls, prices in microseconds what is added to a bare call of a layer:
by ``torch.utils.checkpoint`` without reentry, by our actions, by a measured step in
which all is recomputed, and by the layer's second run alone, which all pay. A step, a
plan, a lesson (what one measured step teaches) and a fit are priced whole. Seconds are
CPU time of all threads: the worker thread's too.

    python -m benchmarks.proofs host
    python -m benchmarks.proofs host --parts kept --workloads bert-large --steps 60
"""

from __future__ import annotations

import contextlib
import copy
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Options, Row, Rows, Settings, Task
from benchmarks.proofs.numbers import quantile
from benchmarks.proofs.playback import Playback
from benchmarks.scale.models import WORKLOADS
from benchmarks.scale.run import BUDGET, GIB, Run, build
from mimose.bench.device import SIM
from mimose.cost.learner import Learner
from mimose.model.layers import find_layers
from mimose.policy.policy import Policy
from mimose.predictors.regression import Fit
from mimose.session import attach
from mimose.tensors import tensors_in

QUESTION = "What does our own code take of the host, at new shapes too?"
DEFAULTS = {"seed": 1, "threads": 1, "device": SIM}
_GIB = {"bert-large": 16, "t5-large": 24, "llama-8b-lora": 40}
_TURNS = ("kept", "card", "full")
OPTIONS = (
    common.some("--parts", (*_TURNS, "calls")),
    common.some("--workloads", _GIB),
    common.count("--steps", 200, "of a run"),
    common.count("--rounds", 40, "of each price"),
)

_EARLY, _LATE, _SETTLED = 10, 60, 140
"""Steps up to which a run is new, learns, and has not settled."""
_AMPLE = 16
"""How many times as large a card that holds all is."""
_WARM_UP, _LENGTH = 48, 160
_TIMED = (
    (Policy, "decide", "plan"),
    (Learner, "absorb", "lesson"),
    (Fit, "__init__", "fit"),
)
_PLANS = {"kept": "k", "selective": "s", "recomputed": "r"}


def ask(settings: Settings, options: Options) -> Answer:
    """Run what is asked for."""
    answer = Answer(path=settings.out / "host.csv")
    for part in options.parts:
        for workload in options.workloads if part != "calls" else ("bert-large",):
            task = {"part": part, "workload": workload}
            rows = common.measured(
                "host", settings, **task, steps=options.steps, rounds=options.rounds
            )
            rows = [{**task, **row} for row in rows]
            judge = _judge_calls if part == "calls" else _judge_turns
            answer.add(f"{part} {workload}", rows, *judge(part, rows), head="run")
    return answer


def _judge_turns(part: str, rows: Sequence[Row]) -> common.Verdict:
    """Judge the ratios of one run, by its steps."""

    def ratio(first: int, last: int, share: float = 0.5) -> float | None:
        own = rows[first:last]
        return quantile((row["seconds"] / row["other_seconds"] for row in own), share)

    begin = [
        sum(r[name] for r in rows[:_EARLY]) for name in ("seconds", "other_seconds")
    ]
    late = rows[_EARLY:_LATE]
    kept = sum(row["keeps_all"] for row in late) / max(1, len(late))
    line = {
        "all kept": kept,
        "first ten": begin[0] / begin[1],
        "to 60": ratio(_EARLY, _LATE),
        "90th": ratio(_EARLY, _LATE, 0.9),
        "settled": ratio(_SETTLED, len(rows)),
    }
    most = {"to 60": 1.1, "90th": 1.35, "settled": 1.05}
    if part != "kept":
        most = {"first ten": 1.3, "to 60": 0.9 if kept >= 1 / 3 else 1.05}
    if part == "full":
        most = {"to 60": 1.05, "settled": 1.05}
    return line, [Bar(name, line[name], at_most) for name, at_most in most.items()]


def _judge_calls(part: str, rows: Sequence[Row]) -> common.Verdict:
    """Judge the prices of one call."""
    del part
    line = {row["what"]: row["microseconds"] for row in rows}
    rerun = line["layer again"]
    own, torchs = (line[name] - rerun for name in ("recomputed call", "checkpoint"))
    line["ours of torch's"] = own / torchs
    line["ours of torch's, with the second run"] = (own + rerun) / (torchs + rerun)
    bar = Bar("added to a recomputed layer, ours of torch's", own / torchs, 0.5)
    return line, [bar]


# ------------------------------------------------------------------ in the child


def work(task: Task) -> Rows:
    """Run one part."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(task["seed"])
    yield from (_prices if task["part"] == "calls" else _turns)(task)


def _turns(task: Task) -> Rows:
    """Train ours and another model by turns, each on its device."""
    part, name = task["part"], task["workload"]
    gib = _GIB[name] * (_AMPLE if part == "kept" else 1)
    ours, other = pair = _built(0, name, gib), _built(1, name, _AMPLE * _GIB[name])
    for index, run in enumerate(pair):  # what a process does once
        _seconds(index, partial(run.train, tuple(low for low, _ in run.workload.spans)))
    if part != "kept":
        other.model.gradient_checkpointing_enable()  # type: ignore[operator]
    torch.accelerator.set_device_index(0)
    torch.accelerator.empty_cache()
    planner = "full" if part == "full" else "auto"
    gc.collect()
    gc.freeze()
    with attach(ours.model, int(BUDGET * gib * GIB), planner=planner) as session:
        all_sizes = ours.workload.sizes(task["steps"], task["seed"])
        for step, sizes in enumerate(all_sizes):
            # A hollow card remembers what kernels do at a shape: the first would pay.
            _seconds(1, partial(other.train, sizes))
            took = {
                index: _seconds(index, partial(pair[index].train, sizes))
                for index in ((0, 1), (1, 0))[step % 2]
            }
            record = session.records[-1]
            yield {
                "step": step,
                "sizes": "x".join(map(str, sizes)),
                "phase": record.phase,
                "keeps_all": set(record.actions) == {"keep"},
                "seconds": took[0],
                "other_seconds": took[1],
                "plan_seconds": record.plan_seconds,
            }


def _built(index: int, workload: str, gib: int) -> Run:
    import mimose.sim

    mimose.sim.use()
    torch.accelerator.set_device_index(index)
    task = {"device": SIM, "gib": gib, "card": "h100"}
    return build(WORKLOADS[workload], task)


def _seconds(index: int, step: Callable[[], object]) -> float:
    """Return the CPU time of a step on a device."""
    torch.accelerator.set_device_index(index)
    began = time.process_time()
    step()
    return time.process_time() - began


def _prices(task: Task) -> Rows:
    """Price calls at one shape, by differences between ways of training."""
    run = _built(0, task["workload"], _AMPLE * _GIB[task["workload"]])
    bare, n_calls = run.model, len(find_layers(run.model, None))
    ways: dict[str, Callable[[], object]] = {"bare": partial(_step, run, bare)}
    for name, wrap in (("again", _again), ("checkpoint", _checkpointed)):
        model = copy.deepcopy(bare)
        for _, layer in find_layers(model, None):
            layer.forward = partial(wrap, layer.forward)
        ways[name] = partial(_step, run, model)
    sessions = []
    for name, code in (*_PLANS.items(), ("one kept", "k")):
        model = copy.deepcopy(bare)
        layers = [find_layers(model, None)[0][0]] if name == "one kept" else None
        planner = Playback()
        planner.tell(code * (1 if layers else n_calls))
        how: Any = {"planner": planner, "actions": "selective", "layers": layers}
        session = attach(model, common.AMPLE_BYTES, **how)
        for number in range(_WARM_UP):
            _step(run, model, (32, 64, 96, 128)[number % 4])
        ways[name] = partial(_step, run, model)
        planner.settle(session, ways[name])
        sessions.append(session)
    yield from _added(ways, n_calls, task["rounds"])
    for session in sessions:
        session.detach()
    yield from _learned(run, copy.deepcopy(bare), n_calls, bare)


def _added(
    ways: dict[str, Callable[[], object]], n_calls: int, n_rounds: int
) -> Iterator[Row]:
    took: dict[str, list[float]] = {name: [] for name in ways}
    gc.collect()
    gc.freeze()
    for number in range(n_rounds):
        for name in (*ways,)[:: -1 if number % 2 else 1]:
            took[name].append(_seconds(0, ways[name]))

    def added(name: str, beside: str = "bare") -> float:
        pairs = zip(took[name], took[beside], strict=True)
        return statistics.median(one - other for one, other in pairs)

    whole = statistics.median(took["bare"])
    of_a_call = {
        "bare call": whole / n_calls,
        "layer again": added("again") / n_calls,
        "checkpoint": added("checkpoint") / n_calls,
        "kept call": added("kept", "one kept") / (n_calls - 1),
        "selective call": added("selective", "kept") / n_calls,
        "recomputed call": added("recomputed", "kept") / n_calls,
        "step": added("kept"),
    }
    for name, seconds in of_a_call.items():
        yield _price(name, seconds, whole)


def _learned(
    run: Run, model: nn.Module, n_calls: int, bare: nn.Module
) -> Iterator[Row]:
    """Price calls of measured steps, lessons, plans and fits, each at new shapes."""
    took: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        for owner, name, what in _TIMED:
            call = _timed(getattr(owner, name), took.setdefault(what, []))
            stack.enter_context(mock.patch.object(owner, name, call))
        measured, planned = _at_new_shapes(run, model, took, bare)
    base = statistics.median(_seconds(0, partial(_step, run, bare)) for _ in range(9))
    yield _price("measured call", (statistics.median(measured) - base) / n_calls, base)
    for what, times in {**took, "plan": planned}.items():
        yield _price(what, statistics.median(times), base)


def _at_new_shapes(
    run: Run, model: nn.Module, took: dict[str, list[float]], bare: nn.Module
) -> tuple[list[float], list[float]]:
    """Return the seconds of measured steps without plans and lessons, and of plans."""
    measured, planned = [], []
    how: Any = {"actions": "selective", "refine": False}
    with attach(model, common.AMPLE_BYTES, **how) as session:
        for number in range(2 * _WARM_UP):
            length = 64 + 5 * number
            _step(run, bare, length)  # the hollow card remembers it
            before = {what: sum(own) for what, own in took.items()}
            seconds = _seconds(0, partial(_step, run, model, length))
            less = {what: sum(own) - before[what] for what, own in took.items()}
            seconds -= less["plan"] + less["lesson"]
            phase = session.records[-1].phase
            if phase == "collect" and number:
                measured.append(seconds)
            elif phase == "plan" and number > _WARM_UP:
                planned.append(less["plan"] - less["fit"])
    return measured, planned


def _price(what: str, seconds: float, bare: float) -> Row:
    micros = round(1e6 * seconds, 2)
    return {"what": what, "microseconds": micros, "of_bare_step": seconds / bare}


def _step(run: Run, model: nn.Module, length: int = _LENGTH) -> None:
    """Run one forward and backward; the optimizer's step is the same for all."""
    with torch.device(SIM):
        batch = run.workload.batch(run.workload.rows, (length,))
    with torch.autocast(SIM, torch.bfloat16):
        loss = model(**batch).loss
    loss.backward()
    model.zero_grad(set_to_none=True)


def _again(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a layer's forward once more in the backward, and do nothing else."""
    output = forward(*args, **kwargs)
    given = [
        value.detach().requires_grad_() if isinstance(value, torch.Tensor) else value
        for value in args
    ]

    def again(_: torch.Tensor) -> None:
        with torch.enable_grad(), torch.autocast(SIM, torch.bfloat16):
            forward(*given, **kwargs)

    next(tensors_in(output)).register_hook(again)  # type: ignore[no-untyped-call]
    return output


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    torchs: Any = checkpoint
    how = {"use_reentrant": False, "preserve_rng_state": True}
    return torchs(forward, *args, **how, **kwargs)


def _timed(call: Callable[..., Any], took: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        try:
            return call(*args, **kwargs)
        finally:
            took.append(time.process_time() - began)

    return timed
