"""Classifying scikit-learn's digits: real images that need no download.

Its 1,797 handwritten digits of 8 by 8 pixels come with the package. They are resized,
and ResNets built from configurations learn them within a few epochs, so that what a
lossy action costs in accuracy shows. The stem, which holds the largest images of all
layers, is planned for like a residual block.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from mimose.bench.zoo import builder

N_CLASSES = 10
_BRIGHTEST = 16.0
FOLDS = 5
"""The digits' parts, of which one is held out."""
_NARROWER = {"tiny": 4, "small": 2, "base": 1}
"""By how much channels are fewer than those published."""
_LAYERS = frozenset({"ResNetEmbeddings", "ResNetBasicLayer", "ResNetBottleNeckLayer"})
_EVALUATED = 128
"""Images a forward, where accuracy is measured."""


class Images(NamedTuple):
    """Digits and what they are."""

    pixels: torch.Tensor
    """(images, 1, 8, 8), from 0 to 1."""
    labels: torch.Tensor
    """(images,)."""

    def resized(self, chosen: torch.Tensor | slice, side: int) -> dict[str, Any]:
        """Return a batch of some images, each of `side` by `side` pixels."""
        pixels = functional.interpolate(
            self.pixels[chosen], size=(side, side), mode="bilinear", align_corners=False
        )
        return {"pixel_values": pixels, "labels": self.labels[chosen]}


@functools.cache
def load(fold: int = 0) -> tuple[Images, Images]:
    """Return the digits to learn from, and a fifth of all, which is held out.

    Args:
        fold: Which of the fifths, from 0 to 4.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    pixels = torch.tensor(data.images / _BRIGHTEST, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(data.target, dtype=torch.int64)
    is_held_out = torch.arange(len(labels)) % FOLDS == fold
    train, held_out = (
        Images(pixels[part], labels[part]) for part in (~is_held_out, is_held_out)
    )
    return train, held_out


def is_layer(module: nn.Module) -> bool:
    """Tell what is planned for: residual blocks, and the stem before them."""
    return type(module).__name__ in _LAYERS


def resnet(layer: str, depths: tuple[int, ...], scale: str, **changes: Any) -> Any:
    """Build a ResNet for the digits, in training mode.

    Args:
        layer: ``"basic"`` or ``"bottleneck"``.
        depths: Blocks of the four stages.
        scale: Settles the number of channels.
        changes: Of the configuration.
    """
    narrower = _NARROWER[scale]
    widest = 1 if layer == "basic" else 4
    config = {
        "num_channels": 1,
        "num_labels": N_CLASSES,
        "layer_type": layer,
        "depths": list(depths),
        "embedding_size": 64 // narrower,
        "hidden_sizes": [widest * 64 * 2**i // narrower for i in range(4)],
    }
    build = builder("ResNetConfig", "ResNetForImageClassification")
    return build(**{**config, **changes})


def n_right(model: nn.Module, images: Images, side: int) -> int:
    """Count the digits that are named correctly.

    Training mode is put back afterwards.
    """
    was_training = model.training
    device = next(model.parameters()).device
    model.eval()
    right = 0
    try:
        with torch.no_grad():
            for start in range(0, len(images.labels), _EVALUATED):
                batch = images.resized(slice(start, start + _EVALUATED), side)
                logits = model(pixel_values=batch["pixel_values"].to(device)).logits
                right += int((logits.argmax(dim=-1).cpu() == batch["labels"]).sum())
    finally:
        model.train(was_training)
    return right
