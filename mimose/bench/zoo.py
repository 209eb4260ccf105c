"""Small models of six architectures, with batches of any size; and models by name.

The tests and the benchmarks run on these. They need `mimose[transformers]`.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

Batch: TypeAlias = dict[str, torch.Tensor]

_VOCABULARY = 512


def moved(batch: Mapping[str, Any], device: torch.device | str) -> dict[str, Any]:
    """Return a batch with its tensors on a device."""
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


class Output(NamedTuple):
    """The output of models that are not from transformers, with a loss like theirs."""

    loss: torch.Tensor
    """() The loss."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An architecture: how to build it, and how to make a batch for it."""

    name: str
    build: Callable[..., nn.Module]
    """Takes overrides of the configuration, returns a model in training mode."""
    batch: Callable[[Mapping[str, int], torch.Generator], Batch]
    """Takes sizes by name and a generator, returns the model's keyword arguments, with
    labels."""
    sizes: Mapping[str, tuple[int, int]]
    """Names of the sizes, each with its range in the benchmarks."""


def builder(config: str, model: str, **defaults: Any) -> Callable[..., nn.Module]:
    """Return a function that builds a transformers' model from its configuration.

    `defaults` are values of the configuration; the function takes changes of them.
    """

    def build(**changes: Any) -> nn.Module:
        import transformers

        made = getattr(transformers, config)(**{**defaults, **changes})
        module: nn.Module = getattr(transformers, model)(made)
        return module.train()

    return build


_ENCODER: Mapping[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "num_labels": 8,
}
_DROPPED: Mapping[str, float] = {
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
_bert = builder(
    "BertConfig", "BertForSequenceClassification", vocab_size=_VOCABULARY, **_ENCODER
)
_gpt2 = builder(
    "GPT2Config",
    "GPT2LMHeadModel",
    **{"vocab_size": _VOCABULARY, "n_embd": 64, "n_layer": 6, "n_head": 4},
    n_positions=1024,
)
_t5 = builder(
    "T5Config",
    "T5ForConditionalGeneration",
    **{"vocab_size": _VOCABULARY, "d_model": 64, "d_ff": 256, "d_kv": 16},
    **{"num_heads": 4, "num_layers": 4, "decoder_start_token_id": 0},
)
_vit = builder(
    "ViTConfig",
    "ViTForImageClassification",
    **{**_ENCODER, **_DROPPED, "image_size": 224, "patch_size": 16},
)
_albert = builder(
    "AlbertConfig",
    "AlbertForSequenceClassification",
    **{**_ENCODER, **_DROPPED, "classifier_dropout_prob": 0.1},
    **{"vocab_size": _VOCABULARY, "embedding_size": 32},
)
_resnet = builder(
    "ResNetConfig",
    "ResNetForImageClassification",
    **{"embedding_size": 16, "hidden_sizes": [16, 32, 64, 128], "num_labels": 8},
    **{"depths": [2, 2, 2, 2], "layer_type": "basic"},
)


def _tokens(
    n_sequences: int, length: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and a mask; all sequences but the first end at random lengths."""
    ids = torch.randint(1, _VOCABULARY, (n_sequences, length), generator=generator)
    ends = torch.randint(
        max(1, length // 4), length + 1, (n_sequences, 1), generator=generator
    )
    ends[0] = length
    mask = (torch.arange(length) < ends).long()
    return ids * mask, mask


def _classes(n_items: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 8, (n_items,), generator=generator)


def _text_batch(sizes: Mapping[str, int], generator: torch.Generator) -> Batch:
    ids, mask = _tokens(sizes["batch"], sizes["length"], generator)
    labels = _classes(sizes["batch"], generator)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _lm_batch(sizes: Mapping[str, int], generator: torch.Generator) -> Batch:
    ids, mask = _tokens(sizes["batch"], sizes["length"], generator)
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _pair_batch(sizes: Mapping[str, int], generator: torch.Generator) -> Batch:
    ids, mask = _tokens(sizes["batch"], sizes["source"], generator)
    labels, kept = _tokens(sizes["batch"], sizes["target"], generator)
    labels = labels.masked_fill(kept == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _image_batch(sizes: Mapping[str, int], generator: torch.Generator) -> Batch:
    shape = (sizes["batch"], 3, sizes["height"], sizes["width"])
    pixels = torch.rand(shape, generator=generator)
    return {"pixel_values": pixels, "labels": _classes(sizes["batch"], generator)}


def _vit_batch(sizes: Mapping[str, int], generator: torch.Generator) -> Batch:
    batch: dict[str, Any] = _image_batch(sizes, generator)
    return {**batch, "interpolate_pos_encoding": True}


_TEXTS, _IMAGES = {"batch": (16, 16), "length": (32, 384)}, (96, 320)
_IMAGE_SIZES = {"batch": (8, 8), "height": _IMAGES, "width": _IMAGES}
_PAIR_SIZES = {"batch": (8, 8), "source": (32, 384), "target": (16, 256)}
ZOO: Mapping[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("bert", _bert, _text_batch, _TEXTS),
        Entry("gpt2", _gpt2, _lm_batch, {"batch": (8, 8), "length": (32, 512)}),
        Entry("t5", _t5, _pair_batch, _PAIR_SIZES),
        Entry("vit", _vit, _vit_batch, _IMAGE_SIZES),
        Entry("albert", _albert, _text_batch, _TEXTS),
        Entry("resnet", _resnet, _image_batch, _IMAGE_SIZES),
    )
}
"""The architectures, by name."""


def called_by_name(path: str) -> Any:
    """Call a function without arguments by its name, and return its result.

    Args:
        path: ``module:function``, the value of ``--model``. The module is searched in
            the current folder first.

    Raises:
        ValueError: There is no such function, or it failed; the message says where.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        msg = f"--model {path}: give it as module:function"
        raise ValueError(msg)
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` has it
        sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(module_name), name)()
    except Exception as error:  # the user's code, whatever it does
        place = traceback.extract_tb(error.__traceback__)[-1]
        msg = f"--model {path}: {type(error).__name__}: {error}"
        if Path(place.filename).exists() and place.filename != __file__:
            msg += f" ({Path(place.filename).name}, line {place.lineno})"
        raise ValueError(msg) from error
