"""Tensors in nested containers, their storages, versions and bits."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from mimose.torch_private import (
    next_sequence_number,
    sequence_number,
    storage_key,
    version_of,
)


def tensors_in(tree: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples, mappings and dataclasses, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from tensors_in(item)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for field in fields(tree):
            yield from tensors_in(getattr(tree, field.name))


def nodes_of(output: object, began: int) -> set[Any]:
    """Return the autograd nodes that a call has made.

    Args:
        output: What it returned.
        began: What `next_sequence_number` returned as it began.
    """
    left = [tensor.grad_fn for tensor in tensors_in(output)]
    seen: set[Any] = set()
    while left:
        node = left.pop()
        if node is not None and node not in seen and sequence_number(node) >= began:
            seen.add(node)
            left.extend(before for before, _ in node.next_functions)
    return seen


def is_newer(tensor: torch.Tensor, began: int) -> bool:
    """Whether a tensor has a graph, and was made since.

    Args:
        tensor: The tensor.
        began: What `next_sequence_number` returned then, in this thread.
    """
    node = tensor.grad_fn
    if node is None:
        return False
    return began <= sequence_number(node) < next_sequence_number()


def is_graph_held(began: int) -> bool:
    """Whether anything in Python holds a tensor with its graph that was made since.

    Args:
        began: What `next_sequence_number` returned then, in this thread.
    """
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.Tensor)}
    return any(is_newer(o, began) for o in objects if type(o) in kinds)


def storages_in(tree: object) -> dict[int, torch.UntypedStorage]:
    """Return the storages that a tree's tensors live in, by identity.

    Of a tensor that ranks share it is this rank's part that lives here.
    Sparse tensors and others without one storage are left out.
    """
    found = {}
    for tensor in map(local, tensors_in(tree)):
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            found[storage_key(storage)] = storage
    return found


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return (n,) a storage's bytes as they lie in memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def is_made_by(thing: object, module: str, kind: str) -> bool:
    """Whether something is an object of a class of torch that may not be imported.

    Without the import there is no such thing, and some imports take a second.

    Args:
        thing: The object.
        module: Where the class is.
        kind: Its name.
    """
    return isinstance(thing, getattr(sys.modules.get(module), kind, ()))


def is_dtensor(tensor: object) -> bool:
    """Whether a tensor belongs to several ranks together, each of which holds a part.

    Args:
        tensor: The tensor.
    """
    if type(tensor) in _OWN:
        return False
    return is_made_by(tensor, "torch.distributed.tensor", "DTensor")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds: all of it, mostly.

    Args:
        tensor: Perhaps one that ranks share.
    """
    if not is_dtensor(tensor):
        return tensor
    sharded: Any = tensor.detach()
    part: torch.Tensor = sharded.to_local()
    return part


def local_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor that this rank holds; of a sparse one as if full.

    Args:
        tensor: Perhaps one that ranks share.
    """
    part = local(tensor)
    return part.numel() * part.element_size()  # sparse ones have no `nbytes`


_OWN = torch.Tensor, torch.nn.Parameter


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal to the bit, not-a-number included."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not is_plain(one):
        return True
    return torch.equal(bits(one), bits(other))


def different_bits(one: torch.Tensor, other: torch.Tensor) -> bool | torch.Tensor:
    """Whether two tensors differ by a bit; on an accelerator a flag that is there."""
    if one.device != other.device or one.shape != other.shape:
        return True
    if one.is_cpu or one.dtype != other.dtype or not is_plain(one):
        return not same_bits(one, other)
    return (bits(one) != bits(other)).any()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bits can be looked at."""
    return tensor.layout == torch.strided and not (
        tensor.is_meta or tensor.is_quantized
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor's bits as integers."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    is_float = tensor.dtype.is_floating_point
    return tensor.view(kinds[tensor.element_size()]) if is_float else tensor


def sum_of_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return () the sum of a plain tensor's bits, in integers of 8 bytes.

    It changes with any one element. Whole words add up faster than narrower ones.

    Args:
        tensor: Copied where it is not contiguous.
    """
    words, rest = words_of(tensor)
    total = words.sum()
    return total + rest.sum() if len(rest) else total


def words_of(
    tensor: torch.Tensor, multiple: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a plain tensor's bits as integers of 8 bytes, and those left over.

    Args:
        tensor: Copied where it is not contiguous.
        multiple: The number of words is a multiple of this.
    """
    flat = bits(tensor.contiguous()).flatten()
    size, group = flat.element_size(), multiple * _WORD_BYTES
    n_whole = flat.nbytes // group * group // size
    whole, rest = flat[:n_whole], flat[n_whole:]
    if whole.storage_offset() * size % _WORD_BYTES:
        whole = whole.clone()
    return whole.view(torch.int64), rest


_WORD_BYTES = 8


def version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; inference tensors do not count.

    Args:
        tensor: The tensor.
    """
    return 0 if tensor.is_inference() else version_of(tensor)
