"""What do lossy actions cost in accuracy, at equal epochs?

A small ResNet learns scikit-learn's digits, resized to another side in each batch, as a
bare model and with every layer, the stem among them, under one lossy action. Weights,
batches and their order are the same for all. Each run holds out another fifth of the
digits, so that all of them are asked for once. Differences are taken run by run; their
95% interval is Student's.

    python -m benchmarks.proofs accuracy --threads 1
    python -m benchmarks.proofs accuracy --threads 1 --runs 2 --epochs 3
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy import stats
from torch import nn

from benchmarks import digits
from benchmarks.proofs.common import AMPLE_BYTES, Answer, Bar, Settings, count, rows_of
from mimose.bench.child import RunFailedError
from mimose.bench.rows import Row
from mimose.planners import Everywhere
from mimose.session import attach

QUESTION = "What do lossy actions cost in accuracy, at equal epochs?"
OPTIONS = count("--epochs", 10), count("--runs", digits.FOLDS, "an arm")

EXACT = "exact"
"""The arm of the bare model."""
_ARMS = (EXACT, "pool", "pool4", "quantize")
_MOST_POINTS = 0.5
"""That pooling may lose."""
_SIDES = (48, 56, 64, 72, 80)
_SIDE = 64
"""Where accuracy is asked for."""
_DEPTHS = (1, 1, 1, 1)
_IMAGES = 32
_RATE, _MOMENTUM, _DECAY, _WARM_UP = 0.05, 0.9, 5e-4, 0.2
_LEVEL = 0.975


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

    @property
    def points(self) -> float:
        """The accuracy in per cent."""
        return 100.0 * self.right / self.held_out


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Train every arm, and compare the last epochs."""
    answer = Answer()
    exact: list[AccuracyRow] = []
    for arm in _ARMS:
        task = {"arm": arm, "runs": options.runs, "epochs": options.epochs}
        rows = rows_of(AccuracyRow, "accuracy", settings, **task)
        own = [row for row in rows if row.epoch == options.epochs]
        exact = exact or own
        lost = Bar("points lost", _mean(exact) - _mean(own), _MOST_POINTS)
        bars = [lost] if arm == "pool" else []
        answer.add(arm, rows, compare(own, exact), bars, head="arm")
    return answer


def _mean(rows: Sequence[AccuracyRow]) -> float:
    return statistics.fmean(row.points for row in rows)


def compare(
    own: Sequence[AccuracyRow], exact: Sequence[AccuracyRow]
) -> dict[str, object]:
    """Compare an arm's last epochs with the bare model's, run by run."""
    by_run = {row.run: row.points for row in exact}
    differences = [row.points - by_run[row.run] for row in own]
    return {
        "accuracy %": round(_mean(own), 2),
        "to exact": f"{statistics.fmean(differences):+.2f}",
        "95%": f"±{_half_interval(differences):.2f}" if len(own) > 1 else "",
        "loss": statistics.fmean(row.loss for row in own),
    }


def _half_interval(differences: Sequence[float]) -> float:
    """Return half of the 95% interval of the mean, by Student's t."""
    n = len(differences)
    spread = statistics.stdev(differences) / math.sqrt(n)
    return float(stats.t.ppf(_LEVEL, n - 1)) * spread


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Train an arm as often as asked, and tell of each epoch.

    Raises:
        RunFailedError: A layer may not run under the action.
    """
    arm, session = task["arm"], None
    for run in range(task["runs"]):
        seed = task["seed"] * digits.FOLDS + run
        torch.manual_seed(seed)
        model = digits.resnet("basic", _DEPTHS, "tiny").to(task["device"])
        if arm != EXACT:
            session = attach(
                model,
                AMPLE_BYTES,
                units=digits.is_layer,
                actions=("keep", arm, "recompute"),
                planner=Everywhere(arm),
            )
        for told in _epochs(model, seed, run, task["epochs"]):
            yield {"arm": arm, "run": run, **told}
        if session and session.state_dict()["cost_model"]["limits"]:
            msg = f"some layers may not run under {arm!r}: {session.summary()}"
            raise RunFailedError(msg)
        if session:
            session.detach()


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
            "held_out": len(held_out.labels),
            "right": digits.n_right(model, held_out, _SIDE),
        }
