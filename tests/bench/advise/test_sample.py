"""Batches of other sizes, made from one."""

import pytest
import torch

from mimose.bench.advise.sample import Sample
from mimose.usage import UsageError


def _ids(batch=4, length=6):
    return torch.arange(batch * length).reshape(batch, length)


def test_a_mapping_is_had_in_other_sizes():
    """A mapping is had in other sizes."""
    ids = _ids()
    mask = torch.ones(4, 1, 6, 6, dtype=torch.bool)
    sample = Sample({"input_ids": ids, "mask": mask, "labels": torch.arange(4), "k": 3})
    assert (sample.batch, sample.length) == (4, 6)
    found = sample.resized(6, 9).kwargs
    assert found["input_ids"].shape == (6, 9)
    assert found["mask"].shape == (6, 1, 9, 9)
    assert found["labels"].tolist() == [0, 1, 2, 3, 0, 1]
    assert found["k"] == 3
    assert torch.equal(found["input_ids"][4, :6], ids[0])
    assert torch.equal(found["input_ids"][0, 6:], ids[0, :3])


def test_features_are_no_length():
    """Features are no length."""
    sample = Sample({"ids": _ids(), "embeds": torch.rand(4, 6, 6)})
    found = sample.resized(2, 3).kwargs
    assert found["embeds"].shape == (2, 3, 6)


@pytest.mark.parametrize(
    "batch", [(torch.rand(3, 5), [torch.rand(3)]), torch.rand(3, 5)]
)
def test_arguments_and_one_tensor(batch):
    """Arguments and one tensor."""
    sample = Sample(batch)
    assert (sample.batch, sample.length) == (3, None)
    assert sample.resized(2).args[0].shape == (2, 5)


def test_its_own_sizes_are_itself():
    """Its own sizes are itself."""
    ids = _ids()
    assert Sample(ids).resized(4, 6).args[0] is ids


@pytest.mark.parametrize(
    "batch", [{"x": 3}, {"x": torch.rand(2), "y": torch.rand(3)}, torch.tensor(1.0)]
)
def test_batches_that_cannot_be_told(batch):
    """Batches that cannot be told."""
    with pytest.raises(UsageError, match="first dimension; their shapes"):
        Sample(batch)


def test_the_length_is_that_of_the_ids():
    """The length is that of the ids, whatever else has two dimensions."""
    classes = torch.zeros(4, 10, dtype=torch.long)
    is_known = torch.zeros(4, 3, dtype=torch.bool)
    sample = Sample({"classes": classes, "known": is_known, "input_ids": _ids()})
    assert sample.length == 6
    assert Sample((is_known, _ids())).length == 6


def test_features_as_many_as_tokens_are_told_of():
    """Features as many as tokens are told of: nobody can tell them apart."""
    assert Sample({"input_ids": _ids(), "features": torch.rand(4, 7)}).notes() == []
    (note,) = Sample({"input_ids": _ids(), "features": torch.rand(4, 6)}).notes()
    assert "(4, 6)" in note
    assert "6 tokens" in note


@pytest.mark.parametrize(
    ("batch", "name"),
    [
        ({"classes": torch.rand(4, 6), "tokens": _ids()}, "tokens"),
        ({"batch": {"tokens": _ids()}}, 'batch["tokens"]'),
        ((torch.rand(4, 3), [_ids()]), "argument 2[0]"),
        (_ids(), "argument 1"),
    ],
)
def test_a_length_of_another_name_is_told_of(batch, name):
    """It says from which tensor it was taken, that a user may see that it is none."""
    note = Sample(batch).notes()[0]
    assert f"6 tokens, was taken from {name}, integers of shape (4, 6)" in note


def test_the_length_of_the_ids_is_no_guess():
    """Nor is there one to tell of without a text."""
    assert Sample({"input_ids": _ids()}).notes() == []
    assert Sample(torch.rand(4, 6)).notes() == []
