"""Lists of a varying number of tensors."""

import pytest
import torch

from mimose.inputs.lists import Lists
from mimose.inputs.shapes import call_shape, note_lists


def _images(n, *shape):
    return [torch.zeros(shape or (3, 8)) for _ in range(n)]


def _seen(*counts):
    lists = Lists()
    for n in counts:
        note_lists(([_images(n)],), {"x": torch.zeros(2)}, lists)
    return lists


def _shape(n, lists):
    return call_shape(([_images(n)],), {}, None, lists)


def test_a_number_that_varies_is_a_size():
    """One structure for any number of images; their shape is told once."""
    lists = _seen(3, 2)
    one, other = _shape(3, lists), _shape(5, lists)
    assert one.structure == other.structure
    assert ("0.0.count", "0.0.*.0", "0.0.*.1") == one.names
    assert (3, 3, 8) == one.sizes
    assert (5, 3, 8) == other.sizes


@pytest.mark.parametrize("counts", [(), (3,), (3, 3)])
def test_a_number_that_never_varied_is_a_structure(counts):
    """A pair of states may be two things."""
    lists = _seen(*counts)
    assert _shape(3, lists).structure != _shape(4, lists).structure
    assert 6 == len(_shape(3, lists).sizes)


@pytest.mark.parametrize(
    "odd",
    [
        [torch.zeros(3, 8), torch.zeros(3, 9)],
        [torch.zeros(3, 8), torch.zeros(3, 8, dtype=torch.int64)],
        [torch.zeros(3, 8), None],
    ],
)
def test_tensors_that_are_not_alike_are_described_one_by_one(odd):
    """And so are all lists at that place, from then on."""
    lists = _seen(3, 2)
    assert call_shape(([odd],), {}, None, lists) == call_shape(([odd],), {})
    note_lists(([odd],), {}, lists)
    assert _shape(3, lists) == _shape(3, None)
