"""The models that `advise` is asked about, each with a sample, at sizes of a CPU.

So small that a step of one sample is mostly fixed time: only where throughput changes
with the batch is there anything to predict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mimose.bench.zoo import builder

_VOCABULARY = 1000
_CLASSES = 10
_SAMPLES = 64
_TEXTS = 32


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and how much memory it is asked about."""

    name: str
    budgets: Mapping[str, tuple[str, str]]
    """By device, above what a process holds before its first step: one with room for
    plain training at batches of many sizes, several times the 20 MiB of a segment that
    an allocator takes at a time, and one in which few samples fit."""

    @property
    def source(self) -> str:
        """Its function, as ``mimose advise --model`` takes it."""
        return f"{__name__}:{self.name}"


_CPU = ("+400MiB", "+100MiB")
CASES: Mapping[str, Case] = {
    each.name: each
    for each in (
        Case("resnet", {"sim": ("+80MiB", "+13MiB"), "cpu": _CPU}),
        Case("wide_resnet", {"sim": ("+250MiB", "+90MiB"), "cpu": _CPU}),
        Case("vit", {"sim": ("+80MiB", "+4.5MiB"), "cpu": _CPU}),
        Case("bert", {"sim": ("+80MiB", "+7MiB"), "cpu": _CPU}),
        Case("gpt2", {"sim": ("+150MiB", "+9MiB"), "cpu": _CPU}),
    )
}


def resnet() -> tuple[nn.Module, Any]:
    """Return a ResNet of basic blocks on images of 32 pixels."""
    return _resnet(hidden_sizes=[16, 32, 64, 128], embedding_size=16), _images()


def wide_resnet() -> tuple[nn.Module, Any]:
    """Return the same, twice as wide."""
    return _resnet(hidden_sizes=[32, 64, 128, 256], embedding_size=32), _images()


def vit() -> tuple[nn.Module, Any]:
    """Return a vision transformer on images of 32 pixels."""
    return _vit(), _images()


def bert() -> tuple[nn.Module, Any]:
    """Return a BERT on texts of 16 tokens."""
    ids = _ids()
    labels = torch.randint(_CLASSES, (len(ids),))
    mask = torch.ones_like(ids)
    return _bert(), {"input_ids": ids, "attention_mask": mask, "labels": labels}


def texts() -> tuple[nn.Module, Any]:
    """Return a BERT twice as wide on texts of 128 tokens: of no case, for the docs."""
    ids = torch.randint(_VOCABULARY, (_TEXTS, 128))
    labels = torch.randint(_CLASSES, (len(ids),))
    return _texts(), {"input_ids": ids, "labels": labels}


def gpt2() -> tuple[nn.Module, Any]:
    """Return a GPT-2 on texts of 16 tokens."""
    ids = _ids()
    return _gpt2(), {"input_ids": ids, "labels": ids}


_LAYERS = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "num_labels": _CLASSES,
}
_resnet = builder(
    "ResNetConfig",
    "ResNetForImageClassification",
    depths=[2, 2, 2, 2],
    layer_type="basic",
    num_labels=_CLASSES,
)
_vit = builder(
    "ViTConfig", "ViTForImageClassification", image_size=32, patch_size=8, **_LAYERS
)
_bert = builder(
    "BertConfig",
    "BertForSequenceClassification",
    vocab_size=_VOCABULARY,
    use_cache=False,
    **_LAYERS,
)
_texts = builder(
    "BertConfig",
    "BertForSequenceClassification",
    vocab_size=_VOCABULARY,
    use_cache=False,
    hidden_size=128,
    num_hidden_layers=6,
    num_attention_heads=4,
    intermediate_size=512,
    num_labels=_CLASSES,
)
_gpt2 = builder(
    "GPT2Config",
    "GPT2LMHeadModel",
    vocab_size=_VOCABULARY,
    n_embd=64,
    n_layer=4,
    n_head=4,
    bos_token_id=0,
    eos_token_id=0,
    use_cache=False,
)


def _images() -> dict[str, torch.Tensor]:
    labels = torch.randint(_CLASSES, (_SAMPLES,))
    return {"pixel_values": torch.rand(_SAMPLES, 3, 32, 32), "labels": labels}


def _ids() -> torch.Tensor:
    return torch.randint(_VOCABULARY, (_SAMPLES, 16))
