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
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.proofs.common import (
    AMPLE_BYTES,
    Answer,
    Bar,
    Settings,
    count,
    device,
    recorded,
    rows_of,
)
from benchmarks.proofs.loop import Loop, differing
from benchmarks.proofs.models import ModelSpec, by_name, names_of
from benchmarks.proofs.numbers import mebibytes
from mimose.bench.rows import Row
from mimose.bench.zoo import ZOO, Batch
from mimose.session import attach

QUESTION = "Is training on an accelerator the same to the last bit?"
OPTIONS = (device("sim"), count("--steps", 20, "a model"))

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
_RECORDED = (
    *("step", "phase", "reserved_peak_bytes", "actions", "recomputed"),
    *("retries", "reason"),
)
State = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactRow(Row):
    """One step under mimose, beside that of the bare model."""

    model: str
    step: int
    sizes: str
    """As JSON."""
    phase: str
    budget_bytes: int
    reserved_peak_bytes: int | None
    """To the end of backward."""
    actions: int
    recomputed: int
    retries: int
    reason: str
    loss: float
    is_equal: bool
    """Whether the loss is the bare model's."""
    compared: str
    """As JSON: of each kind how many were compared; empty but for the last step."""
    different: str
    """As JSON: of each kind the names of those that differ."""

    @property
    def is_mixed(self) -> bool:
        """Whether some calls were kept and others recomputed."""
        return 0 < self.recomputed < self.actions


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Train every model twice, and compare."""
    answer = Answer()
    for name in names_of(_SPECS, settings.models):
        own = rows_of(ExactRow, "exact", settings, model=name, steps=options.steps)
        answer.add(name, own, _summarise(own), _judge(own, options.steps))
    return answer


def _n_different(rows: Sequence[ExactRow]) -> int:
    names = [name for row in rows for name in json.loads(row.different or "[]")]
    return len(names) + sum(not row.is_equal for row in rows)


def _summarise(rows: Sequence[ExactRow]) -> dict[str, object]:
    return {
        "steps": len(rows),
        "budget MiB": mebibytes(rows[-1].budget_bytes),
        "phases": dict(Counter(row.phase for row in rows)),
        "mixed plans": sum(row.is_mixed for row in rows),
        "recomputed": sum(row.recomputed for row in rows),
        "compared": json.loads(rows[-1].compared or "{}"),
        "different": _n_different(rows),
        "retries": sum(row.retries for row in rows),
    }


def _judge(rows: Sequence[ExactRow], steps: int) -> list[Bar]:
    compared = json.loads(rows[-1].compared or "{}") if rows else {}
    mixed = sum(row.is_mixed for row in rows)
    return [
        Bar("steps done", len(rows), at_least=steps),
        Bar("plans that keep some and recompute some", mixed, at_least=1),
        Bar("kinds compared", len(compared), at_least=len(_KINDS)),
        Bar("things that differ", _n_different(rows), at_most=0),
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
    bare = Run(copy.deepcopy(model), task["seed"])
    losses = [bare.step(batch) for batch in batches]
    expected = bare.state()
    own = Run(model, task["seed"])
    with attach(model, budget_bytes) as session:
        for step, (sizes, batch) in enumerate(zip(shapes, batches, strict=True)):
            loss = own.step(batch)
            record = session.records[-1]
            is_last = step == len(batches) - 1
            nothing = {"compared": "", "different": ""}
            yield {
                "model": spec.model,
                "sizes": json.dumps(sizes),
                "budget_bytes": budget_bytes,
                **recorded(record, *_RECORDED),
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
    each begun without free blocks; the optimizer's state is there.
    """
    loop = Loop(model)
    loop.step(batch)
    peaks = []
    for planner in ("full", "none"):
        loop.meter.resting_bytes()
        with attach(model, AMPLE_BYTES, planner=planner, meter=loop.meter):
            peaks.append(loop.step(batch).peak_bytes)
    least, most = peaks
    return int(max(least + _SHARE * (most - least), _OVER_LEAST * least))


class Run:
    """A model in training, and all that its steps leave behind."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._loop = Loop(model)
        self._grads: State = {}
        torch.manual_seed(seed + 3)  # the device's as well

    def step(self, batch: Batch) -> torch.Tensor:
        """Train on one batch; return its loss."""
        loss = self._loop.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self._grads = {
            name: parameter.grad.cpu()
            for name, parameter in self._loop.model.named_parameters()
            if parameter.grad is not None
        }
        self._loop.optimizer.step()
        self._loop.optimizer.zero_grad(set_to_none=True)
        return loss.detach().cpu()

    def state(self) -> dict[str, State]:
        """Return copies, by kind and name."""
        model, device = self._loop.model, self._loop.device
        there = torch.get_device_module(device).get_rng_state(device)
        return {
            "gradient": self._grads,
            "weight": _copied(dict(model.named_parameters())),
            "optimizer state": _copied(self._optimizer_state()),
            "buffer": _copied(dict(model.named_buffers())),
            "random state": {"device": there, "cpu": torch.get_rng_state()},
        }

    def _optimizer_state(self) -> Mapping[str, Any]:
        state = self._loop.optimizer.state_dict()["state"]
        return {
            f"{index}.{name}": value
            for index, values in state.items()
            for name, value in values.items()
        }


def _copied(tensors: Mapping[str, Any]) -> State:
    return {
        name: tensor.detach().cpu().clone()
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor)
    }
