"""What do a language model's logits, their loss and its gradients take?

Two models with large vocabularies, on a text of 512 tokens: once as they are and once
with their loss by rows, as sessions take it where the budget asks for it. The head's
peak is the highest reading between the last layer's exit and the first gradient at its
output, over what was held at that exit. A loop may let the model's outputs go and keep
the loss, or hold them until the next step: then the logits stay. Losses and all
gradients are compared as they are.

Then each model trains on texts of mixed lengths, within a budget that needs plans: are
steps with such a head predicted?

    python -m benchmarks.proofs head
    python -m benchmarks.proofs head --models llama --steps 20
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
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
    said_by,
)
from benchmarks.proofs.loop import Loop, differing
from benchmarks.proofs.models import names_of
from benchmarks.proofs.numbers import mebibytes, percent, quantile
from mimose.bench.rows import Row
from mimose.bench.step_meter import step_meter
from mimose.bench.zoo import builder
from mimose.head.loss_function import LossByRows, modules_with_loss
from mimose.session import Session, attach
from mimose.watch.units import find_units

QUESTION = "What do a language model's logits, their loss and its gradients take?"
OPTIONS = (device("sim"), count("--steps", 60, "of mixed lengths, a model"))

_VOCABULARIES = 32_000, 128_256
_PRECISIONS = "bfloat16", "float32"
_LENGTH, _LAYERS, _WIDTH = 512, 4, 128
_BATCH, _LENGTHS = 2, (256, 512)
"""Of the steps of mixed lengths."""
_SHARE = 0.3
"""Where their budget lies between the least and the most that the longest needs."""
_HALF, _ERROR_BAR = 0.5, 0.01

_MODELS = {
    "gpt2": builder(
        "GPT2Config",
        "GPT2LMHeadModel",
        **{"n_embd": _WIDTH, "n_layer": _LAYERS, "n_head": 4, "use_cache": False},
        **{"bos_token_id": 0, "eos_token_id": 0},
    ),
    "llama": builder(
        "LlamaConfig",
        "LlamaForCausalLM",
        **{"hidden_size": _WIDTH, "intermediate_size": 3 * _WIDTH},
        **{"num_hidden_layers": _LAYERS, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "use_cache": False},
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadRow(Row):
    """One head, bare and in a session; or one step of mixed lengths."""

    model: str
    vocabulary: int
    precision: str
    holds_outputs: bool
    """Whether the loop holds the logits through the backward."""
    length: int
    phase: str
    """Of a step of mixed lengths; else empty."""
    needs_plan: bool
    """Whether it does not keep all."""
    logits_bytes: int
    plain_bytes: int | None
    """The bare head's peak."""
    by_rows_bytes: int | None
    """The session's."""
    compared: int
    """The loss, and gradients of weights."""
    different: int
    predicted_growth_bytes: float | None
    observed_growth_bytes: int | None

    @property
    def share(self) -> float | None:
        """What of the bare head's peak is left."""
        if self.plain_bytes is None or self.by_rows_bytes is None:
            return None
        return self.by_rows_bytes / self.plain_bytes

    @property
    def error(self) -> float | None:
        """How far growth is from what was planned with, as a share of it."""
        if self.predicted_growth_bytes is None or self.observed_growth_bytes is None:
            return None
        return abs(self.observed_growth_bytes / self.predicted_growth_bytes - 1)


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Compare heads, then train."""
    answer = Answer()
    for name in names_of(_MODELS, settings.models):
        for vocabulary, precision, holds in product(
            _VOCABULARIES, _PRECISIONS, (False, True)
        ):
            task = {"vocabulary": vocabulary, "precision": precision, "holds": holds}
            own = _rows(settings, model=name, **task)
            title = f"{name}, {vocabulary}, {precision}" + ", held" * holds
            answer.add(title, own, _line(own[0]), _judge(own[0]))
        mixed = _rows(settings, model=name, steps=options.steps)
        answer.add(f"{name}, mixed", mixed, {}, _judge_errors(mixed))
    return answer


def _rows(settings: Settings, **task: Any) -> list[HeadRow]:
    said = said_by("head", settings, **task)
    return [HeadRow(**each, **settings.provenance()) for each in said]


def _line(row: HeadRow) -> Mapping[str, object]:
    return {
        "logits MiB": mebibytes(row.logits_bytes),
        "plain MiB": mebibytes(row.plain_bytes),
        "by rows MiB": mebibytes(row.by_rows_bytes),
        "left": percent(row.share, 1),
        "compared": row.compared,
        "different": row.different,
    }


def _judge(row: HeadRow) -> list[Bar]:
    return [
        Bar("left of the head's peak", row.share, _HALF, is_share=True),
        Bar("losses and gradients that differ", row.different, 0),
    ]


def _errors(rows: Sequence[HeadRow]) -> list[float]:
    planned = [row.error for row in rows if row.phase == "plan" and row.needs_plan]
    return [error for error in planned if error is not None]


def _judge_errors(rows: Sequence[HeadRow]) -> list[Bar]:
    errors = _errors(rows)
    return [
        Bar("steps that needed a plan", len(errors), at_least=len(rows) // 4),
        Bar("error p99", quantile(errors, 0.99), _ERROR_BAR, is_share=True),
    ]


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Compare one head, or train on mixed lengths."""
    if "steps" in task:
        yield from _train(task)
    else:
        yield _compare(task)


def _build(task: Mapping[str, Any], vocabulary: int) -> nn.Module:
    torch.manual_seed(task["seed"])
    return _MODELS[task["model"]](vocab_size=vocabulary).to(task["device"])


def _ids(n_texts: int, length: int, vocabulary: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randint(1, vocabulary, (n_texts, length), generator=generator)


def _compare(task: Mapping[str, Any]) -> Mapping[str, Any]:
    vocabulary, dtype = task["vocabulary"], getattr(torch, task["precision"])
    model = _build(task, vocabulary).to(dtype)
    ids = _ids(1, _LENGTH, vocabulary, task["seed"]).to(task["device"])
    bare = _HeadStep(model, task["seed"], holds_outputs=task["holds"])
    bare.run(ids)  # what a first step alone needs
    plain_bytes, expected = bare.run(ids)
    losses = list(map(LossByRows, modules_with_loss(model)))
    for loss in losses:
        loss.is_on = True
    bare.run(ids)
    by_rows_bytes, actual = bare.run(ids)
    for loss in losses:
        loss.remove()
    return {
        **{name: task[name] for name in ("model", "vocabulary", "precision")},
        **{"holds_outputs": task["holds"], "length": _LENGTH, "phase": ""},
        "needs_plan": False,
        "logits_bytes": ids.numel() * vocabulary * dtype.itemsize,
        "plain_bytes": plain_bytes,
        "by_rows_bytes": by_rows_bytes,
        "compared": len(expected),
        "different": len(differing(expected, actual)),
        "predicted_growth_bytes": None,
        "observed_growth_bytes": None,
    }


class _HeadStep:
    """A user's step, in which the head's peak is read.

    Args:
        model: The model.
        seed: Of the dropout.
        holds_outputs: Whether the logits stay to the end of the step.
    """

    def __init__(self, model: nn.Module, seed: int, *, holds_outputs: bool) -> None:
        self._model, self._seed, self._holds = model, seed, holds_outputs
        self.meter = step_meter(next(model.parameters()).device)
        self._start_bytes = self._peak_bytes = 0

    def run(self, ids: torch.Tensor) -> tuple[int, dict[str, torch.Tensor]]:
        """Return the head's peak, and the loss with all gradients."""
        torch.manual_seed(self._seed)
        self._model.zero_grad(set_to_none=True)
        _, last = find_units(self._model, None)[-1]
        handle = last.register_forward_hook(self._begin)
        outputs = self._model(input_ids=ids, labels=ids)
        handle.remove()
        loss = outputs.loss
        if not self._holds:
            del outputs
        loss.backward()
        found = {
            name: weight.grad.cpu()
            for name, weight in self._model.named_parameters()
            if weight.grad is not None
        }
        return self._peak_bytes - self._start_bytes, {"loss": loss.cpu(), **found}

    def _begin(self, _: nn.Module, __: Any, output: Any) -> None:
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        hidden.register_hook(self._end)
        self._start_bytes = self.meter.begin_step()

    def _end(self, _: torch.Tensor) -> None:
        self._peak_bytes = self.meter.step_peak_bytes()


def _train(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    vocabulary = _VOCABULARIES[0]
    loop = Loop(_build(task, vocabulary))
    shortest, longest = _LENGTHS
    generator = torch.Generator().manual_seed(task["seed"] + 2)
    drawn = torch.randint(shortest, longest + 1, (task["steps"],), generator=generator)
    batch = _batch(longest, vocabulary, task["seed"])
    loop.step(batch)
    peaks = []
    for planner in ("full", "none"):
        loop.meter.resting_bytes()
        options: dict[str, Any] = {"planner": planner}
        with attach(loop.model, AMPLE_BYTES, meter=loop.meter, **options):
            peaks.append(loop.step(batch).peak_bytes)
    least, most = peaks
    budget_bytes = int(least + _SHARE * (most - least))
    with attach(loop.model, budget_bytes, meter=loop.meter) as session:
        for length in drawn.tolist():
            loop.step(_batch(length, vocabulary, task["seed"]))
            yield _step_row(task["model"], vocabulary, length, session)


def _batch(length: int, vocabulary: int, seed: int) -> dict[str, torch.Tensor]:
    ids = _ids(_BATCH, length, vocabulary, seed)
    return {"input_ids": ids, "labels": ids}


def _step_row(
    model: str, vocabulary: int, length: int, session: Session
) -> Mapping[str, Any]:
    record = session.records[-1]
    return {
        **{"model": model, "vocabulary": vocabulary, "precision": "float32"},
        **{"holds_outputs": False, "length": length, "phase": record.phase},
        "needs_plan": set(record.actions) != {"keep"},
        "logits_bytes": _BATCH * length * vocabulary * torch.float32.itemsize,
        **{"plain_bytes": None, "by_rows_bytes": None, "compared": 0, "different": 0},
        "predicted_growth_bytes": record.predicted_growth_bytes,
        "observed_growth_bytes": record.observed_growth_bytes,
    }
