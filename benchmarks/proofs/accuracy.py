"""What do lossy actions cost in accuracy, at equal epochs?

A small ResNet learns scikit-learn's 1,797 handwritten digits of 8 by 8 pixels, resized
to another size in each batch: as a bare model, and with every layer and the stem under
one lossy action. Weights, batches and their order are the same for all. Each run holds
out another fifth of the digits, so that each digit is tested once. Differences are
taken run by run; their 95% interval is Student's.

    python -m benchmarks.proofs accuracy --threads 1
    python -m benchmarks.proofs accuracy --threads 1 --runs 2 --epochs 3
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from scipy import stats
from torch import nn
from torch.nn import functional

from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Options, Row, Rows, Settings, Task
from mimose.bench.child import RunFailedError
from mimose.bench.zoo import Batch, builder
from mimose.planners import everywhere
from mimose.session import attach

_FOLDS = 5
"""The digits' parts, of which one is held out."""
QUESTION = "What do lossy actions cost in accuracy, at equal epochs?"
OPTIONS = common.count("--epochs", 10), common.count("--runs", _FOLDS, "an arm")

EXACT = "exact"
"""The arm of the bare model."""
_ARMS = (EXACT, "pool", "pool4", "quantize")
_MOST_POINTS = 0.5
"""That pooling may lose."""
_SIDES, _SIDE = (48, 56, 64, 72, 80), 64
"""Pixels in training, and where accuracy is asked for."""
_IMAGES, _ASKED = 32, 128
"""A batch, and a forward where accuracy is asked for."""
_RATE, _MOMENTUM, _DECAY, _WARM_UP = 0.05, 0.9, 5e-4, 0.2


def ask(settings: Settings, options: Options) -> Answer:
    """Train every arm, and compare the last epochs."""
    answer, exact = Answer(path=settings.out / "accuracy.csv"), list[Row]()
    for arm in _ARMS:
        task = {"arm": arm, "runs": options.runs, "epochs": options.epochs}
        rows = common.measured("accuracy", settings, **task)
        own = [row for row in rows if row["epoch"] == options.epochs]
        exact = exact or own
        line = compare(own, exact)
        bars = [Bar("points lost", -line["to exact"], _MOST_POINTS)]
        answer.add(arm, rows, line, bars if arm == "pool" else [], head="arm")
    return answer


def compare(own: Sequence[Row], exact: Sequence[Row]) -> dict[str, Any]:
    """Compare an arm's last epochs with the bare model's, run by run, in points."""
    points, bare = (
        [100 * row["right"] / row["held_out"] for row in rows] for rows in (own, exact)
    )
    more, n = [a - b for a, b in zip(points, bare, strict=True)], len(own)
    interval = None
    if n > 1:
        interval = stats.t.ppf(0.975, n - 1) * statistics.stdev(more) / n**0.5
    return {
        "accuracy %": statistics.fmean(points),
        "to exact": statistics.fmean(more),
        "95% ±": interval,
        "loss": statistics.fmean(row["loss"] for row in own),
    }


# ------------------------------------------------------------------ in the child


def work(task: Task) -> Rows:
    """Train an arm as often as asked, and report each epoch.

    Raises:
        RunFailedError: A layer may not run under the action.
    """
    arm = task["arm"]
    how: dict[str, Any] = {
        "actions": ("keep", arm, "recompute"),
        "planner": everywhere(arm),
    }
    for run in range(task["runs"]):
        seed = task["seed"] * _FOLDS + run
        torch.manual_seed(seed)
        model = _resnet().to(task["device"])
        planned: Any = contextlib.nullcontext()
        if arm != EXACT:
            planned = attach(model, common.AMPLE_BYTES, layers=is_layer, **how)
        with planned as session:
            for told in _epochs(model, seed, *load(run % _FOLDS), task["epochs"]):
                yield {"arm": arm, "run": run, **told}
            if session is not None and session.state_dict()["cost_model"]["limits"]:
                msg = f"some layers may not run under {arm!r}: {session.summary()}"
                raise RunFailedError(msg)


def load(fold: int) -> tuple[Batch, Batch]:
    """Return the digits to learn from, and a fifth of all, which is held out."""
    from sklearn.datasets import load_digits

    data = load_digits()
    pixels = torch.tensor(data.images / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(data.target, dtype=torch.int64)
    held_out = torch.arange(len(labels)) % _FOLDS == fold
    parts = (
        {"pixel_values": pixels[part], "labels": labels[part]}
        for part in (~held_out, held_out)
    )
    return next(parts), next(parts)


def is_layer(module: nn.Module) -> bool:
    """Whether a module is a layer: a residual block, or the stem before them."""
    return type(module).__name__ in ("ResNetEmbeddings", "ResNetBasicLayer")


def _resnet() -> Any:
    """Build a ResNet of four basic blocks, 16 to 128 channels wide."""
    build = builder("ResNetConfig", "ResNetForImageClassification", num_channels=1)
    widths = {"embedding_size": 16, "hidden_sizes": [16, 32, 64, 128]}
    return build(num_labels=10, layer_type="basic", depths=[1] * 4, **widths)


def _resized(digits: Batch, chosen: Any, side: int, device: torch.device) -> Batch:
    pixels = functional.interpolate(
        digits["pixel_values"][chosen], size=(side, side), mode="bilinear"
    )
    labels = digits["labels"][chosen]
    return {"pixel_values": pixels.to(device), "labels": labels.to(device)}


def _epochs(
    model: nn.Module, seed: int, train: Batch, held_out: Batch, epochs: int
) -> Rows:
    """Train, and tell after each epoch how many held-out digits are named correctly."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(
        model.parameters(), _RATE, _MOMENTUM, weight_decay=_DECAY, nesterov=True
    )
    n_steps = len(train["labels"]) // _IMAGES
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, _RATE, total_steps=epochs * n_steps, pct_start=_WARM_UP
    )
    for epoch in range(1, epochs + 1):
        order = torch.randperm(len(train["labels"]), generator=generator)
        sides = torch.randint(len(_SIDES), (n_steps,), generator=generator).tolist()
        losses = []
        for step, place in enumerate(sides):
            chosen = order[step * _IMAGES : (step + 1) * _IMAGES]
            loss = model(**_resized(train, chosen, _SIDES[place], device)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
        yield {
            "epochs": epochs,
            "epoch": epoch,
            "loss": statistics.fmean(losses),
            "held_out": len(held_out["labels"]),
            "right": _n_right(model, held_out, device),
        }


@torch.no_grad()
def _n_right(model: nn.Module, digits: Batch, device: torch.device) -> int:
    """Count the digits that are named correctly."""
    model.eval()
    right = 0
    for start in range(0, len(digits["labels"]), _ASKED):
        batch = _resized(digits, slice(start, start + _ASKED), _SIDE, device)
        labels = batch.pop("labels")
        right += int((model(**batch).logits.argmax(dim=-1) == labels).sum())
    model.train()
    return right
