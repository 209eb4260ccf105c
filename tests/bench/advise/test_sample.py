"""A user's model and batch, and batches of other sizes."""

from __future__ import annotations

import pytest
import torch

from mimose.bench.advise.methods import METHODS, PARTS, Training
from mimose.bench.advise.sample import Sample
from mimose.bench.advise.source import make, saved
from mimose.bench.usage import UsageError


def test_rows_are_repeated():
    """Of every tensor, with its mask; a number stays as it is."""
    batch = {
        "input_ids": torch.arange(12).reshape(3, 4),
        "attention_mask": torch.ones(3, 1, 4, 4),
        "labels": torch.arange(3),
        "weight": torch.tensor(2.0),
    }
    sample = Sample(batch)
    assert 3 == sample.batch
    found = sample.resized(5).kwargs
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    assert shapes["input_ids"] == (5, 4)
    assert shapes["attention_mask"] == (5, 1, 4, 4)
    assert shapes["weight"] == ()
    assert [0, 1, 2, 0, 1] == found["labels"].tolist()


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        (torch.zeros(0, 4), "empty batch"),
        ((torch.zeros(2, 4), torch.zeros(3)), "first dimension"),
        ({"x": 1}, "their shapes: none"),
        (torch.zeros(2, 4, device="meta"), "meta device"),
    ],
)
def test_what_is_no_sample(batch, why):
    """It is said before anything is trained."""
    with pytest.raises(UsageError, match=why):
        Sample(batch)


def test_a_saved_model_is_read_again(toys):
    """With its weights and its sample; the file is gone afterwards."""
    model, sample = toys.blocks()
    with saved(model, sample) as path:
        again, batch = make(path)
    assert torch.equal(sample, batch)
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    with pytest.raises(FileNotFoundError):
        make(path)


def test_parts_add_up_to_the_batch(toys, monkeypatch):
    """Gradients are added up over them, and one step is taken."""
    model, sample = toys.blocks()
    seen = []
    forward = type(model).forward

    def spied(self, ids):
        seen.append(len(ids))
        return forward(self, ids)

    monkeypatch.setattr(type(model), "forward", spied)
    method = METHODS["accumulate"]
    cpu = torch.device("cpu")
    training = Training(model, sample, method, device=cpu, optimizer="sgd")
    assert training.step(10) > 0.0
    assert 10 == sum(seen)
    assert PARTS == len(seen)
    assert not method.is_exact_for(toys.normed()[0])
    assert method.is_exact_for(model)
