"""The sizes of batches, however they are packed."""

from collections import UserDict
from dataclasses import dataclass

import torch

from mimose.inputs.batches import batch_shape


@dataclass
class _Pair:
    left: torch.Tensor
    right: str


def test_every_container_is_looked_into():
    """Mappings of any class, tuples, lists and dataclasses, nested, and a lone one."""
    ids = torch.zeros(2, 7)
    assert (2, 7) == batch_shape(ids).sizes
    assert (2, 7) == batch_shape(UserDict(ids=ids, name="x")).sizes
    assert (2, 7, 3) == batch_shape((ids, [_Pair(torch.zeros(3), "x")])).sizes
    assert () == batch_shape(["raw", "texts"]).sizes


def test_kinds_are_told_apart_by_paths_and_not_by_types():
    """Another name is another kind; trainers change types on the way."""
    one = batch_shape({"x": torch.zeros(2, 3)})
    assert one.kind == batch_shape({"x": torch.zeros(4, 5).half()}).kind
    assert one.kind != batch_shape({"y": torch.zeros(2, 3)}).kind
    assert one.kind != batch_shape({"x": torch.zeros(2)}).kind


def test_a_mask_that_hides_something_is_told():
    """Attention runs differently under one; elsewhere the host would have to wait."""
    mask = torch.ones(2, 3, dtype=torch.long)
    assert () == batch_shape({"mask": mask}).masks
    mask[0, 0] = 0
    assert ("mask",) == batch_shape({"mask": mask}).masks
    assert batch_shape({"mask": mask.to("meta")}).masks is None
