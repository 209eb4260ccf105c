"""Convolutional nets that papers on training memory measure, in plain torch.

ResNet-50, VGG-16, MobileNet-v2 and GoogLeNet, with random weights. What repeats is a
module of its own, and so is each stem: any of them can be a unit. They take images and
labels, and return a loss. Heads are one linear layer: the published VGG's hidden ones
weigh more than all that a small batch's activations take.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import nn
from torch.nn import functional

from mimose.bench.zoo import Output

_CLASSES = 10
_Shape: TypeAlias = "tuple[int, ...]"


class Classifier(nn.Module):
    """What all that classify share: a body, and a head of one linear layer.

    Args:
        stem: Runs first.
        layers: Run one after the other.
        n_channels: Of the last one's output.
    """

    def __init__(
        self, stem: nn.Module, layers: list[nn.Module], n_channels: int
    ) -> None:
        super().__init__()
        self.stem = stem
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(n_channels, _CLASSES)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Output:
        """Map images (batch, 3, height, width) and labels (batch,) to a loss."""
        x = self.stem(pixel_values)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))
        return Output(functional.cross_entropy(logits, labels))


class ConvNorm(nn.Sequential):
    """A convolution that keeps the size, a batch norm, and perhaps an activation."""

    def __init__(
        self,
        n_in: int,
        n_out: int,
        kernel: int = 1,
        *,
        stride: int = 1,
        groups: int = 1,
        activation: nn.Module | None = None,
    ) -> None:
        convolution = nn.Conv2d(
            n_in, n_out, kernel, stride, kernel // 2, groups=groups, bias=False
        )
        parts = [convolution, nn.BatchNorm2d(n_out)]
        super().__init__(*parts, *([] if activation is None else [activation]))


def _relu() -> nn.Module:
    return nn.ReLU(inplace=True)


# ------------------------------------------------------------------------ ResNet-50


class Bottleneck(nn.Module):
    """A residual block of three convolutions, the last of four times the width."""

    def __init__(self, n_in: int, width: int, stride: int) -> None:
        super().__init__()
        n_out = 4 * width
        self.body = nn.Sequential(
            ConvNorm(n_in, width, activation=_relu()),
            ConvNorm(width, width, 3, stride=stride, activation=_relu()),
            ConvNorm(width, n_out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or n_in != n_out:
            self.shortcut = ConvNorm(n_in, n_out, stride=stride)
        self.relu = _relu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, n_in, height, width) to four times the width."""
        y = self.body(x)
        y += self.shortcut(x)
        output: torch.Tensor = self.relu(y)
        return output


_STAGES = (
    (64, (1, 2), 1),
    (128, (2, 2), 2),
    (256, (2, 2, 2), 2),
    (512, (1, 1, 1), 2),
)
"""Width, blocks of each layer, stride of the first."""


def resnet50() -> nn.Module:
    """Return a ResNet-50: 16 bottlenecks, in ten layers of one or two."""
    stem = nn.Sequential(
        ConvNorm(3, 64, 7, stride=2, activation=_relu()),
        nn.MaxPool2d(3, stride=2, padding=1),
    )
    layers: list[nn.Module] = []
    n_in = 64
    for width, groups, stride in _STAGES:
        for n_blocks in groups:
            blocks = []
            for _ in range(n_blocks):
                is_first = n_in != 4 * width
                blocks.append(Bottleneck(n_in, width, stride if is_first else 1))
                n_in = 4 * width
            layers.append(nn.Sequential(*blocks))
    return Classifier(stem, layers, n_in)


# --------------------------------------------------------------------------- VGG-16


def vgg16(*, has_norm: bool = False) -> nn.Module:
    """Return the convolutions of a VGG-16: five stages of two or three.

    Args:
        has_norm: Whether there are batch norms; the published net has none.
    """
    stages: list[nn.Module] = []
    n_in = 3
    for n_out, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        parts: list[nn.Module] = []
        for _ in range(depth):
            parts.append(nn.Conv2d(n_in, n_out, 3, padding=1))
            parts += [nn.BatchNorm2d(n_out)] if has_norm else []
            parts.append(_relu())
            n_in = n_out
        stages.append(nn.Sequential(*parts, nn.MaxPool2d(2)))
    return Classifier(nn.Identity(), stages, n_in)


# --------------------------------------------------------------------- MobileNet-v2


class InvertedResidual(nn.Module):
    """A block that widens, convolves each channel by itself, and narrows again."""

    def __init__(self, n_in: int, n_out: int, stride: int, factor: int) -> None:
        super().__init__()
        width = n_in * factor
        six = nn.ReLU6(inplace=True)
        parts = [ConvNorm(n_in, width, activation=six)] if factor > 1 else []
        self.body = nn.Sequential(
            *parts,
            ConvNorm(width, width, 3, stride=stride, groups=width, activation=six),
            ConvNorm(width, n_out),
        )
        self.is_residual = stride == 1 and n_in == n_out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, n_in, height, width) to n_out channels."""
        y: torch.Tensor = self.body(x)
        return x + y if self.is_residual else y


_INVERTED = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def mobilenet_v2() -> nn.Module:
    """Return a MobileNet-v2: 17 inverted residuals, and a last convolution."""
    stem = ConvNorm(3, 32, 3, stride=2, activation=nn.ReLU6(inplace=True))
    layers: list[nn.Module] = []
    n_in = 32
    for factor, n_out, depth, stride in _INVERTED:
        for number in range(depth):
            step = 1 if number else stride
            layers.append(InvertedResidual(n_in, n_out, step, factor))
            n_in = n_out
    layers.append(ConvNorm(n_in, 1280, activation=nn.ReLU6(inplace=True)))
    return Classifier(stem, layers, 1280)


# ------------------------------------------------------------------------ GoogLeNet


class Inception(nn.Module):
    """Four branches side by side.

    Args:
        n_in: Channels that come in.
        widths: Of the 1 × 1 branch; narrow and wide of the next two; of the pool's.
    """

    def __init__(self, n_in: int, widths: _Shape) -> None:
        super().__init__()
        one, narrow, wide, narrower, wider, pooled = widths
        self.branches = nn.ModuleList(
            [
                basic(n_in, one),
                nn.Sequential(basic(n_in, narrow), basic(narrow, wide, 3)),
                nn.Sequential(basic(n_in, narrower), basic(narrower, wider, 3)),
                nn.Sequential(
                    nn.MaxPool2d(3, stride=1, padding=1), basic(n_in, pooled)
                ),
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, n_in, height, width) to all branches' channels."""
        return torch.cat([branch(x) for branch in self.branches], 1)


def basic(n_in: int, n_out: int, kernel: int = 1, stride: int = 1) -> ConvNorm:
    """Return a convolution, a batch norm and a ReLU."""
    return ConvNorm(n_in, n_out, kernel, stride=stride, activation=_relu())


_INCEPTIONS: tuple[_Shape, ...] = (
    (64, 96, 128, 16, 32, 32),
    (128, 128, 192, 32, 96, 64),
    (),
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    (),
    (256, 160, 320, 32, 128, 128),
    (384, 192, 384, 48, 128, 128),
)
"""Widths of the modules; nothing stands for a pool between two of them."""


def googlenet() -> nn.Module:
    """Return a GoogLeNet with batch norms: nine inception modules, one head."""
    stem = nn.Sequential(basic(3, 64, 7, 2), nn.MaxPool2d(3, 2, ceil_mode=True))
    second = nn.Sequential(
        basic(64, 64), basic(64, 192, 3), nn.MaxPool2d(3, 2, ceil_mode=True)
    )
    layers: list[nn.Module] = [second]
    n_in = 192
    for widths in _INCEPTIONS:
        if not widths:
            layers.append(nn.MaxPool2d(3, 2, ceil_mode=True))
            continue
        layers.append(Inception(n_in, widths))
        one, _, wide, _, wider, pooled = widths
        n_in = one + wide + wider + pooled
    return Classifier(stem, layers, n_in)
