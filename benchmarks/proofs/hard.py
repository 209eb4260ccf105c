"""Does prediction hold in the cases that break simple models of memory?

The cases are batches with and without padding, frozen layers, adapters, a second loss
on an inner tensor, accumulation, and a user's checkpointing inside a layer. Growth is
compared with its prediction, as in `prediction` for plain loops.

    python -m benchmarks.proofs hard
    python -m benchmarks.proofs hard --pairs 8 --cases lora
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.proofs import common, prediction
from benchmarks.proofs.common import Answer, Bar, Options, Row, Rows, Settings, Task
from benchmarks.proofs.loop import Loop
from benchmarks.proofs.models import ModelSpec
from benchmarks.proofs.numbers import worst
from mimose.bench.zoo import Batch

QUESTION = "Does prediction hold in the cases that break simple models of memory?"
_ERROR_BAR = 0.02


def ask(settings: Settings, options: Options) -> Answer:
    """Train every case, and judge its steps."""
    answer = Answer(path=settings.out / "hard.csv")
    for case in options.cases:
        rows = common.measured("hard", settings, case=case, pairs=options.pairs)
        answer.add(case, rows, *judge(options.pairs, rows), head="case")
    return answer


def judge(pairs: int, rows: Sequence[Row]) -> common.Verdict:
    """Judge the steps of a case: the worst has a bar."""
    line, (enough, *_) = prediction.judge(pairs, (math.inf, math.inf), rows)
    error = worst(abs(row["error"]) for row in rows if row["counts"])
    return line, [enough, Bar("worst error", error, _ERROR_BAR, is_share=True)]


# ------------------------------------------------------------------ the cases


class _Masked(Loop):
    """Takes the padding out of every second batch."""

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return a batch's loss."""
        if self._n_steps % 2:
            full = torch.ones_like(batch["attention_mask"])
            batch = {**batch, "attention_mask": full}
        return super().loss(batch)


def _frozen(model: nn.Module) -> Loop:
    model.get_submodule("bert.embeddings").requires_grad_(False)
    return Loop(model)


def _adapted(model: nn.Module) -> Loop:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, target_modules=["query", "value"], task_type="SEQ_CLS")
    return Loop(get_peft_model(model, config))


def _checkpointed(model: nn.Module) -> Loop:
    """Checkpoint the feed-forward part inside each layer, as a user might."""
    for layer in model.get_submodule("bert.encoder.layer").children():
        part: Any = layer.feed_forward_chunk
        again = functools.partial(checkpoint, part, use_reentrant=False)
        vars(layer)["feed_forward_chunk"] = again
    return Loop(model)


class _AuxiliaryLoop(Loop):
    """Adds a loss on an inner layer's output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._inner: list[torch.Tensor] = []
        layer = model.get_submodule("bert.encoder.layer.2")
        layer.register_forward_hook(lambda _m, _i, output: self._inner.append(output))

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the sum of both losses."""
        loss, inner = super().loss(batch), self._inner.pop()
        states = inner if isinstance(inner, torch.Tensor) else inner[0]
        return loss + 0.01 * states.square().mean()


_BERT, _GPT2 = prediction._SPECS["bert"], prediction._SPECS["gpt2"]
_CASES: dict[str, tuple[ModelSpec, Callable[[nn.Module], Loop]]] = {
    "masks": (_BERT, _Masked),
    "frozen": (_BERT, _frozen),
    "lora": (_BERT, _adapted),
    "auxiliary": (_BERT, _AuxiliaryLoop),
    "accumulation": (_GPT2, functools.partial(Loop, window=4)),
    "checkpointed": (_BERT, _checkpointed),
}
"""What is trained, and a loop of it that is hard to predict."""
OPTIONS = (
    common.count("--pairs", 60, "that count, a case"),
    common.some("--cases", _CASES),
)


def work(task: Task) -> Rows:
    """Train one case until enough pairs are there."""
    spec, make = _CASES[task["case"]]
    loop, least = make(spec.build(task["seed"])), prediction._LEAST_GROWTH_BYTES
    task = {**task, "menu": "whole"}
    for row in prediction.predicted(loop, spec, task, least):
        yield {"case": task["case"], **row}
