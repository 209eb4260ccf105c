"""Small models of six architectures, with batches of any size, from configurations.

The tests and the benchmarks run on these. They need `mimose[transformers]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

Batch: TypeAlias = dict[str, torch.Tensor]

_VOCABULARY = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An architecture: how to build it, and how to make a batch for it."""

    name: str
    build: Callable[..., nn.Module]
    """Takes overrides of the configuration, returns a model in training mode."""
    batch: Callable[[Mapping[str, int], torch.Generator], Batch]
    """Takes sizes by name and a generator, returns the model's keyword arguments,
    labels among them."""
    sizes: Mapping[str, tuple[int, int]]
    """Names of the sizes, each with its least and greatest value in the benchmarks."""


def _bert(**changes: Any) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=_VOCABULARY,
        **{
            "hidden_size": 64,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "intermediate_size": 256,
            "num_labels": 8,
            **changes,
        },
    )
    model: nn.Module = BertForSequenceClassification(config)
    return model.train()


def _gpt2(**changes: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=_VOCABULARY,
        **{"n_embd": 64, "n_layer": 6, "n_head": 4, "n_positions": 1024, **changes},
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model.train()


def _t5(**changes: Any) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=_VOCABULARY,
        **{
            "d_model": 64,
            "d_ff": 256,
            "d_kv": 16,
            "num_heads": 4,
            "num_layers": 4,
            "decoder_start_token_id": 0,
            **changes,
        },
    )
    model: nn.Module = T5ForConditionalGeneration(config)
    return model.train()


def _vit(**changes: Any) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        **{
            "hidden_size": 64,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "intermediate_size": 256,
            "image_size": 224,
            "patch_size": 16,
            "num_labels": 8,
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
            **changes,
        },
    )
    model: nn.Module = ViTForImageClassification(config)
    return model.train()


def _albert(**changes: Any) -> nn.Module:
    from transformers import AlbertConfig, AlbertForSequenceClassification

    config = AlbertConfig(
        vocab_size=_VOCABULARY,
        **{
            "embedding_size": 32,
            "hidden_size": 64,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "intermediate_size": 256,
            "num_labels": 8,
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
            "classifier_dropout_prob": 0.1,
            **changes,
        },
    )
    model: nn.Module = AlbertForSequenceClassification(config)
    return model.train()


def _resnet(**changes: Any) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        **{
            "embedding_size": 16,
            "hidden_sizes": [16, 32, 64, 128],
            "depths": [2, 2, 2, 2],
            "layer_type": "basic",
            "num_labels": 8,
            **changes,
        },
    )
    model: nn.Module = ResNetForImageClassification(config)
    return model.train()


def _tokens(
    n_sequences: int, length: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and a mask; all but the first sequence end earlier."""
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


ZOO: Mapping[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            name="bert",
            build=_bert,
            batch=_text_batch,
            sizes={"batch": (16, 16), "length": (32, 384)},
        ),
        Entry(
            name="gpt2",
            build=_gpt2,
            batch=_lm_batch,
            sizes={"batch": (8, 8), "length": (32, 512)},
        ),
        Entry(
            name="t5",
            build=_t5,
            batch=_pair_batch,
            sizes={"batch": (8, 8), "source": (32, 384), "target": (16, 256)},
        ),
        Entry(
            name="vit",
            build=_vit,
            batch=_vit_batch,
            sizes={"batch": (8, 8), "height": (96, 320), "width": (96, 320)},
        ),
        Entry(
            name="albert",
            build=_albert,
            batch=_text_batch,
            sizes={"batch": (16, 16), "length": (32, 384)},
        ),
        Entry(
            name="resnet",
            build=_resnet,
            batch=_image_batch,
            sizes={"batch": (8, 8), "height": (96, 320), "width": (96, 320)},
        ),
    )
}
"""The architectures, by name."""
