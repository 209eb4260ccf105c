"""How nodes of the autograd graph are run again: one entry for each kind of node.

An entry says where the operator's operands are to be had, and nothing is taken from
elsewhere: from the node's edges, from what it has saved, or, for the epsilon of a norm
alone, from the module that owns the norm's weight. A number that an operator was given
and did not save, as the 1 of ``1 + tanh(x)``, is found by trial. All that is rebuilt is
compared with what is there, in each call, before anything is let go.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from mimose.torch_private import output_of, saved_value

Settings: TypeAlias = Callable[[Any], Any]
"""Reads from a node what its operator was told besides tensors."""

_UNSIGNED = 2**63
"""Dimensions from here on are negative ones, saved as they lie in memory."""


class Given(enum.Enum):
    """Where an operand is, if neither on an edge nor among what the node saved."""

    NUMBER = enum.auto()
    """A number that was not saved."""
    EPSILON = enum.auto()
    """An attribute of the module whose parameter edge 1 leads to."""


@dataclass(frozen=True, slots=True)
class Operand:
    """Where one operand of a node's operator is to be had."""

    edge: int | None
    """From who made it; None where no gradient can flow to it."""
    saved: str = ""
    """Else from what the node has saved under this name."""
    given: Given | None = None
    """Else from there; None where it cannot be had."""


@dataclass(frozen=True, slots=True)
class Operator:
    """What is known of one kind of node."""

    operands: tuple[Operand, ...] | None
    """None: one for each edge, all of which have to be there."""
    run: Callable[..., Any]
    """Called with the settings and the operands."""
    settings: Settings | None = None
    is_view: bool = False
    """Whether its output lies in its operand's storage."""
    has_many: bool = False
    """Whether it returns several tensors."""
    is_dear: bool = False
    """Whether it is a product of matrices, a convolution or attention."""


_X = (Operand(0, "self"),)
_X_ONLY = (Operand(0),)
_TWO = (Operand(0, "self"), Operand(1, "other"))
_SUM = (Operand(0, given=Given.NUMBER), Operand(1, given=Given.NUMBER))


def _saved(name: str) -> Settings:
    return lambda node: saved_value(node, name)


def _dimension(value: int) -> int:
    return value - 2 * _UNSIGNED if value >= _UNSIGNED else value


def _saved_dimension(name: str) -> Settings:
    return lambda node: _dimension(saved_value(node, name))


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(output_of(node, 0).shape)


def _dtype(node: Any) -> torch.dtype:
    dtype: torch.dtype = output_of(node, 0).dtype
    return dtype


def _pointwise(
    function: Callable[[Any], Any], saved: tuple[Operand, ...] = _X_ONLY
) -> Operator:
    return Operator(saved, lambda _, x: function(x))


def _view(function: Callable[[Any, Any], Any], settings: Settings | None) -> Operator:
    return Operator(_X_ONLY, lambda told, x: function(x, told), settings, is_view=True)


def _transposed(node: Any) -> tuple[int, int]:
    one, other = saved_value(node, "dim0"), saved_value(node, "dim1")
    return _dimension(one), _dimension(other)


def _sliced(node: Any) -> tuple[int, int, int, int]:
    start, end, step = (saved_value(node, name) for name in ("start", "end", "step"))
    return _dimension(saved_value(node, "dim")), start, end, step


def _split(node: Any) -> tuple[int, int]:
    return saved_value(node, "split_size"), _dimension(saved_value(node, "dim"))


def _mean(node: Any) -> tuple[list[int], bool]:
    dims = [_dimension(dim) for dim in saved_value(node, "dim")]
    return dims, saved_value(node, "keepdim")


def _layer_norm(shape: Any, x: Any, weight: Any, bias: Any, eps: float) -> Any:
    return torch.native_layer_norm(x, shape, weight, bias, eps)


def _batch_norm(told: tuple[bool, float], x: Any, weight: Any, bias: Any) -> Any:
    _, eps = told
    return torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)


OPERATORS: Mapping[str, Operator] = {
    # ------------------------------------------------------------------- pointwise
    "AddBackward0": Operator(
        _SUM, lambda alpha, a, b: torch.add(a, b, alpha=alpha), _saved("alpha")
    ),
    "SubBackward0": Operator(
        _SUM, lambda alpha, a, b: torch.sub(a, b, alpha=alpha), _saved("alpha")
    ),
    "MulBackward0": Operator(_TWO, lambda _, a, b: torch.mul(a, b)),
    "DivBackward0": Operator(_TWO, lambda _, a, b: torch.div(a, b)),
    "NegBackward0": _pointwise(torch.neg),
    "TanhBackward0": _pointwise(torch.tanh),
    "SigmoidBackward0": _pointwise(torch.sigmoid),
    "ReluBackward0": _pointwise(torch.relu),
    "RsqrtBackward0": _pointwise(torch.rsqrt),
    "SiluBackward0": _pointwise(functional.silu, _X),
    "GeluBackward0": Operator(
        _X,
        lambda kind, x: functional.gelu(x, approximate=kind),
        _saved("approximate"),
    ),
    "PowBackward0": Operator(
        _X, lambda exponent, x: torch.pow(x, exponent), _saved("exponent")
    ),
    "ToCopyBackward0": Operator(_X_ONLY, lambda dtype, x: x.to(dtype), _dtype),
    "CloneBackward0": Operator(
        _X_ONLY, lambda _, x: x.clone(memory_format=torch.contiguous_format)
    ),
    "CatBackward0": Operator(
        None, lambda dim, *parts: torch.cat(parts, dim), _saved_dimension("dim")
    ),
    # ------------------------------------------------------------- norms and sums
    "MeanBackward1": Operator(_X_ONLY, lambda told, x: x.mean(*told), _mean),
    "SoftmaxBackward0": Operator(
        _X_ONLY,
        lambda dim, x: torch.softmax(x, dim),
        _saved_dimension("dim"),
    ),
    "NativeLayerNormBackward0": Operator(
        (
            Operand(0, "input"),
            Operand(1, "weight"),
            Operand(2, "bias"),
            Operand(None, given=Given.EPSILON),
        ),
        _layer_norm,
        _saved("normalized_shape"),
        has_many=True,
    ),
    "NativeBatchNormBackward0": Operator(
        (Operand(0, "input"), Operand(1, "weight"), Operand(2)),
        _batch_norm,
        lambda node: (saved_value(node, "training"), saved_value(node, "eps")),
        has_many=True,
    ),
    # ---------------------------------------------------------------------- views
    "ViewBackward0": _view(lambda x, shape: x.view(shape), _shape),
    "UnsafeViewBackward0": _view(lambda x, shape: x.view(shape), _shape),
    "ReshapeAliasBackward0": _view(lambda x, shape: x.reshape(shape), _shape),
    "ExpandBackward0": _view(lambda x, shape: x.expand(shape), _shape),
    "TBackward0": _view(lambda x, _: x.t(), None),
    "TransposeBackward0": _view(lambda x, dims: x.transpose(*dims), _transposed),
    "PermuteBackward0": _view(
        lambda x, dims: x.permute(dims),
        lambda node: [_dimension(dim) for dim in saved_value(node, "dims")],
    ),
    "UnsqueezeBackward0": _view(
        lambda x, dim: x.unsqueeze(dim), _saved_dimension("dim")
    ),
    "SliceBackward0": _view(lambda x, told: torch.ops.aten.slice(x, *told), _sliced),
    "SplitBackward0": Operator(
        _X_ONLY,
        lambda told, x: x.split(*told),
        _split,
        is_view=True,
        has_many=True,
    ),
}
"""By the name of the node. What is not in it ends what can be rebuilt."""


def settings_of(kind: str, node: Any) -> Any:
    """Return what a node's operator was told besides tensors; None for nothing."""
    settings = OPERATORS[kind].settings
    return None if settings is None else settings(node)
