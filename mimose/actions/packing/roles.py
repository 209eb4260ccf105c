"""What the nodes of a call read of what they have saved.

A gradient that is smooth in a saved value comes out a little off where that is a little
off: such readers are named here, and so are those that read no values. Whatever else
there is may be compared, divided by, or have to sum up to one; a small change may
spoil the gradient, and it is fragile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mimose.actions.packing.base import Reader, Role
from mimose.actions.replay.unit_graph import ACCUMULATE, Nodes, Slot
from mimose.torch_private import base_of, output_of, saved_value

_POOLS = (
    "AdaptiveAvgPool2DBackward0",
    "AdaptiveAvgPool3DBackward0",
    "AdaptiveMaxPool2DBackward0",
    "AvgPool2DBackward0",
    "AvgPool3DBackward0",
    "MaxPool2DWithIndicesBackward0",
    "MaxPool3DWithIndicesBackward0",
)
_ONE = (
    "EluBackward0",
    "ErfBackward0",
    "GeluBackward0",
    "GluBackward0",
    "MishBackward0",
    "SiluBackward0",
    "SoftplusBackward0",
)
_NORMS = (
    "CudnnBatchNormBackward0",
    "FusedRmsNormBackward0",
    "MiopenBatchNormBackward0",
    "NativeBatchNormBackward0",
    "NativeGroupNormBackward0",
    "NativeLayerNormBackward0",
)
_ATTENTIONS = (
    "CudnnAttentionBackward0",
    "EfficientAttentionBackward0",
    "FlashAttentionBackward0",
    "ScaledDotProductCudnnAttentionBackward0",
    "ScaledDotProductEfficientAttentionBackward0",
    "ScaledDotProductFlashAttentionBackward0",
    "ScaledDotProductFlashAttentionForCpuBackward0",
    "ScaledDotProductFusedAttentionOverrideableBackward0",
)
_ROLES: Mapping[tuple[str, str], Role] = {
    ("ReluBackward0", "result"): Role.SIGN,
    ("MaxPool2DWithIndicesBackward0", "result1"): Role.WINDOW_INDEX,
    ("SigmoidBackward0", "result"): Role.VALUE,
    ("TanhBackward0", "result"): Role.VALUE,
    ("SoftmaxBackward0", "result"): Role.VALUE,
    ("SafeSoftmaxBackward0", "result"): Role.VALUE,
    ("DivBackward0", "self"): Role.VALUE,
    ("MulBackward0", "self"): Role.VALUE,
    ("MulBackward0", "other"): Role.VALUE,
    ("BmmBackward0", "self"): Role.VALUE,
    ("BmmBackward0", "mat2"): Role.VALUE,
    ("BaddbmmBackward0", "batch1"): Role.VALUE,
    ("BaddbmmBackward0", "batch2"): Role.VALUE,
    **{(kind, "self"): Role.SHAPE for kind in _POOLS},
    **{(kind, "self"): Role.VALUE for kind in _ONE},
    **{(kind, "input"): Role.VALUE for kind in _NORMS},
    **{
        (kind, name): Role.VALUE
        for kind in _ATTENTIONS
        for name in ("query", "key", "value")
    },
}
"""By kind of node and name; products with weights are below."""

_PRODUCTS: Mapping[str, tuple[tuple[str, str], tuple[int, int], Role]] = {
    "ConvolutionBackward0": (("input", "weight"), (0, 1), Role.CONVOLUTION_WEIGHT),
    "AddmmBackward0": (("mat1", "mat2"), (1, 2), Role.LINEAR_WEIGHT),
    "MmBackward0": (("self", "mat2"), (0, 1), Role.LINEAR_WEIGHT),
}
"""By kind of node: names of the operand and what it is multiplied with, their edges,
and what the operand is read for where that is a weight."""

_SAME_VALUES = frozenset(
    (
        "PermuteBackward0",
        "ReshapeAliasBackward0",
        "TBackward0",
        "ToCopyBackward0",
        "TransposeBackward0",
        "UnsafeViewBackward0",
        "UnsqueezeBackward0",
        "ViewBackward0",
    )
)
_VIEWS = frozenset(("ReshapeAliasBackward0", "UnsafeViewBackward0", "ViewBackward0"))
_WINDOW = ("kernel_size", "stride", "padding", "dilation")


def reader_of(nodes: Nodes, slot: Slot, tensor: torch.Tensor) -> Reader:
    """Return what a node has saved a tensor for.

    Args:
        nodes: The call's.
        slot: Which node, and the name under which it has saved the tensor.
        tensor: The tensor, as it was saved.
    """
    node, kind = nodes.nodes[slot.node], nodes.kinds[slot.node]
    role, settings = _role(node, kind.split(" ")[0], slot.name, tensor)
    is_index = role is Role.WINDOW_INDEX
    if role is not Role.SHAPE and tensor.is_floating_point() == is_index:
        role, settings = Role.FRAGILE, ()
    return Reader(role, tensor.detach(), settings)


def _role(
    node: Any, kind: str, name: str, tensor: torch.Tensor
) -> tuple[Role, tuple[object, ...]]:
    if kind in _PRODUCTS:
        return _operand_role(node, kind, name, tensor)
    role = _ROLES.get((kind, name), Role.FRAGILE)
    if kind == "PowBackward0" and saved_value(node, "exponent") >= 1:
        role = Role.VALUE  # lower powers are steep near zero
    return role, _window(node) if role is Role.WINDOW_INDEX else ()


def _operand_role(
    node: Any, kind: str, name: str, tensor: torch.Tensor
) -> tuple[Role, tuple[object, ...]]:
    names, edges, role = _PRODUCTS[kind]
    edge = edges[names.index(name)]
    is_frozen = name != names[0] and node.next_functions[edge][0] is None
    if is_frozen or _is_parameter(node, edge):
        return Role.FRAGILE, ()  # a weight, perhaps cast: all layers' errors add up
    if name != names[0] or not _is_parameter(node, edges[1]):
        return Role.VALUE, ()
    if role is Role.CONVOLUTION_WEIGHT:
        return role, ()
    return role, _unflattened(node.next_functions[edges[0]][0], tensor)


def _is_parameter(node: Any, edge: int) -> bool:
    """Whether an edge leads to a parameter, through casts and views alone."""
    behind = node.next_functions[edge][0]
    while behind is not None and behind.name() in _SAME_VALUES:
        behind = behind.next_functions[0][0]
    if behind is None or behind.name() != ACCUMULATE:
        return False
    return isinstance(behind.variable, nn.Parameter)


def _unflattened(behind: Any, matrix: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a product's operand before it was made a matrix.

    Args:
        behind: Who made the matrix; None where no gradient goes there.
        matrix: (rows, width).
    """
    while behind is not None and behind.name() in _VIEWS:
        shape = tuple(saved_value(behind, "self_sym_sizes"))
        if _flattens(shape, matrix):
            return shape
        behind = behind.next_functions[0][0]
    base = base_of(matrix)
    if base is not None and _flattens(tuple(base.shape), matrix):
        return tuple(base.shape)
    return tuple(matrix.shape)


def _flattens(shape: tuple[int, ...], matrix: torch.Tensor) -> bool:
    rows, width = matrix.shape
    is_higher = len(shape) > matrix.dim()
    return is_higher and shape[-1] == width and math.prod(shape[:-1]) == rows


def _window(node: Any) -> tuple[object, ...]:
    """Return what `Reader.settings` has of a max-pool's indices."""
    kernel, stride, padding, dilation = (
        _pair(saved_value(node, name)) for name in _WINDOW
    )
    # Not that of the saved input, which may be let go already.
    size = tuple(output_of(*node.next_functions[0]).shape[-2:])
    return (size, kernel, stride or kernel, padding, dilation)


def _pair(numbers: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(numbers) * 2 if len(numbers) == 1 else tuple(numbers)
