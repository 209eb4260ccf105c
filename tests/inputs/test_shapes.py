"""From arguments to structures, sizes, names and buckets."""

import pytest
import torch

from mimose.inputs.describe import (
    SizeTable,
    call_shape,
    partial_masks,
)


def test_names_and_sizes_of_tensors():
    """Every dimension of every tensor is named by path and axis; keywords sorted."""
    shape = call_shape((torch.zeros(2, 5),), {"b": torch.zeros(3), "a": torch.ones(4)})
    assert ("0.0", "0.1", "a.0", "b.0") == shape.names
    assert (2, 5, 4, 3) == shape.sizes


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2), None),
        (True, False),
        (1, 1.0),
        ([torch.zeros(2)], [torch.zeros(2), torch.zeros(2)]),
    ],
)
def test_structures_that_differ(one, other):
    """Rank, type, requires_grad, None and flags tell calls apart."""
    assert call_shape((one,), {}).structure != call_shape((other,), {}).structure


def test_masks_that_hide_something():
    """A mask of ones is not partial; one with a zero is; floats are no masks."""
    ones, hiding = torch.ones(2, 3, dtype=torch.long), torch.eye(3, dtype=torch.long)
    assert () == partial_masks((), {"attention_mask": ones})
    assert ("attention_mask",) == partial_masks((), {"attention_mask": hiding})
    assert ("mask",) == partial_masks(({"mask": hiding},), {})
    assert ("1",) == partial_masks((ones, hiding.bool()), {})
    assert () == partial_masks((), {"input_ids": hiding, "mask": hiding.float()})


def test_sizes_are_one_as_long_as_they_are_equal():
    """They have the first name, and are set together; one call parts them for good."""
    table = SizeTable(("ids.0", "ids.1", "labels.0", "labels.1", "mask.0", "mask.1"))
    first = (4, 10, 4, 4, 4, 10)
    table.add(first)
    assert {"ids.0": 4, "ids.1": 10, "labels.1": 4} == table.named(first)
    assert (4, 20, 4, 4, 4, 20) == table.fill({"mask.1": 20}, first)
    for last in ((4, 12, 4, 4, 4, 13), (4, 15, 4, 4, 4, 15)):
        table.add(last)
    assert {"ids.1": 15, "mask.1": 15} == table.named(last)
