"""Real digits: what is held out, images of any side, the stem among the layers."""

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import digits
from mimose.watch.units import find_units


def test_every_fifth_digit_is_held_out():
    """No digit is in both parts; each part has all ten classes."""
    train, held_out = digits.load()
    assert (len(train.labels), len(held_out.labels)) == (1437, 360)
    seen = {tuple(image.flatten().tolist()) for image in train.pixels}
    assert not seen & {tuple(image.flatten().tolist()) for image in held_out.pixels}
    for part in (train, held_out):
        assert part.labels.unique().tolist() == list(range(digits.N_CLASSES))


def test_a_digit_stays_what_it_is():
    """Of fifty digits, the one that a resized one is nearest to is itself."""
    train, _ = digits.load()
    large = train.resized(slice(0, 50), 64)["pixel_values"]
    small = torch.nn.functional.avg_pool2d(large, 8)
    distances = torch.cdist(small.flatten(1), train.pixels[:50].flatten(1))
    assert distances.argmin(dim=1).tolist() == list(range(50))


def test_the_stem_is_a_layer_and_accuracy_is_counted():
    """A model that always says 3 is right as often as there are threes."""
    model = digits.resnet("basic", (1, 1, 1, 1), "tiny")
    assert next(iter(find_units(model, digits.is_layer)))[0] == "resnet.embedder"
    head = model.classifier[-1]
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(torch.eye(10)[3])
    _, held_out = digits.load()
    assert digits.n_right(model, held_out, 32) == int((held_out.labels == 3).sum())
    assert model.training
