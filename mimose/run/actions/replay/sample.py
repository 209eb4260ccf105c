"""A few elements of a storage that goes, to compare with what is rebuilt.

Whatever a recipe rests on was compared with what was there when it was made, to the
last bit. A forward may do something else later on that shows in no graph: so some
elements of each storage are held, others in each call, and compared before any gradient
is made of what was rebuilt.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from mimose.tensors import bits

_MOST = 64
_PRIME = 7919
_turn = itertools.count()


class Sample(NamedTuple):
    """Elements of a storage, evenly spread."""

    values: torch.Tensor
    """Their bits, as integers."""
    step: int
    start: int


def take(tensor: torch.Tensor) -> Sample:
    """Hold some elements of a tensor's storage; others each time.

    Args:
        tensor: Without a graph; lies in a storage that is not empty.
    """
    n_elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    n_taken = min(_MOST, n_elements)
    step = n_elements // n_taken
    start = next(_turn) * _PRIME % step
    values = bits(tensor.as_strided((n_taken,), (step,), start)).clone()
    return Sample(values, step, start)


def differs(sample: Sample, rebuilt: torch.Tensor) -> bool | torch.Tensor:
    """Whether a storage holds other elements; on an accelerator a flag that is there.

    Args:
        sample: Of what was let go.
        rebuilt: Lies in a storage of the same size.
    """
    values, step, start = sample
    now = bits(rebuilt.as_strided(values.shape[:1], (step,), start))
    if values.is_cpu:
        return not torch.equal(values, now)
    return (values != now).any()
