"""Classifying scikit-learn's digits: real images that need no download.

Its 1,797 handwritten digits of 8 by 8 pixels come with the package. They are resized
to another side in each batch, as multi-scale training does, and ResNets built from
configurations learn them within a few epochs, so that what a lossy action costs in
accuracy shows. The stem, which holds the largest images of all layers, is planned for
like a residual block.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from mimose.bench.grid import workloads
from mimose.bench.grid.traces import Sizes, SizeTrace
from mimose.bench.grid.workloads import Workload
from mimose.bench.zoo import builder

N_CLASSES = 10
_BRIGHTEST = 16.0
FOLDS = 5
"""The digits' parts, of which one is held out."""
_MULTIPLE = 8
_SIDES = {"tiny": (32, 128), "small": (64, 160), "base": (64, 224)}
"""Of images, in pixels: the least and the greatest."""
_IMAGES = {"tiny": 16, "small": 16, "base": 64}
"""In a batch."""
_FEWEST = 0.5
"""The smallest batch where their number varies, as a share of the above."""
_NARROWER = {"tiny": 4, "small": 2, "base": 1}
"""By how much channels are fewer than those published."""
_LAYERS = frozenset({"ResNetEmbeddings", "ResNetBasicLayer", "ResNetBottleNeckLayer"})
_EVALUATED = 128
"""Images a forward, where accuracy is measured."""
_EVALUATED_AT = 64
"""Their side, which is trained at every scale."""


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


def accuracy(model: nn.Module, side: int) -> float:
    """Return the share of held-out digits that are named correctly."""
    _, held_out = load()
    return n_right(model, held_out, side) / len(held_out.labels)


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


def _batch(
    sizes: Mapping[str, int], scale: str, generator: torch.Generator
) -> dict[str, Any]:
    """Draw digits to learn from, and resize them."""
    train, _ = load()
    n_images = sizes.get("images", _IMAGES[scale])
    chosen = torch.randint(len(train.labels), (n_images,), generator=generator)
    return train.resized(chosen, sizes["side"])


def _trace(scale: str, *, varies_images: bool) -> SizeTrace:
    """Return sides drawn evenly, and where that varies the number of images."""
    least, most = (side // _MULTIPLE for side in _SIDES[scale])
    many = _IMAGES[scale]

    def trace(generator: np.random.Generator, n_batches: int) -> list[Sizes]:
        found = []
        for _ in range(n_batches):
            side = _MULTIPLE * int(generator.integers(least, most + 1))
            n_images = int(generator.integers(int(_FEWEST * many), many + 1))
            sizes = {"images": n_images, "side": side}
            found.append(sizes if varies_images else {"side": side})
        return found

    return trace


def _workload(
    name: str, what: str, layer: str, depths: tuple[int, ...], *, varies_images: bool
) -> Workload:
    return Workload(
        name=name,
        what=what,
        build=functools.partial(resnet, layer, depths),
        batch=_batch,
        sizes=("images", "side") if varies_images else ("side",),
        trace=functools.partial(_trace, varies_images=varies_images),
        learning_rate=1e-3,
        evaluate=functools.partial(accuracy, side=_EVALUATED_AT),
        units=is_layer,
    )


DIGITS = (
    _workload(
        "ic-digits",
        "real digits, ResNet-18, sides 32-128 (small: 64-160)",
        "basic",
        (2, 2, 2, 2),
        varies_images=False,
    ),
    _workload(
        "ic-digits-50",
        "real digits, ResNet-50, batches of another size, too",
        "bottleneck",
        (3, 4, 6, 3),
        varies_images=True,
    ),
)
"""The workloads: images of one number a batch, and of several."""


def workload_named(name: str) -> Workload:
    """Return one of these, or one that the library's own comparison knows.

    Raises:
        ValueError: There is none of this name.
    """
    own = {each.name: each for each in DIGITS}
    return own[name] if name in own else workloads.workload_named(name)
