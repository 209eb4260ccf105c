"""Does prediction hold in the cases that break simple models of memory?

Batches with and without padding, frozen layers, adapters, a second loss on an inner
tensor, accumulation, and checkpointing of the user's own inside a layer. A step either
runs under a plan whose growth was predicted, or its record says why it did not.

    python -m benchmarks.proofs hard
    python -m benchmarks.proofs hard --pairs 8 --cases lora
"""

from __future__ import annotations

import argparse
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Measured, Settings
from benchmarks.proofs.loop import Loop
from benchmarks.proofs.models import ModelSpec
from benchmarks.proofs.numbers import MIB, percent, quantile, worst
from benchmarks.proofs.prediction import GROWTHS, Alternating
from mimose.bench.zoo import Batch
from mimose.session import attach

QUESTION = "Does prediction hold in the cases that break simple models of memory?"
NEEDS = (("dev", ("peft", "transformers")),)

_LEAST_GROWTH_BYTES = 100 * MIB
_ERROR_BAR = 0.02
_RECORDED = ("step", "phase", "kept", "events", *GROWTHS, "reason")
_TRIES = 4
"""Steps a pair, at the most."""


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Train every case, and judge its steps."""
    answer = Answer()
    for name in options.cases:
        rows = common.measured("hard", settings, case=name, pairs=options.pairs)
        answer.add(name, rows, *judge(options.pairs, rows), head="case")
    return answer


def judge(pairs: int, rows: Sequence[Measured]) -> common.Verdict:
    """Judge the steps of a case."""
    errors = [abs(row["error"]) for row in rows if row["error"] is not None]
    unexplained = sum(
        row["predicted_growth_bytes"] is None and not row["reason"] for row in rows
    )
    line = {
        "steps": len(rows),
        "planned ≥ 100 MiB": len(errors),
        "error p50": percent(quantile(errors, 0.5)),
        "error p99": percent(quantile(errors, 0.99)),
        "worst": percent(worst(errors)),
        "phases": dict(Counter(row["phase"] for row in rows)),
    }
    return line, [
        Bar("steps neither predicted nor explained", unexplained, 0),
        Bar("planned steps", len(errors), at_least=pairs),
        Bar("worst error", worst(errors), _ERROR_BAR, is_share=True),
    ]


# ------------------------------------------------------------------ the cases


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model, and a loop that is hard to predict."""

    spec: ModelSpec
    prepare: Callable[[nn.Module], nn.Module] = field(default=lambda model: model)
    """Changes the model before anything is attached."""
    loop: Callable[[nn.Module], Loop] = Loop
    fill: Callable[[Batch, int], Batch] = field(default=lambda batch, _: batch)
    """Changes a batch, given the step's number."""


def _frozen(model: nn.Module) -> nn.Module:
    model.get_submodule("bert.embeddings").requires_grad_(False)
    return model


def _adapted(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, target_modules=["query", "value"], task_type="SEQ_CLS")
    adapted: nn.Module = get_peft_model(model, config)
    return adapted


def _checkpointed(model: nn.Module) -> nn.Module:
    """Checkpoint the feed-forward part inside each layer, as a user might."""
    layers = model.get_submodule("bert.encoder.layer")
    for layer in layers.children():
        part: Any = layer.feed_forward_chunk
        vars(layer)["feed_forward_chunk"] = _again(part)
    return model


def _again(part: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., object]:
    def checkpointed(states: torch.Tensor) -> object:
        return checkpoint(part, states, use_reentrant=False)

    return checkpointed


def _sometimes_full(batch: Batch, step: int) -> Batch:
    """Take the padding out of every second batch."""
    if step % 2:
        return batch
    return {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}


class _AuxiliaryLoop(Loop):
    """Adds a loss on an inner layer's output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._inner: list[torch.Tensor] = []
        layer = model.get_submodule("bert.encoder.layer.2")
        layer.register_forward_hook(lambda _m, _i, output: self._inner.append(output))

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the sum of both losses."""
        loss = super().loss(batch)
        inner = self._inner.pop()
        states = inner if isinstance(inner, torch.Tensor) else inner[0]
        return loss + 0.01 * states.square().mean()


_BERT = ModelSpec("bert", {"batch": (18, 30), "length": (256, 448)})
_GPT2 = ModelSpec("gpt2", {"batch": (10, 18), "length": (320, 608)})
_CASES: Mapping[str, Case] = {
    "masks": Case(spec=_BERT, fill=_sometimes_full),
    "frozen": Case(spec=_BERT, prepare=_frozen),
    "lora": Case(spec=_BERT, prepare=_adapted),
    "auxiliary": Case(spec=_BERT, loop=_AuxiliaryLoop),
    "accumulation": Case(spec=_GPT2, loop=functools.partial(Loop, window=4)),
    "checkpointed": Case(spec=_BERT, prepare=_checkpointed),
}


OPTIONS = (
    common.count("--pairs", 60, "that count, a case"),
    ("--cases", {"nargs": "+", "choices": list(_CASES), "default": [*_CASES]}),
)


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Train one case until enough planned steps are there."""
    case = _CASES[task["case"]]
    spec = case.spec
    generator = torch.Generator().manual_seed(task["seed"] + 1)
    loop = case.loop(case.prepare(spec.build(task["seed"])))
    loop.warm_up(spec.batch(spec.shortest(), generator))
    planner = Alternating(task["seed"])
    n_counted, most = 0, _TRIES * task["pairs"] + 10
    with attach(
        loop.model, common.AMPLE_BYTES, planner=planner, meter=loop.meter
    ) as session:
        for step in range(most):
            sizes = spec.draw(generator)
            n_before = len(session.records)
            loop.step(case.fill(spec.batch(sizes, generator), step))
            for record in list(session.records)[n_before:]:
                said = common.recorded(record, *_RECORDED)
                predicted, observed = (said[name] for name in GROWTHS)
                is_large = (observed or 0) >= _LEAST_GROWTH_BYTES
                error = observed / predicted - 1 if predicted and is_large else None
                n_counted += error is not None
                told = {"case": task["case"], "sizes": json.dumps(sizes)}
                yield {**told, **said, "error": error}
            if n_counted >= task["pairs"]:
                return
