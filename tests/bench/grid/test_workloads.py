"""What the grid trains: models, batches, and their lengths."""

import sys

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from mimose.bench.corpus import OURS
from mimose.bench.grid import traces
from mimose.bench.grid.workloads import WORKLOADS, from_function
from mimose.model.layers import find_layers

SMALL = {"length": 9, "source": 8, "target": 7}


@pytest.fixture(autouse=True)
def docstrings(monkeypatch, toy_corpus):
    """Spare the seconds that reading the standard library takes."""
    monkeypatch.setattr(OURS, "_corpus", toy_corpus)
    monkeypatch.setattr(OURS, "_by_length", [])
    return OURS


@pytest.mark.parametrize("name", WORKLOADS)
def test_each_can_be_trained(name):
    """Its batches have a loss and gradients, and it has layers to plan for."""
    workload = WORKLOADS[name]
    model = workload.build("tiny")
    assert model.training
    sizes = {each: SMALL[each] for each in workload.sizes}
    model(**workload.batch(sizes, "tiny", torch.Generator())).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    n_layers = len(find_layers(model))
    assert n_layers >= (4 if name == "tc-docstrings" else 6)
    found = workload.trace(np.random.default_rng(0), 30)
    assert {tuple(sizes) for sizes in found} == {workload.sizes}
    assert len({tuple(sizes.values()) for sizes in found}) > 2


def test_a_model_of_ones_own(monkeypatch, tmp_path):
    """A function that returns the model, its batches and the names of their sizes."""
    (tmp_path / "mine_for_bench.py").write_text(
        "import torch\n"
        "def make():\n"
        "    model = torch.nn.Linear(2, 2)\n"
        "    return model, lambda sizes, g: {'n': sizes['rows']}, ('rows',)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    workload = from_function("mine_for_bench:make")
    assert (workload.sizes, workload.trace) == (("rows",), None)
    assert isinstance(workload.build("tiny"), torch.nn.Linear)
    assert workload.batch({"rows": 3}, "tiny", torch.Generator()) == {"n": 3}
    del sys.modules["mine_for_bench"]


# ------------------------------------------------------------- docstrings


@pytest.mark.parametrize("length", [2, 20])
def test_a_batch_of_any_length(docstrings, length):
    """Its longest member has it, also where texts are cut; the mask marks text."""
    first, same, other = (
        docstrings.batch({"length": length}, "", torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    )
    assert first["input_ids"].shape == (16, length)
    assert first["attention_mask"].sum(dim=1).max() == length
    assert set(first["input_ids"][first["attention_mask"] == 0].tolist()) <= {0}
    assert torch.equal(first["input_ids"], same["input_ids"])
    assert not torch.equal(first["input_ids"], other["input_ids"])


# ------------------------------------------------------------- lengths


def test_lengths_of_ones_own(tmp_path):
    """A column for each size, a line for each batch; others are passed over."""
    path = tmp_path / "mine.csv"
    path.write_text("note,target,source\na,3,4\nb,5,6\n")
    assert traces.from_file(path, ("source", "target")) == [
        {"source": 4, "target": 3},
        {"source": 6, "target": 5},
    ]
