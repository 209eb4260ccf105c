"""How to run operators again from nodes of the autograd graph: one entry for each kind.

An entry says where the operator's operands are found: on the node's edges, among what
it has saved, or, for the epsilon of a norm, in the module that owns the norm's weight.
If an operator did not save an operand that no edge leads to, such as the 1 of
``1 + tanh(x)`` or a mask that is added, its result cannot be rebuilt.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from mimose.torch_private import output_of, saved_value

Settings: TypeAlias = Callable[[Any], Any]
"""Reads the operator's arguments, except tensors, from its node."""


@dataclass(frozen=True, slots=True)
class Operand:
    """Where one operand of a node's operator is found."""

    edge: int | None
    """The edge to the node that made it; None if no gradient flows to it."""
    saved: str = ""
    """Otherwise, the name under which the node has saved it."""
    is_epsilon: bool = False
    """Otherwise, an attribute of the module whose parameter edge 1 leads to."""


@dataclass(frozen=True, slots=True)
class Operator:
    """One kind of node."""

    operands: tuple[Operand, ...] | None
    """None for one from each edge, all of which must exist."""
    run: Callable[..., Any]
    """Called with the settings and the operands."""
    settings: Settings | None = None
    is_view: bool = False
    """Whether its output shares its operand's storage."""
    has_many: bool = False
    """Whether it returns several tensors."""
    edit: Callable[..., Any] | None = None
    """`run` in place, for an operand with no other reader."""
    is_fresh: bool = False
    """Whether it always returns a new tensor, which may be edited."""
    shown: str = ""
    """The name under which it saves its operand, if its backward could read its output
    instead. If the output is saved, it replaces the operand."""
    positions: str = ""
    """The name under which it saves positions in the planes of its first operand. They
    are held in fewer bytes, not recomputed."""


_aten: Any = torch.ops.aten
_X = (Operand(0, "self"),)
_X_ONLY = (Operand(0),)
_TWO = (Operand(0, "self"), Operand(1, "other"))
_SUM = (Operand(0), Operand(1))


def _saved(name: str) -> Settings:
    return lambda node: saved_value(node, name)


def _dimension(value: int) -> int:
    """Return a dimension; negative ones are saved as unsigned numbers."""
    return value - 2 * (sys.maxsize + 1) if value > sys.maxsize else value


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
    return Operator(
        _X_ONLY, lambda options, x: function(x, options), settings, is_view=True
    )


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


def _native_dropout(p: float, x: Any, mask: Any) -> Any:
    return x.mul(mask).mul_(1.0 / (1.0 - p) if p < 1.0 else 0.0)


def _batch_norm(
    options: tuple[bool, float], x: Any, weight: Any, bias: Any, mean: Any, rstd: Any
) -> Any:
    """Normalize by the saved mean and deviation, if that gives the same bits.

    On a CPU the kernel multiplies by ``rstd * weight``. So evaluation mode with a
    variance of one gives the same bits, and is eight times as fast as to compute mean
    and deviation again.
    """
    if x.is_cpu and rstd.dtype in (torch.float32, torch.float64):
        scale = rstd if weight is None else rstd * weight
        one = torch.ones_like(rstd)
        return torch.native_batch_norm(x, scale, bias, mean, one, False, 0.0, 0.0)
    _, eps = options
    return torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)


def _pooled(_: Any, x: Any, positions: Any) -> Any:
    """Take the elements at a pool's positions, ten times as fast as to pool again."""
    found = x.flatten(-2).gather(-1, positions.flatten(-2))
    return found.view(positions.shape)


_AVERAGE = (
    "kernel_size",
    "stride",
    "padding",
    "ceil_mode",
    "count_include_pad",
    "divisor_override",
)


def _sized(node: Any, *options: Any) -> list[Any]:
    scales = [saved_value(node, f"scales_{axis}") for axis in "hw"]
    return [saved_value(node, "output_size"), *options, *scales]


OPERATORS: Mapping[str, Operator] = {
    # ------------------------------------------------------------------- pointwise
    "AddBackward0": Operator(
        _SUM,
        lambda alpha, a, b: torch.add(a, b, alpha=alpha),
        _saved("alpha"),
        is_fresh=True,
    ),
    "SubBackward0": Operator(
        _SUM, lambda alpha, a, b: torch.sub(a, b, alpha=alpha), _saved("alpha")
    ),
    "MulBackward0": Operator(_TWO, lambda _, a, b: torch.mul(a, b)),
    "MulBackward1": Operator(
        _X_ONLY, lambda number, x: torch.mul(x, number), _saved("other")
    ),
    "DivBackward1": Operator(
        _X_ONLY, lambda number, x: torch.div(x, number), _saved("other")
    ),
    "NativeDropoutBackward0": Operator(
        (Operand(0), Operand(None, "result1")), _native_dropout, _saved("p")
    ),
    "DivBackward0": Operator(_TWO, lambda _, a, b: torch.div(a, b)),
    "NegBackward0": _pointwise(torch.neg),
    "TanhBackward0": _pointwise(torch.tanh),
    "SigmoidBackward0": _pointwise(torch.sigmoid),
    "ReluBackward0": Operator(
        _X_ONLY, lambda _, x: torch.relu(x), edit=lambda _, x: torch.relu_(x)
    ),
    "RsqrtBackward0": _pointwise(torch.rsqrt),
    "SiluBackward0": _pointwise(functional.silu, _X),
    "GeluBackward0": Operator(
        _X,
        lambda kind, x: functional.gelu(x, approximate=kind),
        _saved("approximate"),
    ),
    "ExpBackward0": _pointwise(torch.exp),
    "SqrtBackward0": _pointwise(torch.sqrt),
    "ErfBackward0": _pointwise(torch.erf, _X),
    "MishBackward0": _pointwise(functional.mish, _X),
    "HardswishBackward0": _pointwise(functional.hardswish, _X),
    "HardsigmoidBackward0": _pointwise(functional.hardsigmoid, _X),
    "LeakyReluBackward0": Operator(
        _X,
        lambda slope, x: functional.leaky_relu(x, slope),
        _saved("negative_slope"),
    ),
    "HardtanhBackward0": Operator(
        _X,
        lambda options, x: functional.hardtanh(x, *options),
        edit=lambda options, x: functional.hardtanh_(x, *options),
        settings=lambda node: (
            saved_value(node, "min_val"),
            saved_value(node, "max_val"),
        ),
        shown="self",
    ),
    "EluBackward0": Operator(
        _X,
        lambda options, x: _aten.elu(x, *options),
        lambda node: tuple(
            saved_value(node, name) for name in ("alpha", "scale", "input_scale")
        ),
    ),
    "SoftplusBackward0": Operator(
        _X,
        lambda options, x: functional.softplus(x, *options),
        lambda node: (saved_value(node, "beta"), saved_value(node, "threshold")),
    ),
    "GluBackward0": Operator(
        _X, lambda dim, x: functional.glu(x, dim), _saved_dimension("dim")
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
    "MeanBackward1": Operator(_X_ONLY, lambda options, x: x.mean(*options), _mean),
    "SoftmaxBackward0": Operator(
        _X_ONLY,
        lambda dim, x: torch.softmax(x, dim),
        _saved_dimension("dim"),
    ),
    "SafeSoftmaxBackward0": Operator(
        _X_ONLY,
        lambda dim, x: _aten._safe_softmax(x, dim),
        _saved_dimension("dim"),
    ),
    "NativeLayerNormBackward0": Operator(
        (
            Operand(0, "input"),
            Operand(1, "weight"),
            Operand(2, "bias"),
            Operand(None, is_epsilon=True),
        ),
        _layer_norm,
        _saved("normalized_shape"),
        has_many=True,
    ),
    "NativeGroupNormBackward0": Operator(
        (Operand(0, "input"), Operand(1, "weight"), Operand(2)),
        lambda options, x, weight, bias: torch.native_group_norm(
            x, weight, bias, *options
        ),
        lambda node: tuple(
            saved_value(node, name) for name in ("N", "C", "HxW", "group", "eps")
        ),
        has_many=True,
    ),
    "NativeBatchNormBackward0": Operator(
        (
            Operand(0, "input"),
            Operand(1, "weight"),
            Operand(2),
            Operand(None, "result1"),
            Operand(None, "result2"),
        ),
        _batch_norm,
        lambda node: (saved_value(node, "training"), saved_value(node, "eps")),
        has_many=True,
        is_fresh=True,
    ),
    # ---------------------------------------------------------- pools and other sizes
    "MaxPool2DWithIndicesBackward0": Operator(
        (Operand(0, "self"), Operand(None, "result1")), _pooled, positions="result1"
    ),
    "AvgPool2DBackward0": Operator(
        _X,
        lambda options, x: functional.avg_pool2d(x, *options),
        lambda node: [saved_value(node, name) for name in _AVERAGE],
    ),
    "AdaptiveAvgPool2DBackward0": Operator(
        _X, lambda shape, x: functional.adaptive_avg_pool2d(x, shape[-2:]), _shape
    ),
    "UpsampleNearest2DBackward0": Operator(
        _X_ONLY, lambda options, x: _aten.upsample_nearest2d(x, *options), _sized
    ),
    "UpsampleBilinear2DBackward0": Operator(
        _X_ONLY,
        lambda options, x: _aten.upsample_bilinear2d(x, *options),
        lambda node: _sized(node, saved_value(node, "align_corners")),
    ),
    "ConstantPadNdBackward0": Operator(
        _X_ONLY, lambda pad, x: functional.pad(x, pad), _saved("pad")
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
    "SqueezeBackward1": _view(lambda x, dim: x.squeeze(dim), _saved_dimension("dim")),
    "SelectBackward0": _view(
        lambda x, options: x.select(*options),
        lambda node: (
            _dimension(saved_value(node, "dim")),
            _dimension(saved_value(node, "index")),
        ),
    ),
    "UnbindBackward0": Operator(
        _X_ONLY,
        lambda dim, x: x.unbind(dim),
        _saved_dimension("dim"),
        is_view=True,
        has_many=True,
    ),
    "SliceBackward0": _view(lambda x, options: _aten.slice(x, *options), _sliced),
    "SplitBackward0": Operator(
        _X_ONLY,
        lambda options, x: x.split(*options),
        _split,
        is_view=True,
        has_many=True,
    ),
}
"""By the name of the node. Results of other operators, such as matrix products,
convolutions and attention, are not rebuilt."""


def settings_of(kind: str, node: Any) -> Any:
    """Return an operator's arguments besides tensors, from its node; None for none."""
    settings = OPERATORS[kind].settings
    return None if settings is None else settings(node)
