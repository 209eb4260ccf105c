"""What do lossy actions cost in accuracy, at equal epochs?

A small ResNet learns scikit-learn's digits, resized to another side in each batch, as a
bare model and with every layer, the stem among them, under one lossy action. Weights,
batches and their order are the same for all. Each run holds out another fifth of the
digits, so that all of them are asked for once. Differences are taken run by run; their
95% interval is Student's. Where pooling falls short, it is trained anew with more
epochs, the learning rate's schedule as much longer, until it is as good.

    python -m benchmarks.proofs accuracy --threads 1
    python -m benchmarks.proofs accuracy --threads 1 --arms pool --runs 2 --epochs 3
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy import stats
from torch import nn

from benchmarks import digits
from benchmarks.proofs.common import (
    AMPLE_BYTES,
    Answer,
    Bar,
    Settings,
    count,
    progress,
    rows_of,
)
from mimose.bench.rows import Row
from mimose.planners import Everywhere
from mimose.session import Session, attach

QUESTION = "What do lossy actions cost in accuracy, at equal epochs?"
OPTIONS = (
    count("--epochs", 10),
    count("--runs", digits.FOLDS, "an arm, each with another fifth held out"),
    (
        "--arms",
        {
            "nargs": "+",
            "default": ["pool", "pool4", "quantize"],
            "help": "actions, each for every layer",
        },
    ),
)

EXACT = "exact"
"""The arm of the bare model."""
_JUDGED = "pool"
_MOST_POINTS, _MOST_EPOCHS = 0.5, 1.3
_SIDES = (48, 56, 64, 72, 80)
_SIDE = 64
"""Where accuracy is asked for."""
_DEPTHS = (1, 1, 1, 1)
_IMAGES = 32
_RATE, _MOMENTUM, _DECAY, _WARM_UP = 0.05, 0.9, 5e-4, 0.2
_LEVEL = 0.975
_POINTS = 100.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AccuracyRow(Row):
    """One epoch of one run."""

    arm: str
    """``exact``, or the action of every layer."""
    run: int
    """Settles weights, batches and the fifth that is held out."""
    epochs: int
    """Of the whole run, which the learning rate follows."""
    epoch: int
    """Counts from 1."""
    loss: float
    """Mean of the epoch's steps."""
    held_out: int
    """Digits that were asked for."""
    right: int
    """Digits that were named correctly."""
    layers: int
    """That run under the action."""
    limited: int
    """Layers that turned out not to run under it; they count for nothing."""
    seconds: float
    """Of the process, for the epoch's steps."""

    @property
    def points(self) -> float:
        """The accuracy in per cent."""
        return _POINTS * self.right / self.held_out


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Train every arm, and compare."""
    answer = Answer()
    exact = _train(answer, settings, options, EXACT, options.epochs)
    answer.table.append(_line(EXACT, exact, exact, None))
    for arm in options.arms:
        own = _train(answer, settings, options, arm, options.epochs)
        factor = None
        if arm == _JUDGED:
            factor = _longer(answer, settings, options, exact, own)
            answer.bars.append(_judge(exact, own, factor))
        answer.table.append(_line(arm, own, exact, factor))
    return answer


def _train(
    answer: Answer,
    settings: Settings,
    options: argparse.Namespace,
    arm: str,
    epochs: int,
) -> list[AccuracyRow]:
    """Run an arm; return the last epoch of each of its runs."""
    task = {"arm": arm, "runs": options.runs, "epochs": epochs}
    rows = rows_of(AccuracyRow, "accuracy", settings, **task)
    answer.rows += rows
    progress(f"accuracy: {arm}, {epochs} epochs: done")
    return [row for row in rows if row.epoch == epochs]


def _longer(
    answer: Answer,
    settings: Settings,
    options: argparse.Namespace,
    exact: Sequence[AccuracyRow],
    own: Sequence[AccuracyRow],
) -> float | None:
    """Return by how much more epochs an arm is as good; None where that is too many."""
    most = math.floor(_MOST_EPOCHS * options.epochs)
    epochs: int = options.epochs
    while _mean(own) < _mean(exact):
        epochs += 1
        if epochs > most:
            return None
        own = _train(answer, settings, options, own[0].arm, epochs)
    return float(epochs / options.epochs)


def _judge(
    exact: Sequence[AccuracyRow], own: Sequence[AccuracyRow], factor: float | None
) -> Bar:
    """Judge the points lost at equal epochs; where they are many, the epochs."""
    lost = _mean(exact) - _mean(own)
    if lost <= _MOST_POINTS:
        what = f"{own[0].arm}: points lost at equal epochs"
        return Bar(what, lost, _MOST_POINTS)
    what = f"{own[0].arm}: epochs for exact's accuracy ÷ exact's epochs"
    return Bar(what, factor, _MOST_EPOCHS)


def _mean(rows: Sequence[AccuracyRow]) -> float:
    return statistics.fmean(row.points for row in rows)


def _line(
    arm: str,
    own: Sequence[AccuracyRow],
    exact: Sequence[AccuracyRow],
    factor: float | None,
) -> dict[str, object]:
    by_run = {row.run: row.points for row in exact}
    differences = [row.points - by_run[row.run] for row in own]
    return {
        "arm": arm,
        "runs": len(own),
        "accuracy %": round(_mean(own), 2),
        "to exact": f"{statistics.fmean(differences):+.2f}",
        "95%": f"±{half_interval(differences):.2f}" if len(own) > 1 else "",
        "loss": statistics.fmean(row.loss for row in own),
        "layers": f"{own[0].layers - own[0].limited} of {own[0].layers}",
        "s an epoch": statistics.median(row.seconds for row in own),
        "epochs for exact's": factor,
    }


def half_interval(differences: Sequence[float]) -> float:
    """Return half of the 95% interval of the mean, by Student's t."""
    n = len(differences)
    spread = statistics.stdev(differences) / math.sqrt(n)
    return float(stats.t.ppf(_LEVEL, n - 1)) * spread


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Train an arm as often as asked, and tell of each epoch."""
    for run in range(task["runs"]):
        seed = task["seed"] * digits.FOLDS + run
        torch.manual_seed(seed)
        model = digits.resnet("basic", _DEPTHS, "tiny").to(task["device"])
        with _attached(model, task["arm"]) as session:
            for told in _epochs(model, seed, run, task["epochs"]):
                yield {"arm": task["arm"], "run": run, **told, **_layers(session)}


def _attached(
    model: nn.Module, arm: str
) -> contextlib.AbstractContextManager[Session | None]:
    if arm == EXACT:
        return contextlib.nullcontext()
    return attach(
        model,
        AMPLE_BYTES,
        units=digits.is_layer,
        actions=("keep", arm, "recompute"),
        planner=Everywhere(arm),
    )


def _layers(session: Session | None) -> dict[str, int]:
    if session is None:
        return {"layers": 0, "limited": 0}
    limits = session.state_dict()["cost_model"]["limits"]
    return {"layers": session.summary().units, "limited": len(limits)}


def _epochs(
    model: nn.Module, seed: int, run: int, epochs: int
) -> Iterator[dict[str, Any]]:
    """Train, and tell after each epoch how many held-out digits are named correctly."""
    train, held_out = digits.load(run % digits.FOLDS)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(
        model.parameters(), _RATE, _MOMENTUM, weight_decay=_DECAY, nesterov=True
    )
    n_steps = len(train.labels) // _IMAGES
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, _RATE, total_steps=epochs * n_steps, pct_start=_WARM_UP
    )
    for epoch in range(1, epochs + 1):
        order = torch.randperm(len(train.labels), generator=generator)
        sides = torch.randint(len(_SIDES), (n_steps,), generator=generator).tolist()
        losses = []
        began = time.process_time()
        for step, place in enumerate(sides):
            chosen = order[step * _IMAGES : (step + 1) * _IMAGES]
            batch = train.resized(chosen, _SIDES[place])
            loss = model(**{name: each.to(device) for name, each in batch.items()}).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
        yield {
            "epochs": epochs,
            "epoch": epoch,
            "loss": statistics.fmean(losses),
            "seconds": time.process_time() - began,
            "held_out": len(held_out.labels),
            "right": digits.n_right(model, held_out, _SIDE),
        }
