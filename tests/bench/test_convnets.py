"""The convolutional nets: sizes as published, and a step that runs."""

import pytest
import torch

from benchmarks import convnets


@pytest.mark.parametrize(
    ("build", "n_parameters"),
    [
        (convnets.resnet50, 23_508_032),
        (convnets.vgg16, 14_714_688),
        (convnets.mobilenet_v2, 2_223_872),
        (convnets.googlenet, 5_599_904),
        (convnets.UNet, 31_037_568),
    ],
)
def test_they_are_as_large_as_published(build, n_parameters):
    """Parameters of all but the head; each gets a gradient in a step."""
    model = build()
    own = [p.numel() for n, p in model.named_parameters() if "head" not in n]
    assert sum(own) == n_parameters
    labels = torch.ones(2, 32, 32) if build is convnets.UNet else torch.tensor([1, 7])
    model(torch.rand(2, 3, 32, 32), labels).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
