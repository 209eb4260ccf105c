"""The zoo's models as the proofs train them: no dropout, growths of 100 MiB and more.

Random numbers on a CPU take more time than the rest of a small layer. Except for the
masks, they change neither held bytes nor plans. The tests train with dropout.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from mimose.bench.usage import UsageError
from mimose.bench.zoo import ZOO, Batch

Sizes: TypeAlias = dict[str, int]

_BERT_LIKE = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "hidden_act": "relu",
}
_CHANGES: Mapping[str, Mapping[str, Any]] = {
    "bert": _BERT_LIKE,
    "gpt2": {
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "activation_function": "relu",
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "t5": {"dropout_rate": 0.0},
    "vit": _BERT_LIKE,
    "albert": {**_BERT_LIKE, "classifier_dropout_prob": 0.0},
    "resnet": {},
}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One architecture, and the shapes it is trained on."""

    model: str
    """Its name in the zoo."""

    sizes: Mapping[str, tuple[int, int]]
    """Names of the sizes, each with its least and greatest value."""

    multiple: int = 1
    """Sizes but the batch are multiples of this."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    """Overrides of the configuration beyond no dropout."""

    def build(self, seed: int, device: str = "cpu") -> nn.Module:
        """Build the model, in training mode, with weights settled by the seed."""
        torch.manual_seed(seed)
        changes = {**_CHANGES[self.model], **self.changes}
        return ZOO[self.model].build(**changes).to(device)

    def batch(self, sizes: Sizes, generator: torch.Generator) -> Batch:
        """Make a batch."""
        return ZOO[self.model].batch(sizes, generator)

    def draw(
        self, generator: torch.Generator, low: float = 0.0, high: float = 1.0
    ) -> Sizes:
        """Draw each size evenly from a part of its range, from `low` to `high`."""
        drawn = {}
        for name, (least, most) in self.sizes.items():
            step = 1 if name == "batch" else self.multiple
            n_steps = (most - least) // step
            first, last = round(low * n_steps), round(high * n_steps)
            number = int(torch.randint(first, last + 1, (), generator=generator))
            drawn[name] = least + step * number
        return drawn

    def longest(self) -> Sizes:
        """Return the greatest sizes."""
        return {name: most for name, (_, most) in self.sizes.items()}

    def shortest(self) -> Sizes:
        """Return the least sizes."""
        return {name: least for name, (least, _) in self.sizes.items()}


def volume(batch: Batch) -> int:
    """Return the number of elements of a batch's tensors: which batch is longer."""
    return sum(t.numel() for t in batch.values() if isinstance(t, torch.Tensor))


def by_name(*specs: ModelSpec) -> dict[str, ModelSpec]:
    """Return models by their names in the zoo."""
    return {spec.model: spec for spec in specs}


def names_of(known: Collection[str], wanted: Sequence[str]) -> list[str]:
    """Return the names of those that are wanted, or of all if none is.

    Raises:
        UsageError: A name is not known.
    """
    unknown = [name for name in wanted if name not in known]
    if unknown:
        msg = f"--models {' '.join(unknown)}: choose among {', '.join(known)}"
        raise UsageError(msg)
    return [name for name in known if not wanted or name in wanted]
