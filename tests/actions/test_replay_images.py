"""What recipes rebuild of layers on images: pools, batch norms, other sizes."""

import pytest
import torch
from torch import nn
from torch.nn import functional

WIDTH, PIXELS = 8, 12
SHAPE = (4, WIDTH, PIXELS, PIXELS)
_FULL = 4 * 4 * WIDTH * PIXELS * PIXELS
"""Bytes of a tensor of the full size."""
_SEALS = 4096
"""More than what is held in place of what goes."""


class Layer(nn.Module):
    """A batch norm, what is tried, and a convolution that reads it."""

    def __init__(self, part):
        super().__init__()
        self.first = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm2d(WIDTH)
        self.part = part
        self.last = nn.LazyConv2d(WIDTH, 1)

    def forward(self, x):
        """Map (batch, width, height, width) to a number for each channel."""
        return self.last(self.part(self.norm(self.first(x)))).mean((2, 3))


class Row(nn.Module):
    """One such layer, and a loss."""

    def __init__(self, part):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([Layer(part)])

    def forward(self, x):
        """Map images to one number."""
        return self.blocks[0](x * 1.0).square().mean()


def _half(x):
    return functional.interpolate(x, scale_factor=0.5, mode="bilinear")


PARTS = {
    "relu in place": (nn.ReLU(inplace=True), _FULL),
    "relu6 in place": (nn.ReLU6(inplace=True), 2 * _FULL),
    # Its input and output, and three quarters of the positions' two bytes an element.
    "max-pool": (nn.MaxPool2d(2), _FULL + _FULL // 4 + _FULL // 4 * 3 // 2),
    "average pool": (nn.AvgPool2d(2), _FULL + _FULL // 4),
    "adaptive pool": (nn.AdaptiveAvgPool2d(5), _FULL),
    "nearest": (nn.UpsamplingNearest2d(scale_factor=2), 4 * _FULL),
    "bilinear": (_half, _FULL // 4),
    "padded": (nn.ZeroPad2d(1), _FULL),
}
"""By name: what is tried, and the bytes that go at least."""


@pytest.mark.parametrize("name", PARTS)
def test_it_trains_the_same_and_frees_what_it_should(
    toys, freed, always_selective, name
):
    """Over several batches and sizes, to the last bit."""
    part, n_bytes = PARTS[name]
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randn(SHAPE, generator=generator) for _ in range(4)]
    batches.insert(2, torch.randn(2, WIDTH, 16, 16, generator=generator))
    model = Row(part)
    model(batches[0])  # makes the last convolution
    found, _ = toys.compare(model, batches, **always_selective)
    assert [] == found
    assert n_bytes - _SEALS <= freed[-1]
