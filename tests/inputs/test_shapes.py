"""From arguments to structures, sizes, names and buckets."""

import pytest
import torch

from mimose.inputs.describe import (
    SizeTable,
    call_shape,
    fast_key,
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
    assert fast_key((one,), {}) != fast_key((other,), {})


def test_masks_that_hide_something():
    """A mask of ones is not partial; one with a zero is; floats are no masks."""
    ones, hiding = torch.ones(2, 3, dtype=torch.long), torch.eye(3, dtype=torch.long)
    assert () == partial_masks((), {"attention_mask": ones})
    assert ("attention_mask",) == partial_masks((), {"attention_mask": hiding})
    assert ("mask",) == partial_masks(({"mask": hiding},), {})
    assert ("1",) == partial_masks((ones, hiding.bool()), {})
    assert () == partial_masks((), {"input_ids": hiding, "mask": hiding.float()})


def _table():
    table = SizeTable(("ids.0", "ids.1", "labels.0", "labels.1", "mask.0", "mask.1"))
    table.add((4, 10, 4, 4, 4, 10))
    return table


def test_equal_columns_are_merged_under_the_first_name():
    """Columns that were always equal are one size; the batch stays by itself."""
    table = _table()
    assert {"ids.0": 4, "ids.1": 10, "labels.1": 4} == table.named((4, 10, 4, 4, 4, 10))


def test_columns_that_differ_once_stay_apart():
    """One call in which two columns differ parts them for good."""
    table = _table()
    table.add((4, 12, 4, 4, 4, 13))
    table.add((4, 15, 4, 4, 4, 15))
    assert {"ids.1": 15, "mask.1": 15} == table.named((4, 15, 4, 4, 4, 15))


def test_fill_sets_every_column_of_a_name():
    """A shape given by name reaches all columns that are merged with it."""
    table = _table()
    now = (4, 10, 4, 4, 4, 10)
    assert (4, 20, 4, 4, 4, 20) == table.fill({"ids.1": 20}, now)
    assert (4, 20, 4, 4, 4, 20) == table.fill({"mask.1": 20}, now)
    assert (8, 10, 8, 4, 8, 10) == table.fill({"ids.0": 8}, now)
