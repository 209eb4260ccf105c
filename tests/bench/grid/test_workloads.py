"""What the grid trains."""

import sys

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from mimose.bench.grid.workloads import (
    DEFAULT,
    OURS,
    SCALES,
    WORKLOADS,
    from_function,
    largest,
    size_of,
)
from mimose.watch.units import find_units


@pytest.fixture(autouse=True)
def _toy_corpus(monkeypatch, toy_corpus):
    """Spare the seconds that reading the standard library takes."""
    monkeypatch.setattr(OURS, "_corpus", toy_corpus)
    monkeypatch.setattr(OURS, "_by_length", [])


SMALL = {
    **{"length": 9, "source": 8, "target": 7},
    **{"height": 32, "width": 64, "images": 3, "side": 32},
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_each_can_be_trained(name):
    """Its batches have a loss and gradients, and it has layers to plan for."""
    workload = WORKLOADS[name]
    torch.manual_seed(0)
    model = workload.build("tiny")
    sizes = {each: SMALL[each] for each in workload.sizes}
    batch = workload.batch(sizes, "tiny", torch.Generator().manual_seed(0))
    output = model(**batch)
    (output if isinstance(output, torch.Tensor) else output.loss).backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    n_units = len(find_units(model, workload.units))
    assert n_units >= (4 if name == "tc-docstrings" else 6)
    assert model.training


@pytest.mark.parametrize("name", [*DEFAULT, "lm-gpt2"])
def test_a_small_one_is_wide_and_has_a_quarter_of_the_published_batch(name):
    """Its heads are as wide as those of real models; the layers are six a stack."""
    workload = WORKLOADS[name]
    with torch.device("meta"):
        model = workload.build("small")
    assert model.config.hidden_size == 256
    assert model.config.hidden_size // model.config.num_attention_heads == 64
    assert len(find_units(model)) == (12 if name == "tr-t5" else 6)
    sizes = {each: SMALL[each] for each in workload.sizes}
    few, many = (
        workload.batch(sizes, scale, torch.Generator().manual_seed(0))["input_ids"]
        for scale in ("small", "base")
    )
    assert 4 * len(few) == len(many)
    assert few.shape[1:] == many.shape[1:]


@pytest.mark.parametrize(
    "name", [name for name, each in WORKLOADS.items() if each.is_synthetic]
)
def test_traces_have_the_sizes(name):
    """And they vary."""
    workload = WORKLOADS[name]
    for scale in SCALES:
        found = workload.trace(scale)(np.random.default_rng(0), 30)
        assert {tuple(sizes) for sizes in found} == {workload.sizes}
        assert len({tuple(sizes.values()) for sizes in found}) > 10


def test_the_one_size_of_a_batch():
    """As the published system sees it."""
    assert size_of({"length": 7}) == 7
    assert size_of({"source": 5, "target": 9}) == 5
    assert size_of({"height": 4, "width": 5}) == 20
    assert size_of({"images": 3, "side": 5}) == 25


def test_the_batches_that_may_need_most():
    """Of the largest product or sum of squares, or largest in one size; each once."""
    pairs = [
        {"source": 9, "target": 9},
        {"source": 12, "target": 2},
        {"source": 3, "target": 9},
    ]
    assert largest(pairs) == pairs[:2]
    squares = [{"source": s, "target": t} for s, t in ((10, 10), (14, 7), (15, 1))]
    assert largest(squares) == [squares[0], squares[1], squares[2]]
    assert largest([{"length": 3}, {"length": 5}]) == [{"length": 5}]
    images = [{"images": n, "side": s} for n, s in ((16, 80), (13, 96), (8, 97))]
    assert largest(images) == [images[0], images[2], images[1]]


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
    assert workload.sizes == ("rows",)
    assert workload.trace is None
    assert isinstance(workload.build("tiny"), torch.nn.Linear)
    assert workload.batch({"rows": 3}, "tiny", torch.Generator()) == {"n": 3}
    del sys.modules["mine_for_bench"]


@pytest.mark.parametrize("path", ["nothing", "nowhere:make", "math:pi", "math:nothing"])
def test_what_is_no_model(path):
    """It is said what was given, and what is wrong with it."""
    with pytest.raises(ValueError, match=path):
        from_function(path)
