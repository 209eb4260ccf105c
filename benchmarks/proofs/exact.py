"""Is training on an accelerator the same to the last bit, whatever the plans?

The zoo's six models train with dropout and AdamW on batches of changing sizes: once
without the library, and once from the same weights and random state under plans drawn
at random and plans for budgets drawn at random, in turn. Losses, gradients of the last
step, weights, the optimizer's state, buffers and the random state of device and CPU are
compared as they are.

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

from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Measured, Settings
from benchmarks.proofs.loop import Loop, differing
from benchmarks.proofs.models import ModelSpec, by_name, names_of
from benchmarks.proofs.prediction import Alternating
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
_KINDS = 4
"""Gradients, weights, the optimizer's state, the random state; buffers if there are."""
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
        "phases": dict(Counter(row["phase"] for row in rows)),
        "mixed plans": mixed,
        "compared": compared,
        "different": n_different,
    }
    return line, [
        Bar("steps done", len(rows), at_least=steps),
        Bar("plans that keep some and recompute some", mixed, at_least=1),
        Bar("kinds compared", len(compared), at_least=_KINDS),
        Bar("things that differ", n_different, at_most=0),
    ]


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Train a model bare, then a copy of it under the library."""
    spec, seed = _SPECS[task["model"]], task["seed"]
    generator = torch.Generator().manual_seed(seed + 1)
    torch.manual_seed(seed)
    model = ZOO[spec.model].build().to(task["device"])
    bare, own = Loop(copy.deepcopy(model)), Loop(model)
    shapes = [spec.draw(generator) for _ in range(task["steps"])]
    batches = [spec.batch(sizes, generator) for sizes in shapes]
    torch.manual_seed(seed + 3)  # the device's as well
    expected = [_trained(bare, batch) for batch in batches]
    last = _state(bare, expected[-1])
    torch.manual_seed(seed + 3)
    planner = Alternating(seed)
    with attach(model, common.AMPLE_BYTES, planner=planner) as session:
        for step, (sizes, batch) in enumerate(zip(shapes, batches, strict=True)):
            found = _trained(own, batch)
            row = {
                "model": spec.model,
                "sizes": json.dumps(sizes),
                **common.recorded(session.records[-1], *_RECORDED),
                "loss": found["loss"].item(),
                "is_equal": torch.equal(expected[step]["loss"], found["loss"]),
                "compared": "",
                "different": "",
            }
            if step == len(batches) - 1:
                state = _state(own, found)
                kinds = Counter(name.partition(":")[0] for name in {*state, *last})
                row["compared"] = json.dumps(kinds)
                row["different"] = json.dumps(differing(last, state))
            yield row


def _trained(loop: Loop, batch: Batch) -> State:
    """Train on one batch; return its loss and gradients."""
    loss = loop.loss(batch)
    loss.backward()  # type: ignore[no-untyped-call]
    grads = {f"gradient: {n}": p.grad for n, p in loop.model.named_parameters()}
    found = _copied({"loss": loss, **grads})
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=True)
    return found


def _state(loop: Loop, found: State) -> State:
    """Return all that the steps leave behind, by kind and name."""
    device = torch.get_device_module(loop.device).get_rng_state(loop.device)
    state: dict[str, Any] = {
        "random state: device": device,
        "random state: cpu": torch.get_rng_state(),
    }
    state |= {f"weight: {n}": p for n, p in loop.model.named_parameters()}
    state |= {f"buffer: {n}": b for n, b in loop.model.named_buffers()}
    for index, values in loop.optimizer.state_dict()["state"].items():
        state |= {f"optimizer state: {index}.{n}": v for n, v in values.items()}
    grads = {name: each for name, each in found.items() if name != "loss"}
    return {**grads, **_copied(state)}


def _copied(tensors: Mapping[str, Any]) -> State:
    return {
        name: tensor.detach().cpu().clone()
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor)
    }
