"""The convolutional nets: sizes as published, and a step that runs."""

import pytest
import torch

from benchmarks import convnets
from benchmarks.unet import UNet


def _published(model):
    """Count parameters but for the head's."""
    return sum(p.numel() for n, p in model.named_parameters() if "head" not in n)


@pytest.mark.parametrize(
    ("build", "n_parameters"),
    [
        (convnets.resnet50, 23_508_032),
        (convnets.vgg16, 14_714_688),
        (lambda: convnets.vgg16(has_norm=True), 14_723_136),
        (convnets.mobilenet_v2, 2_223_872),
        (convnets.googlenet, 5_599_904),
        (UNet, 31_037_568),
    ],
)
def test_they_are_as_large_as_published(build, n_parameters):
    """Parameters of all but the head."""
    with torch.device("meta"):
        assert n_parameters == _published(build())


@pytest.mark.parametrize("name", ["resnet50", "vgg16", "mobilenet_v2", "googlenet"])
def test_a_step_of_a_classifier(name):
    """Every parameter gets a gradient."""
    model = getattr(convnets, name)().train()
    loss = model(torch.rand(2, 3, 64, 64), torch.tensor([1, 7])).loss
    loss.backward()
    assert () == loss.shape
    assert all(
        p.grad is not None and p.grad.isfinite().all() for p in model.parameters()
    )


def test_a_step_of_the_unet():
    """A number for each pixel, whatever skips the depths."""
    model = UNet(4).train()
    mask = torch.rand(2, 32, 48).round()
    model(torch.rand(2, 3, 32, 48), mask).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
