"""What do a half and a third of the activation memory cost, and MONeT's?

The models are the five convolutional nets on which MONeT was measured, at its batches,
and transformers, which it could not run: at true size, on hollow cards, whose bytes are
exact and whose seconds are those of a roofline. Gradients exist before each step, so
its growth is activations and working memory. One process a model trains plainly, then
under a session, which learns within an ample budget and then has shares of plain
training's growth for its budget. The plans are its own, within the allocator's limit:
the times contain what the margin and the allowance for fragmentation cost.

    python -m benchmarks.proofs monet --threads 1
    python -m benchmarks.proofs monet --threads 1 --models unet
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks import convnets
from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Options, Row, Rows, Settings, Task
from benchmarks.proofs.models import names_of
from benchmarks.scale.models import WORKLOADS
from mimose.actions import selective
from mimose.bench.device import SIM
from mimose.exceptions import InfeasibleBudgetError
from mimose.planners import make_planner
from mimose.planners.actions import FINE_MENU
from mimose.session import Session, attach
from mimose.sim import use

QUESTION = "What does a third of the activation memory cost, beside MONeT's figures?"
DEFAULTS = {"device": SIM}
OPTIONS = (
    common.count("--learn", 12, "steps to learn"),
    common.count("--settle", 26, "steps within each share"),
)

_SHARES = {"half": 1 / 2, "third": 1 / 3}
"""Of plain training's growth."""
TITLES = "model", "asked", "growth", "time", "checks", "margin", "plan", "MONeT's"
"""Of the documentation's table."""
_TIMED = 17
"""The last steps within a share, over which each stripe is compared once."""
_GIB = 2**30
_ROOM_GIB = 320
"""Of the card, so that plain training fits."""

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
        task = {"model": model, "learn": options.learn, "settle": options.settle}
        task["is_expandable"] = True
        for row in common.measured("monet", settings, **task):
            name = f"{model}, {row['sizes']}"
            answer.add(name, [row], line_of(row), bars_of(row))
    return answer


def line_of(row: Row) -> dict[str, object]:
    """Return a line of the table, as the documentation has it."""
    theirs, share = "none", _SHARES[row["asked"]]
    if found := published(row["model"].removesuffix("-tf32"), share):
        is_least = f", its least, at {found[1]:.1%}" if found[1] > share else ""
        theirs = f"{found[0]:+.1%}{is_least}"
    reached = {"growth": "not reached", "time": "", "checks": "", "margin": ""}
    if row["growth"] is not None:
        reached = {name: f"{row[name]:.1%}" for name in ("growth", "checks", "margin")}
        reached["time"] = f"{row['overhead']:+.1%}"
    line = {**row, **reached, "plan": row["plan"] or "", "MONeT's": theirs}
    return {title: line[title] for title in TITLES[1:]}


def bars_of(row: Row) -> Iterator[Bar]:
    """Yield what was promised of a row."""
    limits = dict(zip(_SHARES, _CASES[row["model"]].most, strict=False))
    if limit := limits.get(row["asked"]):
        yield Bar(f"time, {row['asked']}", row["overhead"], limit, is_share=True)


# ------------------------------------------------------------------ models


class _Case(NamedTuple):
    card: str
    precision: str
    """``single``, ``TF32``, ``amp``, or the dtype of all weights."""
    rows: int
    sizes: tuple[int, ...]
    """Pixels of a side; tokens."""
    layers: list[str]
    build: Callable[[], nn.Module] | None = None
    """Of a net; None for a workload of `benchmarks.scale`."""
    workload: str = ""
    most: tuple[float, ...] = ()
    """What a half may cost, and a third."""


def _layers(n: int, name: str = "layers") -> list[str]:
    return [f"{name}.{number}" for number in range(n)]


def _net(
    build: Any, rows: int, layers: list[str], *most: float, px: int = 224
) -> _Case:
    return _Case("a100", "single", rows, (px,), layers, build, most=most)


def _text(
    workload: str, precision: str, sizes: tuple[int, ...], *most: float, **more: Any
) -> _Case:
    rows, card = WORKLOADS[workload].rows, more.get("card", "h100")
    return _Case(card, precision, rows, sizes, more["layers"], None, workload, most)


_UNET = ["stem", *_layers(4, "downs"), *_layers(4, "ups")]
_BERT = _layers(24, "bert.encoder.layer")
_T5 = [*_layers(24, "encoder.block"), *_layers(24, "decoder.block")]
_LLAMA = _layers(32, "base_model.model.model.layers")
_RESNET = _net(convnets.resnet50, 184, ["stem", *_layers(10)], 0.075, 0.125)
_CASES: Mapping[str, _Case] = {
    "resnet50": _RESNET,
    "resnet50-tf32": _RESNET._replace(precision="TF32", most=()),
    "googlenet": _net(convnets.googlenet, 320, ["stem", *_layers(12)], 0.065, 0.12),
    "mobilenet": _net(convnets.mobilenet_v2, 272, ["stem", *_layers(18)], 0.055, 0.13),
    "unet": _net(lambda: convnets.UNet(64), 11, _UNET, 0.1, px=512),
    "vgg16": _net(convnets.vgg16, 176, _layers(5)),
    "bert-large": _text("bert-large", "amp", (512,), 0.15, 0.21, layers=_BERT),
    "bert-large-fp32": _text(
        *("bert-large", "single", (512,), 0.1, 0.175), layers=_BERT, card="a100"
    ),
    "t5-large": _text("t5-large", "amp", (1024, 256), 0.13, 0.19, layers=_T5),
    "llama-8b-lora": _text(
        *("llama-8b-lora", "bfloat16", (4096,), 0.065, 0.13), layers=_LLAMA
    ),
}
"""MONeT's batches, and those of `benchmarks.scale`."""


# ------------------------------------------------------------------ the child


class _Trained:
    """A model on a hollow card, and its steps."""

    def __init__(self, case: _Case) -> None:
        self._case, self._sim = case, use()
        self._sim.set_total_memory(_ROOM_GIB * _GIB)
        torch.backends.cudnn.allow_tf32 = case.precision == "TF32"
        self._sim.set_hollow(self._sim.CARDS[case.card])
        is_half = case.precision not in ("single", "TF32", "amp")
        torch.set_default_dtype(getattr(torch, case.precision if is_half else "float"))
        self._workload = WORKLOADS.get(case.workload)
        build = self._workload.build if self._workload else case.build
        assert build is not None
        with torch.device("sim"):
            self.model = build().train()
        torch.set_default_dtype(torch.float)
        self._weights = [w for w in self.model.parameters() if w.requires_grad]
        for weight in self._weights:
            weight.grad = torch.zeros_like(weight)
        self._optimizer = torch.optim.SGD(self._weights, lr=0.1)

    def _batch(self) -> Mapping[str, Any]:
        case = self._case
        if self._workload:
            return self._workload.batch(case.rows, case.sizes)
        side = case.sizes[0]
        is_mask = isinstance(self.model, convnets.UNet)
        labels = torch.zeros(case.rows, dtype=torch.long)
        if is_mask:
            labels = torch.zeros(case.rows, side, side)
        return {"pixel_values": torch.zeros(case.rows, 3, side, side), "labels": labels}

    def step(self) -> tuple[float, int, int]:
        """Train once; return seconds, bytes before, and the growth."""
        memory, is_amp = torch.accelerator, self._case.precision == "amp"
        memory.reset_peak_memory_stats()
        start, before = memory.memory_allocated(), self._sim.clock()
        with torch.device("sim"):
            batch = self._batch()
        with torch.autocast("sim", torch.bfloat16, enabled=is_amp):
            loss = self.model(**batch).loss
        loss.backward()
        del loss
        seconds: float = self._sim.clock().since(before).seconds
        growth = memory.max_memory_allocated() - start
        self._optimizer.step()
        for weight in self._weights:
            assert weight.grad is not None
            weight.grad.zero_()
        return seconds, start, growth

    @contextlib.contextmanager
    def checks_timed(self) -> Iterator[list[float]]:
        """Add up the seconds of what is compared within the block."""
        found, summed = [0.0], selective._sum_of

        def timed(tensor: torch.Tensor, stripe: int | None) -> torch.Tensor:
            before = self._sim.clock()
            total = summed(tensor, stripe)
            found[0] += self._sim.clock().since(before).seconds
            return total

        selective._sum_of = timed
        try:
            yield found
        finally:
            selective._sum_of = summed


def work(task: Task) -> Rows:
    """Train plainly, then within each share."""
    warnings.filterwarnings("ignore")
    case = _CASES[task["model"]]
    trained = _Trained(case)
    seconds, start, plain = [trained.step() for _ in range(3)][-1]
    sizes = " × ".join(map(str, (case.rows, *case.sizes)))
    about = {"model": task["model"], "sizes": sizes, "card": case.card}
    about |= {"plain_growth_bytes": plain, "plain_seconds": seconds}
    how: dict[str, Any] = {"layers": case.layers, "actions": "selective"}
    with attach(
        trained.model, int(start + 1.3 * plain), refine=False, **how
    ) as session:
        for _ in range(task["learn"]):
            trained.step()
        for asked, share in _SHARES.items():
            try:
                told = _within(share, session, trained, start, plain, task["settle"])
            except (InfeasibleBudgetError, torch.OutOfMemoryError):
                told = {"growth": None, "overhead": None, "plan": None}
            else:
                told["overhead"] = told.pop("seconds") / seconds - 1.0
                told["checks"] /= seconds
                told["margin"] *= told["overhead"]
            yield {**about, "asked": asked, **told}


def _within(
    share: float, session: Session, trained: _Trained, start: int, plain: int, n: int
) -> dict[str, Any]:
    """Train within a share of the growth; return what the last steps took."""
    session.budget = int(start + share * plain)
    before = session.summary().retries
    for _ in range(n):
        trained.step()
    with trained.checks_timed() as checks:
        seconds = [trained.step()[0] for _ in range(_TIMED)]
    records = list(session.records)[-n - _TIMED :]
    last = records[-1]
    assert last.observed_peak_bytes is not None
    problem = session.planning_problem()
    choice = [problem.actions.index(action) for action in last.actions]
    cost = sum(problem.cost[at, own] for at, own in enumerate(choice))
    whole = problem.start_bytes + share * plain
    free = make_planner("auto").plan(replace(problem, budget_bytes=whole))
    return {
        "seconds": sum(seconds) / _TIMED,
        "growth": (last.observed_peak_bytes - last.start_bytes) / plain,
        "predicted": last.prediction_error,
        "checks": checks[0] / _TIMED,
        "margin": float(1.0 - free.extra_cost / cost),
        "plan": FINE_MENU.codes(last.actions),
        "phase": last.phase,
        "steps_over": sum(record.is_over for record in records),
        "reruns": session.summary().retries - before,
    }
