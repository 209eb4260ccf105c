"""Is training on an accelerator the same to the last bit, whatever the plans?

The zoo's six models train with dropout and AdamW on batches of changing sizes: once
without the library, and once from the same weights and random state within a budget
that lies between what keeping everything and recomputing everything reserve. Losses,
gradients of the last step, weights, the optimizer's state, buffers and the random
state of device and CPU are compared as they are.

    python -m benchmarks.proofs exact
    python -m benchmarks.proofs exact --models resnet
"""

from __future__ import annotations

import argparse
import copy
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Measured, Settings
from benchmarks.proofs.loop import Loop, differing
from benchmarks.proofs.models import ModelSpec, by_name, names_of
from benchmarks.proofs.numbers import mebibytes
from mimose.bench.zoo import ZOO, Batch
from mimose.session import attach

QUESTION = "Is training on an accelerator the same to the last bit?"
OPTIONS = (common.device("sim"), common.count("--steps", 20, "a model"))

_SPECS = by_name(
    ModelSpec("bert", {"batch": (8, 8), "length": (64, 256)}),
    ModelSpec("gpt2", {"batch": (4, 4), "length": (64, 256)}),
    ModelSpec("t5", {"batch": (4, 4), "source": (64, 256), "target": (32, 128)}),
    ModelSpec(
        "vit", {"batch": (6, 6), "height": (128, 256), "width": (128, 256)}, multiple=16
    ),
    ModelSpec("albert", {"batch": (8, 8), "length": (64, 256)}),
    ModelSpec("resnet", {"batch": (6, 6), "height": (96, 256), "width": (96, 256)}),
)
_SHARE, _OVER_LEAST = 0.35, 1.2
"""Where the budget lies between the least and the most that the longest reserves, and
how far above the least it is at any rate: other shapes may reserve more."""
_KINDS = ("gradient", "weight", "optimizer state", "buffer", "random state")
"""What is compared after the last step; the loss is in each."""
_RECORDED = ("step", "phase", "reserved_peak_bytes", "actions", "recomputed", "retries")
State = dict[str, torch.Tensor]


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Train every model twice, and compare."""
    names, steps = names_of(_SPECS, settings.models), options.steps
    return common.ask_each("exact", settings, names, partial(judge, steps), steps=steps)


def judge(steps: int, rows: Sequence[Measured]) -> common.Verdict:
    """Sum one model's steps up."""
    compared = json.loads(rows[-1]["compared"] or "{}") if rows else {}
    names = [name for row in rows for name in json.loads(row["different"] or "[]")]
    n_different = len(names) + sum(not row["is_equal"] for row in rows)
    mixed = sum(0 < row["recomputed"] < row["actions"] for row in rows)
    line = {
        "steps": len(rows),
        "budget MiB": mebibytes(rows[-1]["budget_bytes"]) if rows else "",
        "phases": dict(Counter(row["phase"] for row in rows)),
        "mixed plans": mixed,
        "compared": compared,
        "different": n_different,
    }
    return line, [
        Bar("steps done", len(rows), at_least=steps),
        Bar("plans that keep some and recompute some", mixed, at_least=1),
        Bar("kinds compared", len(compared), at_least=len(_KINDS)),
        Bar("things that differ", n_different, at_most=0),
    ]


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Train a model bare, then a copy of it under the library."""
    spec = _SPECS[task["model"]]
    generator = torch.Generator().manual_seed(task["seed"] + 1)
    torch.manual_seed(task["seed"])
    model = ZOO[spec.model].build().to(task["device"])
    shapes = [spec.draw(generator) for _ in range(task["steps"])]
    batches = [spec.batch(sizes, generator) for sizes in shapes]
    budget_bytes = _budget(copy.deepcopy(model), spec.batch(spec.longest(), generator))
    bare = _Run(copy.deepcopy(model), task["seed"])
    losses = [bare.step(batch) for batch in batches]
    expected = bare.state()
    own = _Run(model, task["seed"])
    with attach(model, budget_bytes) as session:
        for step, (sizes, batch) in enumerate(zip(shapes, batches, strict=True)):
            loss = own.step(batch)
            is_last = step == len(batches) - 1
            nothing = {"compared": "", "different": ""}
            yield {
                "model": spec.model,
                "sizes": json.dumps(sizes),
                "budget_bytes": budget_bytes,
                **common.recorded(session.records[-1], *_RECORDED),
                "loss": loss.item(),
                "is_equal": torch.equal(losses[step], loss),
                **(_compare(expected, own.state()) if is_last else nothing),
            }


def _compare(
    expected: Mapping[str, State], actual: Mapping[str, State]
) -> dict[str, str]:
    """Return the columns that say what was compared, and what differs."""
    counts = {kind: len({*expected[kind], *actual[kind]}) for kind in expected}
    different = [
        f"{kind} {name}"
        for kind in expected
        for name in differing(expected[kind], actual[kind])
    ]
    return {"compared": json.dumps(counts), "different": json.dumps(different)}


def _budget(model: nn.Module, batch: Batch) -> int:
    """Choose a budget between the longest batch's least and most.

    What is measured is a step of everything recomputed and one of everything kept,
    each begun without cached blocks; the optimizer's state is there.
    """
    loop = Loop(model)
    loop.step(batch)
    peaks = []
    for planner in ("full", "none"):
        loop.meter.resting_bytes()
        with attach(model, common.AMPLE_BYTES, planner=planner, meter=loop.meter):
            peaks.append(loop.step(batch).peak_bytes)
    least, most = peaks
    return int(max(least + _SHARE * (most - least), _OVER_LEAST * least))


class _Run:
    """A model in training, and all that its steps leave behind."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._loop = Loop(model)
        self._grads: State = {}
        torch.manual_seed(seed + 3)  # the device's as well

    def step(self, batch: Batch) -> torch.Tensor:
        """Train on one batch; return its loss."""
        loss = self._loop.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        parameters = self._loop.model.named_parameters()
        self._grads = _copied({name: p.grad for name, p in parameters})
        self._loop.optimizer.step()
        self._loop.optimizer.zero_grad(set_to_none=True)
        return loss.detach().cpu()

    def state(self) -> dict[str, State]:
        """Return copies, by kind and name."""
        model, device = self._loop.model, self._loop.device
        there = torch.get_device_module(device).get_rng_state(device)
        optimizer = {
            f"{index}.{name}": value
            for index, values in self._loop.optimizer.state_dict()["state"].items()
            for name, value in values.items()
        }
        return {
            "gradient": self._grads,
            "weight": _copied(dict(model.named_parameters())),
            "optimizer state": _copied(optimizer),
            "buffer": _copied(dict(model.named_buffers())),
            "random state": {"device": there, "cpu": torch.get_rng_state()},
        }


def _copied(tensors: Mapping[str, Any]) -> State:
    return {
        name: tensor.detach().cpu().clone()
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor)
    }
