"""Convolutional nets that papers on training memory measure, in plain torch.

They are ResNet-50, VGG-16, MobileNet-v2, GoogLeNet and a U-Net, with random weights.
Each repeated part and each stem is a separate module, so any of them can be a layer.
They take images and labels, and return a loss. Heads are one linear layer, because the
weights of VGG's published hidden ones exceed the activations of a small batch.
"""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from mimose.bench.zoo import Output


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
        self.stem, self.layers = stem, nn.ModuleList(layers)
        self.head = nn.Linear(n_channels, 10)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Output:
        """Map images (batch, 3, height, width) and labels (batch,) to a loss."""
        x = self.stem(pixel_values)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))
        return Output(functional.cross_entropy(logits, labels))


def conv(
    n_in: int,
    n_out: int,
    kernel: int = 1,
    stride: int = 1,
    groups: int = 1,
    activation: type[nn.Module] | None = nn.ReLU,
) -> nn.Sequential:
    """Return a convolution that keeps the size, a batch norm, and an activation."""
    weights = n_in, n_out, kernel, stride, kernel // 2
    parts = [nn.Conv2d(*weights, groups=groups, bias=False), nn.BatchNorm2d(n_out)]
    return nn.Sequential(*parts, *([activation(inplace=True)] if activation else []))


class Bottleneck(nn.Module):
    """A residual block of three convolutions, the last of four times the width."""

    def __init__(self, n_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv(n_in, width),
            conv(width, width, 3, stride),
            conv(width, 4 * width, activation=None),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or n_in != 4 * width:
            self.shortcut = conv(n_in, 4 * width, stride=stride, activation=None)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, n_in, height, width) to four times the width."""
        y: torch.Tensor = self.body(x)
        y += self.shortcut(x)
        return self.relu(y)  # type: ignore[no-any-return]


def resnet50() -> nn.Module:
    """Return a ResNet-50: 16 bottlenecks, in ten layers of one or two."""
    layers: list[nn.Module] = []
    n_in = 64
    for stage, groups in enumerate(((1, 2), (2, 2), (2, 2, 2), (1, 1, 1))):
        width = 64 * 2**stage
        for n_blocks in groups:
            stride = 2 if stage and n_in != 4 * width else 1
            first = Bottleneck(n_in, width, stride)
            n_in = 4 * width
            others = (Bottleneck(n_in, width, 1) for _ in range(n_blocks - 1))
            layers.append(nn.Sequential(first, *others))
    stem = nn.Sequential(conv(3, 64, 7, 2), nn.MaxPool2d(3, stride=2, padding=1))
    return Classifier(stem, layers, n_in)


def vgg16() -> nn.Module:
    """Return the convolutions of a VGG-16: five stages of two or three, no norms."""
    stages: list[nn.Module] = []
    n_in = 3
    for n_out, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        parts: list[nn.Module] = []
        for _ in range(depth):
            convolution = nn.Conv2d(n_in, n_out, 3, padding=1)
            parts += [convolution, nn.ReLU(inplace=True)]
            n_in = n_out
        stages.append(nn.Sequential(*parts, nn.MaxPool2d(2)))
    return Classifier(nn.Identity(), stages, n_in)


class InvertedResidual(nn.Module):
    """A block that widens, convolves each channel by itself, and narrows again."""

    def __init__(self, n_in: int, n_out: int, stride: int, factor: int) -> None:
        super().__init__()
        width, six = n_in * factor, nn.ReLU6
        wider = [conv(n_in, width, activation=six)] if factor > 1 else []
        by_channel = conv(width, width, 3, stride, groups=width, activation=six)
        narrower = conv(width, n_out, activation=None)
        self.body = nn.Sequential(*wider, by_channel, narrower)
        self.is_residual = stride == 1 and n_in == n_out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, n_in, height, width) to n_out channels."""
        y: torch.Tensor = self.body(x)
        return x + y if self.is_residual else y


def mobilenet_v2() -> nn.Module:
    """Return a MobileNet-v2: 17 inverted residuals, and a last convolution."""
    layers: list[nn.Module] = [InvertedResidual(32, 16, 1, 1)]
    n_in = 16
    widths, depths = (24, 32, 64, 96, 160, 320), (2, 3, 4, 3, 3, 1)
    for n_out, depth, stride in zip(widths, depths, (2, 2, 2, 1, 2, 1), strict=True):
        for number in range(depth):
            step = 1 if number else stride
            layers.append(InvertedResidual(n_in, n_out, step, 6))
            n_in = n_out
    layers.append(conv(n_in, 1280, activation=nn.ReLU6))
    return Classifier(conv(3, 32, 3, 2, activation=nn.ReLU6), layers, 1280)


class Inception(nn.Module):
    """Four branches side by side: 1 × 1, 3 × 3 twice, and a pool."""

    def __init__(
        self, n_in: int, one: int, narrow: int, wide: int, *others: int
    ) -> None:
        super().__init__()
        narrower, wider, pooled = others
        self.branches = nn.ModuleList(
            (
                conv(n_in, one),
                nn.Sequential(conv(n_in, narrow), conv(narrow, wide, 3)),
                nn.Sequential(conv(n_in, narrower), conv(narrower, wider, 3)),
                nn.Sequential(nn.MaxPool2d(3, 1, padding=1), conv(n_in, pooled)),
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, n_in, height, width) to all branches' channels."""
        return torch.cat([branch(x) for branch in self.branches], 1)


_INCEPTIONS = (
    (192, 64, 96, 128, 16, 32, 32),
    (256, 128, 128, 192, 32, 96, 64),
    (480, 192, 96, 208, 16, 48, 64),
    (512, 160, 112, 224, 24, 64, 64),
    (512, 128, 128, 256, 24, 64, 64),
    (512, 112, 144, 288, 32, 64, 64),
    (528, 256, 160, 320, 32, 128, 128),
    (832, 256, 160, 320, 32, 128, 128),
    (832, 384, 192, 384, 48, 128, 128),
)
"""Channels that come in, then of the branches."""


def googlenet() -> nn.Module:
    """Return a GoogLeNet with batch norms: nine inception modules, one head."""
    pool = partial(nn.MaxPool2d, 3, 2, ceil_mode=True)
    modules = [Inception(*widths) for widths in _INCEPTIONS]
    second = nn.Sequential(conv(64, 64), conv(64, 192, 3), pool())
    layers = [second, *modules[:2], pool(), *modules[2:7], pool(), *modules[7:]]
    return Classifier(nn.Sequential(conv(3, 64, 7, 2), pool()), layers, 1024)


def _twice(n_in: int, n_out: int) -> nn.Sequential:
    return nn.Sequential(conv(n_in, n_out, 3), conv(n_out, n_out, 3))


class Up(nn.Module):
    """Doubles the size, takes what skipped the depths, and convolves twice."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(n_in, n_out, 2, stride=2)
        self.body = _twice(2 * n_out, n_out)

    def forward(self, x: torch.Tensor, skipped: torch.Tensor) -> torch.Tensor:
        """Map (batch, n_in, height, width) to n_out channels of twice the size."""
        output: torch.Tensor = self.body(torch.cat([skipped, self.up(x)], 1))
        return output


class UNet(nn.Module):
    """A U-Net of four depths, with batch norms.

    Args:
        width: Channels at the full size; the published net has 64.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(width * 2**depth for depth in range(5)))
        self.stem = _twice(3, width)
        self.downs = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), _twice(*pair)) for pair in pairs
        )
        self.ups = nn.ModuleList(Up(n_in, n_out) for n_out, n_in in reversed(pairs))
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Output:
        """Map images (batch, 3, height, width) and a mask (batch, height, width)."""
        skipped = [self.stem(pixel_values)]
        for down in self.downs:
            skipped.append(down(skipped[-1]))
        x = skipped.pop()
        for up in self.ups:
            x = up(x, skipped.pop())
        logits = self.head(x)[:, 0]
        return Output(functional.binary_cross_entropy_with_logits(logits, labels))
