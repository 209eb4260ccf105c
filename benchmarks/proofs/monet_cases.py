"""The models of `monet`, at sizes that two cores can train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks import convnets
from benchmarks.unet import UNet
from mimose.bench.zoo import ZOO, Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, its batch, and its units."""

    name: str
    build: Callable[[], nn.Module]
    batch_size: int
    length: int
    """Pixels of a side; tokens of a text."""
    units: tuple[str, ...]
    """Patterns of qualified names, as `matches` reads them; empty: those found."""
    is_text: bool = False
    has_mask: bool = False
    """Whether labels are a mask of each pixel, and not a class."""

    def batch(self, seed: int) -> Batch:
        """Make the batch."""
        generator = torch.Generator().manual_seed(seed)
        if self.is_text:
            sizes = {"batch": self.batch_size, "length": self.length}
            return ZOO["bert"].batch(sizes, generator)
        shape = self.batch_size, 3, self.length, self.length
        pixels = torch.rand(shape, generator=generator)
        if self.has_mask:
            labels = pixels.mean(1).round()
        else:
            labels = torch.randint(10, (self.batch_size,), generator=generator)
        return {"pixel_values": pixels, "labels": labels}

    @property
    def wanted(self) -> Any:
        """What `attach` is given as units."""
        return list(self.units) or None


_BERT: Mapping[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
}


def _bert() -> nn.Module:
    return ZOO["bert"].build(**_BERT)


CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        Case(
            name="resnet50",
            build=convnets.resnet50,
            batch_size=16,
            length=128,
            units=("stem", *(f"layers.{i}" for i in range(10))),
        ),
        Case(
            name="googlenet",
            build=convnets.googlenet,
            batch_size=24,
            length=128,
            units=("stem", *(f"layers.{i}" for i in range(12))),
        ),
        Case(
            name="unet",
            build=partial(UNet, 32),
            batch_size=4,
            length=128,
            units=(
                "stem",
                *(f"downs.{i}" for i in range(4)),
                *(f"ups.{i}" for i in range(4)),
            ),
            has_mask=True,
        ),
        Case(
            name="mobilenet",
            build=convnets.mobilenet_v2,
            batch_size=16,
            length=128,
            units=("stem", *(f"layers.{i}" for i in range(18))),
        ),
        Case(
            name="vgg16",
            build=convnets.vgg16,
            batch_size=4,
            length=128,
            units=tuple(f"layers.{i}" for i in range(5)),
        ),
        Case(
            name="bert",
            build=_bert,
            batch_size=8,
            length=128,
            units=(),
            is_text=True,
        ),
    )
}
"""By name."""
