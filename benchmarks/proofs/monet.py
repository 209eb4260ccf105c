"""What does a third of the activation memory cost with our exact actions, and MONeT's?

The models are five convolutional nets on which MONeT was measured, and a transformer,
which it could not run. Gradients exist before each step, so its growth is activations
and working memory. Each model has three processes. On the CPU, with one thread, each
action of all layers takes turns with plain training, in CPU time: its price. On the
simulated device, where bytes are exact, a session learns what each layer call holds and
costs under each action, plans for a half and a third of plain training's growth, and
measures each plan's growth. Then these plans are timed on the CPU in the same way.

    python -m benchmarks.proofs monet --threads 1
    python -m benchmarks.proofs monet --threads 1 --models unet --rounds 5
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks import convnets
from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Options, Row, Rows, Settings, Task
from benchmarks.proofs.models import names_of
from benchmarks.proofs.playback import Playback, Trained, by_turns, overhead
from mimose.bench.child import run_child
from mimose.bench.machine import HEAP_IS_KEPT
from mimose.bench.step_meter import DeviceStepMeter
from mimose.bench.zoo import ZOO, Batch, moved
from mimose.measure.storage import StorageTracker
from mimose.planners import (
    InfeasibleBudgetError,
    Optimal,
    Planner,
    PlanningProblem,
    everywhere,
)
from mimose.planners.actions import FINE_MENU
from mimose.session import Session, attach

QUESTION = "What does a third of the activation memory cost, beside MONeT's figures?"
OPTIONS = (
    common.count("--rounds", 9, "of timing"),
    common.count("--learn", 24, "steps to learn"),
)

_SHARES = (1 / 2, 1 / 3)
"""The planned shares of plain training's growth."""
_LEAST_AS_GOOD = 4
"""The least number of models for which a third of the memory costs no more than
published."""
_MOST = 0.16
"""MONeT's overhead at a third of the memory, of all its models the most."""

# ------------------------------------------------------------------ published

_PUBLISHED = """
resnet50 15.06 10.01:3.22 9.01:4.68 8.01:5.56 6.99:7.28 6.00:9.31 4.99:11.95
googlenet 14.93 9.98:7.13 8.99:7.87 8.01:8.44 7.02:9.71 6.01:12.14 4.99:15.77
unet 14.32 10.01:-4.10 9.01:-2.07 8.02:-0.09 7.00:1.39 6.01:4.95 5.01:11.51
mobilenet 14.46 10.02:2.40 9.01:3.10 8.02:4.77 7.01:5.53 6.01:7.55 5.01:8.72
vgg16 14.12 9.71:-5.30 8.66:-4.64 7.88:-2.18 6.82:1.99 5.90:5.44 5.51:9.11
"""
"""MONeT's (Shah et al., ICLR 2021): GB that plain PyTorch holds at the peak of a step
on a GPU of 16 GB, at batches that nearly fill it, so that weights and gradients are a
small part; then GB and per cent of overhead."""


def published(model: str, share: float) -> tuple[float, float] | None:
    """Return MONeT's overhead at a share of the memory, linear between two rows.

    Args:
        model: The model's name.
        share: The share of plain training's memory.

    Returns:
        The overhead, and its share of the memory, which is larger if MONeT has no row
        of so small a share. None if it has no row of the model.
    """
    lines = {line.split()[0]: line.split()[1:] for line in _PUBLISHED.split("\n")[1:-1]}
    if model not in lines:
        return None
    plain, *rows = ([float(n) for n in each.split(":")] for each in lines[model])
    points = [(1.0, 0.0), *((gb / plain[0], percent / 100) for gb, percent in rows)]
    for (high, above), (low, below) in itertools.pairwise(points):
        if low <= share <= high:
            return above + (high - share) / (high - low) * (below - above), share
    least, most = points[-1]
    return (most, least) if share < least else (0.0, share)


# ------------------------------------------------------------------ the question


def ask(settings: Settings, options: Options) -> Answer:
    """Learn, plan, measure and compare, model by model."""
    answer = Answer(path=settings.out / "monet.csv")
    for model in names_of(_CASES, settings.models):
        for row in _rows(settings, options, model):
            answer.add(f"{model}, {row['batch']} × {_LENGTH}", [row], line_of(row), ())
    answer.bars.append(judge(answer.rows))
    return answer


def _rows(settings: Settings, options: Options, model: str) -> Iterator[Row]:
    """Yield a row for each plan: how large a step was, and how long it took."""

    def run(device: str, **more: Any) -> list[Row]:
        task = {"model": model, "seed": settings.seed, "device": device, **more}
        return [*run_child(__name__, task, settings.threads, environment=HEAP_IS_KEPT)]

    uniform = {
        spec.name: spec.code * len(_CASES[model].layers) for spec in FINE_MENU.specs[1:]
    }
    timed = run("cpu", plans=[*uniform.values()], rounds=options.rounds)
    prices = {name: overhead(timed, plan) for name, plan in uniform.items()}
    plain, *plans = run("sim", steps=options.learn, prices=prices)
    codes = list(dict.fromkeys(each["plan"] for each in plans))
    timed = run("cpu", plans=codes, rounds=options.rounds)
    for each in plans:
        yield {
            **{"model": model, "batch": _CASES[model].batch_size, "length": _LENGTH},
            **{**plain, **each, "overhead": overhead(timed, each["plan"])},
            **settings.provenance(),
        }


def line_of(row: Row) -> dict[str, object]:
    """Return a line of the table, as the documentation has it."""
    share = row["growth_bytes"] / row["plain_growth_bytes"]
    theirs = "none"
    if found := published(row["model"], share):
        is_least = f", its least, at {found[1]:.1%}" if found[1] > share else ""
        theirs = f"{found[0]:+.1%}{is_least}"
    return {
        "plain, MiB": f"{row['plain_growth_bytes'] / 2**20:.0f}",
        "asked": f"{row['target']}" + ", not reached" * (not row["is_reached"]),
        "growth": f"{share:.1%}",
        "time": f"{row['overhead']:+.1%}",
        "FLOPs": f"{row['recomputed_flops'] / row['plain_flops']:.1%}",
        "MONeT's at that memory": theirs,
        "planner, ms": f"{1e3 * row['planner_seconds']:.1f}",
    }


def judge(rows: Sequence[Row]) -> Bar:
    """Judge all rows; a transformer is held to the most of MONeT's models."""
    good = 0
    for row in rows:
        theirs, _ = published(row["model"], 1 / 3) or (_MOST, 1 / 3)
        is_third = str(row["target"]) == f"{1 / 3:.3g}" and row["is_reached"]
        good += is_third and row["overhead"] <= theirs
    what = "models of which a third costs no more than published"
    return Bar(what, good, at_least=_LEAST_AS_GOOD)


# ------------------------------------------------------------------ models


class _Case(NamedTuple):
    build: Callable[[], nn.Module]
    batch_size: int
    layers: list[str]
    """Names, as `attach` takes them."""


def _bert() -> nn.Module:
    sizes = {"hidden_size": 256, "num_hidden_layers": 12, "num_attention_heads": 4}
    return ZOO["bert"].build(**sizes, intermediate_size=1024)


def _layers(n: int, name: str = "layers") -> list[str]:
    return [f"{name}.{number}" for number in range(n)]


_UNET = ["stem", *_layers(4, "downs"), *_layers(4, "ups")]
_CASES: Mapping[str, _Case] = {
    "resnet50": _Case(convnets.resnet50, 16, ["stem", *_layers(10)]),
    "googlenet": _Case(convnets.googlenet, 24, ["stem", *_layers(12)]),
    "unet": _Case(lambda: convnets.UNet(32), 4, _UNET),
    "mobilenet": _Case(convnets.mobilenet_v2, 16, ["stem", *_layers(18)]),
    "vgg16": _Case(convnets.vgg16, 4, _layers(5)),
    "bert": _Case(_bert, 8, _layers(12, "bert.encoder.layer")),
}
"""At sizes that two cores can train."""
_LENGTH = 128
"""Pixels of a side; tokens of a text."""


def _batch(model: str, seed: int) -> Batch:
    n, generator = _CASES[model].batch_size, torch.Generator().manual_seed(seed)
    if model == "bert":
        return ZOO["bert"].batch({"batch": n, "length": _LENGTH}, generator)
    pixels = torch.rand((n, 3, _LENGTH, _LENGTH), generator=generator)
    labels = torch.randint(10, (n,), generator=generator)
    if model == "unet":
        labels = pixels.mean(1).round()  # a mask of each pixel
    return {"pixel_values": pixels, "labels": labels}


# ------------------------------------------------------------------ the children


def work(task: Task) -> Rows:
    """Plan and read bytes, or, where plans are given, time them."""
    trained = _made(task)
    batch = moved(_batch(task["model"], task["seed"]), task["device"])
    if "plans" in task:
        with contextlib.ExitStack() as undo:
            planned = {
                plan: undo.enter_context(_playing(plan, task, batch))
                for plan in task["plans"]
            }
            yield from by_turns(trained, planned, batch, task["rounds"])
        return
    trained.step(batch)
    meter = DeviceStepMeter(torch.device(task["device"]))
    start = meter.begin_step()
    trained.step(batch)
    plain = meter.step_peak_bytes() - start
    with StorageTracker() as tracker:
        trained.step(batch)
    yield {"plain_growth_bytes": plain, "plain_flops": tracker.flops}
    trained.loss = None
    forwards = _forward_seconds(trained, batch)
    with _attached(trained, task, "auto") as session:
        for _ in range(task["steps"]):
            trained.step(batch)
        problem = priced(session.planning_problem(), forwards, task["prices"])

    def measured(plan: dict[str, Any]) -> dict[str, Any]:
        with _playing(plan["plan"], task, batch) as (own, session, playback):
            own.step(batch)
            playback.check(session)
            last = session.records[-1]  # a session resets the peaks in measured steps
        assert last.observed_peak_bytes is not None
        growth = last.observed_peak_bytes - last.start_bytes
        again = last.recomputed_flops
        return {**plan, "growth_bytes": growth, "recomputed_flops": again}

    for share in _SHARES:
        yield plan_within(problem, plain, share, measured)
    everything = _planned(everywhere("recompute"), problem)
    yield measured({**everything, "target": "recompute all"})


def _made(task: Task) -> Trained:
    torch.manual_seed(task["seed"])
    model = _CASES[task["model"]].build().to(task["device"])
    return Trained(model)


@contextlib.contextmanager
def _playing(
    plan: str, task: Task, batch: Batch
) -> Iterator[tuple[Trained, Session, Playback]]:
    """Train another model under a plan; its session has learned enough to run it."""
    trained, playback = _made(task), Playback()
    playback.tell(plan)
    with _attached(trained, task, playback) as session:
        playback.settle(session, lambda: trained.step(batch))
        yield trained, session, playback


def _attached(trained: Trained, task: Task, planner: str | Planner) -> Session:
    return attach(
        trained.model,
        common.AMPLE_BYTES,
        layers=_CASES[task["model"]].layers,
        actions=FINE_MENU.names,
        planner=planner,
        meter="prediction" if task["device"] == "cpu" else None,
        refine=False,
    )


def _forward_seconds(trained: Trained, batch: Batch) -> Mapping[str, float]:
    """Return what each module's forward takes on the processor, by its name."""
    times: dict[str, list[float]] = collections.defaultdict(list)
    handles = []
    for name, module in trained.model.named_modules():

        def enter(*_: Any, own: list[float] = times[name]) -> None:
            own.append(-time.thread_time())

        def leave(*_: Any, own: list[float] = times[name]) -> None:
            own[-1] += time.thread_time()

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave))
    for _ in range(5):
        trained.step(batch)
    for handle in handles:
        handle.remove()
    return {name: median(each) for name, each in times.items() if each}


def priced(
    problem: PlanningProblem,
    forwards: Mapping[str, float],
    prices: Mapping[str, float],
) -> PlanningProblem:
    """Return a problem whose costs are shares of a plain step's time.

    Args:
        problem: As learned, with costs in FLOPs.
        forwards: Seconds of each module's forward, by name.
        prices: What an action of every layer adds to the step, as a share of it.
    """
    cost = problem.cost.copy()
    cost[:, -1] = [forwards[call.partition("#")[0]] for call in problem.calls]
    for action, price in prices.items():
        column = cost[:, problem.actions.index(action)]
        column *= max(price, 0.0) / column.sum()  # noise may be below 0
    return replace(problem, cost=cost)


def plan_within(
    problem: PlanningProblem,
    plain: int,
    share: float,
    measured: Callable[[dict[str, Any]], dict[str, Any]],
) -> dict[str, Any]:
    """Plan for a share, and for less where the step grew by more than predicted.

    Args:
        problem: The step's.
        plain: Bytes that plain training grows by.
        share: Of these.
        measured: Runs a plan; adds what it has measured.
    """
    asked = share
    for _ in range(6):  # each for less
        budget = problem.start_bytes + asked * plain
        found = measured(_planned(Optimal(), replace(problem, budget_bytes=budget)))
        over = found["growth_bytes"] / plain - share
        if over <= 0.0 or not found["is_reached"]:
            break
        asked -= over
    return {**found, "target": f"{share:.3g}", "is_reached": over <= 0.0}


def _planned(planner: Planner, problem: PlanningProblem) -> dict[str, Any]:
    """Plan for the budget, or for the least peak there is."""
    is_reached, began = True, time.process_time()
    try:
        plan = planner.plan(problem)
    except InfeasibleBudgetError as error:
        is_reached = False
        least = error.least_peak_bytes * (1 + 1e-12)
        plan = planner.plan(replace(problem, budget_bytes=least))
    return {
        "is_reached": is_reached,
        "plan": FINE_MENU.codes(plan.actions),
        "planner_seconds": time.process_time() - began,
    }
