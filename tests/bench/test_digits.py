"""Real digits: what is held out, batches of any side, the stem among the layers."""

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import digits
from mimose.bench.grid.workloads import WORKLOADS
from mimose.watch.units import find_units

ALL = {workload.name: workload for workload in digits.DIGITS}


def test_every_fifth_digit_is_held_out():
    """No digit is in both parts; each part has all ten classes."""
    train, held_out = digits.load()
    assert (len(train.labels), len(held_out.labels)) == (1437, 360)
    assert train.pixels.shape[1:] == (1, 8, 8)
    assert (train.pixels.min(), train.pixels.max()) == (0.0, 1.0)
    seen = {tuple(image.flatten().tolist()) for image in train.pixels}
    assert not seen & {tuple(image.flatten().tolist()) for image in held_out.pixels}
    for part in (train, held_out):
        assert part.labels.unique().tolist() == list(range(digits.N_CLASSES))


@pytest.mark.parametrize(
    ("name", "sizes", "shape"),
    [
        ("ic-digits", {"side": 40}, (16, 1, 40, 40)),
        ("ic-digits-50", {"images": 5, "side": 32}, (5, 1, 32, 32)),
    ],
)
def test_a_batch_has_the_sizes(name, sizes, shape):
    """Which digits are in it is settled by the seed, whatever their side."""
    generators = (torch.Generator().manual_seed(seed) for seed in (0, 0, 1))
    first, same, other = (ALL[name].batch(sizes, "tiny", g) for g in generators)
    assert first["pixel_values"].shape == shape
    assert torch.equal(first["labels"], same["labels"])
    assert not torch.equal(first["labels"], other["labels"])
    again = {**sizes, "side": 48}
    larger = ALL[name].batch(again, "tiny", torch.Generator().manual_seed(0))
    assert torch.equal(first["labels"], larger["labels"])


def test_a_digit_stays_what_it_is():
    """Of fifty digits, the one that a resized one is nearest to is itself."""
    train, _ = digits.load()
    large = train.resized(slice(0, 50), 64)["pixel_values"]
    small = torch.nn.functional.avg_pool2d(large, 8)
    distances = torch.cdist(small.flatten(1), train.pixels[:50].flatten(1))
    assert distances.argmin(dim=1).tolist() == list(range(50))


@pytest.mark.parametrize(("name", "blocks"), [("ic-digits", 8), ("ic-digits-50", 16)])
def test_the_stem_is_a_layer(name, blocks):
    """It comes first; without a word only blocks are found."""
    assert WORKLOADS[name] is ALL[name]
    with torch.device("meta"):
        model = ALL[name].build("base")
    names = [found for found, _ in find_units(model, ALL[name].units)]
    assert names[0] == "resnet.embedder"
    assert names[1:] == [found for found, _ in find_units(model)]
    assert len(names) == 1 + blocks


def test_accuracy_is_that_of_the_held_out():
    """A model that always says 3 is right as often as there are threes."""
    model = digits.resnet("basic", (1, 1, 1, 1), "tiny")
    head = model.classifier[-1]
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(torch.eye(10)[3])
    _, held_out = digits.load()
    expected = int((held_out.labels == 3).sum()) / 360
    assert digits.accuracy(model, 32) == expected
    assert model.training
