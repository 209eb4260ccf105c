"""From arguments to structures, sizes, names and buckets."""

import pytest
import torch

from mimose.inputs.call_shape import call_shape
from mimose.inputs.size_table import SizeTable


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
