"""Lengths of batches."""

import email
from pathlib import Path

import numpy as np
import pytest

from mimose.bench import corpus
from mimose.bench.grid import traces


def _lengths(trace, n_batches=400, seed=0):
    return trace(np.random.default_rng(seed), n_batches)


def test_long_tail():
    """Within its range, with most of the mass in the lower half."""
    lengths = [sizes["length"] for sizes in _lengths(traces.long_tail(30, 332))]
    assert min(lengths) >= 30
    assert 200 < max(lengths) <= 332
    assert np.median(lengths) < 130


def test_bell_with_spike():
    """A bell around its mode, and a spike where texts are cut."""
    trace = traces.bell_with_spike(153, 512, 280)
    lengths = [sizes["length"] for sizes in _lengths(trace)]
    assert set(lengths) <= set(range(153, 513))
    assert 260 < np.median(lengths) < 320
    assert 0.05 < lengths.count(512) / len(lengths) < 0.2


def test_pairs():
    """Targets are about as long as their sources, and in the same range."""
    for sizes in _lengths(traces.pairs(17, 460)):
        assert 17 <= sizes["target"] <= 460
        assert 0.8 < sizes["target"] / sizes["source"] < 1.25


def test_images():
    """Multiples of the step; the long side is capped; most lie."""
    found = _lengths(traces.images((480, 800), 1333, 32))
    assert all(value % 32 == 0 for sizes in found for value in sizes.values())
    assert max(max(sizes.values()) for sizes in found) <= 1344
    lying = [sizes["width"] >= sizes["height"] for sizes in found]
    assert 0.6 < np.mean(lying) < 0.95


def test_docstrings_are_real_lengths(monkeypatch):
    """Not longer than asked for, and of many sizes: here those of one package."""
    pytest.importorskip("tokenizers")
    found = corpus.load_corpus(root=Path(email.__file__).parent)
    monkeypatch.setattr(corpus, "load_corpus", lambda: found)
    lengths = {sizes["length"] for sizes in _lengths(traces.docstrings(256), 60)}
    assert max(lengths) <= 256
    assert len(lengths) > 20


@pytest.mark.parametrize("seed", [0, 1])
def test_a_seed_settles_a_trace(seed):
    """Two strategies get the same batches."""
    trace = traces.long_tail(30, 332)
    assert _lengths(trace, seed=seed) == _lengths(trace, seed=seed)
    assert _lengths(trace, seed=seed) != _lengths(trace, seed=seed + 5)


def test_lengths_of_ones_own(tmp_path):
    """A column for each size, a line for each batch; others are passed over."""
    path = tmp_path / "mine.csv"
    path.write_text("note,target,source\na,3,4\nb,5,6\n")
    assert traces.from_file(path, ("source", "target")) == [
        {"source": 4, "target": 3},
        {"source": 6, "target": 5},
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("size\n3\n", "no length"),
        ("length\n3\nmany\n", "line 3: length is 'many'"),
        ("length\n0\n", "line 2: length is '0'"),
    ],
)
def test_bad_lengths(tmp_path, text, complaint):
    """The file, the line and the value are named."""
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        traces.from_file(path, ("length",))


def test_lengths_of_a_data_set(tmp_path, monkeypatch):
    """A local file; each batch is as long as its longest text, or cut."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "texts.csv"
    texts = ["return", "return the value", "return the value of it " * 9] * 4
    path.write_text("\n".join(["sentence", *texts]) + "\n")

    def read(**changes):
        options = {"batch_size": 2, "most": 20, "seed": 0, **changes}
        return traces.from_dataset(str(path), "sentence", **options)

    lengths = [sizes["length"] for sizes in read()]
    assert len(lengths) == 6
    assert set(lengths) <= {3, 5, 20}
    assert read(batch_size=12, most=30) == [{"length": 30}]
    with pytest.raises(ValueError, match="12 texts, fewer than one batch of 13"):
        read(batch_size=13)
    with pytest.raises(ValueError, match="has columns sentence, and no text"):
        traces.from_dataset(str(path), "text", batch_size=2, most=20, seed=0)
