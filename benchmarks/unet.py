"""A U-Net in plain torch: it narrows, widens again, and skips what lies between."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional

from benchmarks.convnets import basic
from mimose.bench.zoo import Output


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


def _twice(n_in: int, n_out: int) -> nn.Sequential:
    return nn.Sequential(basic(n_in, n_out, 3), basic(n_out, n_out, 3))


class UNet(nn.Module):
    """A U-Net of four depths, with batch norms.

    Args:
        width: Channels at the full size; the published net has 64.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = tuple(width * 2**depth for depth in range(5))
        pairs = list(itertools.pairwise(widths))
        self.stem = _twice(3, widths[0])
        self.downs = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), _twice(n_in, n_out)) for n_in, n_out in pairs
        )
        self.ups = nn.ModuleList(Up(n_in, n_out) for n_out, n_in in reversed(pairs))
        self.head = nn.Conv2d(widths[0], 1, 1)

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
