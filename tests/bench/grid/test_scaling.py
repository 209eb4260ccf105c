"""Workloads of which one thing grows."""

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from mimose.bench.grid.scaling import AXES, SCALING, name_of
from mimose.bench.grid.workloads import workload_named
from mimose.watch.units import find_units


def _sizes(axis, value, n_batches=40):
    workload = workload_named(name_of(axis, value))
    return [
        sizes["length"]
        for sizes in workload.trace("tiny")(np.random.default_rng(0), n_batches)
    ]


def test_one_point_belongs_to_all_axes():
    """So it is run once."""
    assert len(SCALING) == sum(map(len, AXES.values())) - len(AXES) + 1


@pytest.mark.parametrize("depth", AXES["depth"])
def test_depth(depth):
    """As many layers."""
    assert len(find_units(SCALING[name_of("depth", depth)].build("tiny"))) == depth


@pytest.mark.parametrize("length", AXES["length"])
def test_length(length):
    """The longest batch is that long, and the model takes it."""
    assert max(_sizes("length", length)) == length
    model = SCALING[name_of("length", length)].build("tiny")
    assert model.config.n_positions == length


@pytest.mark.parametrize("batch", AXES["batch"])
def test_batch(batch):
    """As many texts."""
    workload = SCALING[name_of("batch", batch)]
    made = workload.batch({"length": 3}, "tiny", torch.Generator())
    assert made["input_ids"].shape == (batch, 3)


@pytest.mark.parametrize("shapes", [n for n in AXES["shapes"] if n < 40])
def test_shapes(shapes):
    """No more distinct lengths, the longest among them."""
    lengths = _sizes("shapes", shapes, 200)
    assert len(set(lengths)) <= shapes
    assert len(set(lengths)) > shapes // 2
    assert max(lengths) == 256
