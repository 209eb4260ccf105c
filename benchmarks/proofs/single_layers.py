"""Single layers of the architectures that finer actions are measured on.

Of width 256 at 256 tokens, with dropout on where the architecture has it; a ResNet's
bottleneck at 28 × 28 pixels.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

WIDTH, LENGTH = 256, 256
_HEADS, _INNER = 4, 4 * WIDTH
_PIXELS, _NARROW = 28, 64

Options: TypeAlias = dict[str, Any]
"""What a layer is called with by name."""


class Bottleneck(nn.Module):
    """A residual block of a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(WIDTH, _NARROW, 1, bias=False)
        self.b = nn.Conv2d(_NARROW, _NARROW, 3, padding=1, bias=False)
        self.c = nn.Conv2d(_NARROW, WIDTH, 1, bias=False)
        self.norms = nn.ModuleList(map(nn.BatchNorm2d, (_NARROW, _NARROW, WIDTH)))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, width, height, width) to the same."""
        y = self.relu(self.norms[0](self.a(x)))
        y = self.relu(self.norms[1](self.b(y)))
        y = self.norms[2](self.c(y)) + x
        output: torch.Tensor = self.relu(y)
        return output


class Alone(nn.Module):
    """One layer that is called as a model calls it.

    Args:
        layer: The layer; it is the unit ``layers.0``.
        options: What it is called with besides.
    """

    def __init__(self, layer: nn.Module, options: Options) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer])
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, width) or images to one number."""
        output = self.layers[0](x * 1.0, **self.options)
        first: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return first.square().mean()


def _library(name: str) -> tuple[Any, Any]:
    """Return transformers, and its module of an architecture."""
    model = f"transformers.models.{name}.modeling_{name}"
    return importlib.import_module("transformers"), importlib.import_module(model)


def _bert(n_rows: int, attention: str = "sdpa") -> tuple[nn.Module, Options]:
    transformers, models = _library("bert")

    del n_rows
    config = transformers.BertConfig(**_sizes(attention), intermediate_size=_INNER)
    return models.BertLayer(config), {}


def _sizes(attention: str) -> dict[str, Any]:
    heads = {"num_attention_heads": _HEADS, "attn_implementation": attention}
    return {"hidden_size": WIDTH, **heads}


def _gpt2(n_rows: int) -> tuple[nn.Module, Options]:
    transformers, models = _library("gpt2")

    del n_rows
    config = transformers.GPT2Config(
        n_embd=WIDTH, n_head=_HEADS, attn_implementation="sdpa"
    )
    return models.GPT2Block(config, layer_idx=0), {}


def _t5(n_rows: int) -> tuple[nn.Module, Options]:
    transformers, models = _library("t5")

    config = transformers.T5Config(
        d_model=WIDTH, d_kv=WIDTH // _HEADS, num_heads=_HEADS, d_ff=_INNER
    )
    bias = torch.randn(1, _HEADS, LENGTH, LENGTH)
    bias = bias.expand(n_rows, -1, -1, -1).contiguous()
    return models.T5Block(config, layer_idx=1), {"position_bias": bias}


def _llama(n_rows: int) -> tuple[nn.Module, Options]:
    transformers, models = _library("llama")

    del n_rows
    config = transformers.LlamaConfig(
        **_sizes("sdpa"), num_key_value_heads=_HEADS // 2, intermediate_size=704
    )
    places = torch.arange(LENGTH)[None]
    turned = models.LlamaRotaryEmbedding(config)(torch.zeros(1), places)
    options = {"attention_mask": None, "position_ids": places}
    layer = models.LlamaDecoderLayer(config, 0)
    return layer, {**options, "position_embeddings": turned}


def _vit(n_rows: int) -> tuple[nn.Module, Options]:
    transformers, models = _library("vit")

    del n_rows
    config = transformers.ViTConfig(**_sizes("sdpa"), intermediate_size=_INNER)
    return models.ViTLayer(config), {}


LAYERS: Mapping[str, Callable[[int], tuple[nn.Module, Options]]] = {
    "bert": _bert,
    "bert-eager": lambda n_rows: _bert(n_rows, "eager"),
    "gpt2": _gpt2,
    "t5": _t5,
    "llama": _llama,
    "vit": _vit,
    "resnet": lambda _: (Bottleneck(), {}),
}
"""Take the batch's rows; return a layer and what it is called with."""


def alone(name: str, n_rows: int) -> tuple[Alone, torch.Tensor]:
    """Return one layer in training mode, and an input that takes a gradient.

    Args:
        name: One of `LAYERS`.
        n_rows: Of the batch.
    """
    layer, options = LAYERS[name](n_rows)
    images = n_rows, WIDTH, _PIXELS, _PIXELS
    texts = n_rows, LENGTH, WIDTH
    x = torch.randn(images if name == "resnet" else texts, requires_grad=True)
    return Alone(layer, options).train(), x


def saved_bytes(model: Alone, x: torch.Tensor) -> int:
    """Return the bytes that a layer saves, but for what lives anyway.

    Args:
        model: With its layer.
        x: What it is given.
    """
    (layer,) = model.layers
    seen: dict[int, torch.Tensor] = {}
    ends: list[torch.Tensor] = []

    def note(_: nn.Module, args: Any, output: Any) -> None:
        ends.extend((args[0], output[0] if isinstance(output, tuple) else output))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    handle = layer.register_forward_hook(note)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    handle.remove()
    given = model.options.values()
    others = [v for v in given if isinstance(v, torch.Tensor)]
    others += [t for v in given if isinstance(v, tuple) for t in v]
    for tensor in (x, *ends, *others, *model.parameters(), *model.buffers()):
        seen.pop(tensor.untyped_storage().data_ptr(), None)
    return int(math.fsum(t.untyped_storage().nbytes() for t in seen.values()))
