"""How to run operators again from nodes of the autograd graph: one entry for each kind.

An entry says where the operator's operands are found: on the node's edges, among what
it has saved, or, for the epsilon of a norm, in the module that owns the norm's weight.
If an operator did not save an operand that no edge leads to, such as the 1 of
``1 + tanh(x)`` or a mask that is added, its result cannot be rebuilt.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.nn import functional
from torch.utils.flop_counter import conv_flop_count

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
    sized: str = ""
    """If it is not saved: where its sizes are, whose product is 0 without it."""
    is_epsilon: bool = False
    """Otherwise, an attribute of the module whose parameter edge 1 leads to."""


@dataclass(frozen=True, slots=True)
class Operator:
    """One kind of node."""

    operands: tuple[Operand, ...] | None
    """None for one from each edge, all of which must exist."""
    run: Callable[..., Any]
    """Called with the settings and the operands."""
    settings: Settings = lambda _: None
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
    is_unseen: bool = False
    """Whether it has an argument that its node does not save."""
    may_lie_otherwise: bool = False
    """Whether its caller chooses the strides of its output."""
    has_witness: bool = False
    """Whether its last operand is one of its outputs, the third, to compare with."""
    flops: Callable[[Any], int] | None = None
    """Of products and convolutions: returns the FLOPs of one run, from its node."""
    positions: str = ""
    """The name under which it saves positions in the planes of its first operand. They
    are held in fewer bytes, not recomputed."""


_aten: Any = torch.ops.aten
_X = (Operand(0, "self"),)
_X_ONLY = (Operand(0),)
_TWO = (Operand(0, "self"), Operand(1, "other"))
_SUM = (Operand(0), Operand(1))


def _saved(*names: str) -> Settings:
    return lambda node: [_signed(saved_value(node, name)) for name in names]


def _signed(value: Any) -> Any:
    """Return a setting; nodes save negative dimensions as unsigned numbers."""
    if isinstance(value, (list, tuple)):
        return [_signed(each) for each in value]
    is_negative = isinstance(value, int) and value > sys.maxsize
    return value - 2 * (sys.maxsize + 1) if is_negative else value


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(output_of(node, 0).shape)


def _dtype(node: Any) -> torch.dtype:
    dtype: torch.dtype = output_of(node, 0).dtype
    return dtype


def _of_one(
    function: Callable[..., Any],
    *names: str,
    operands: tuple[Operand, ...] = _X_ONLY,
    **others: Any,
) -> Operator:
    """Return a function of one operand, then of what its node has saved by name."""
    return Operator(
        operands, lambda options, x: function(x, *options), _saved(*names), **others
    )


_of_saved = partial(_of_one, operands=_X)
_of_view = partial(_of_one, is_view=True)
_view = partial(Operator, _X_ONLY, is_view=True)


def _native_dropout(options: tuple[float], x: Any, mask: Any) -> Any:
    (p,) = options
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


def _convolution_flops(node: Any) -> int:
    is_transposed = saved_value(node, "transposed")
    # Of a transposed one the input counts, which its node may not have saved.
    weight, made = list(saved_value(node, "weight").shape), list(_shape(node))
    given = list(saved_value(node, "input").shape) if is_transposed else made
    return conv_flop_count(given, weight, made, transposed=is_transposed)


def _product_flops(first: str, other: str) -> Callable[[Any], int]:
    """Return what counts the FLOPs of a product, by the names of its matrices."""

    def flops(node: Any) -> int:
        matrix = saved_value(node, first)
        if matrix is not None:
            inner = matrix.shape[-1]
        else:
            inner = saved_value(node, other).shape[-2]
        return 2 * math.prod(_shape(node)) * int(inner)

    return flops


_SETTINGS = "stride", "padding", "dilation", "transposed", "output_padding", "groups"
_AVERAGE = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")
_SCALES = ("scales_h", "scales_w")

POOL = "MaxPool2DWithIndicesBackward0"
POOL_AGAIN = f"{POOL} on an accelerator"
"""There a pool runs as fast as its positions are read, and they need not be held."""

OPERATORS: Mapping[str, Operator] = {
    # ------------------------------------------------------ products, convolutions
    "ConvolutionBackward0": Operator(
        (
            Operand(0, "input"),
            Operand(1, "weight"),
            Operand(2, "bias", "bias_sym_sizes_opt"),
        ),
        lambda options, *own: _aten.convolution(*own, *options),
        _saved(*_SETTINGS),
        is_fresh=True,
        flops=_convolution_flops,
    ),
    "AddmmBackward0": Operator(
        (Operand(0), Operand(1, "mat1"), Operand(2, "mat2")),
        lambda options, *own: torch.addmm(*own, beta=options[0], alpha=options[1]),
        _saved("beta", "alpha"),
        is_fresh=True,
        flops=_product_flops("mat1", "mat2"),
    ),
    "MmBackward0": Operator(
        (Operand(0, "self"), Operand(1, "mat2")),
        lambda _, *own: torch.mm(*own),
        is_fresh=True,
        flops=_product_flops("self", "mat2"),
    ),
    "BmmBackward0": Operator(
        (Operand(0, "self"), Operand(1, "mat2")),
        lambda _, *own: torch.bmm(*own),
        is_fresh=True,
        flops=_product_flops("self", "mat2"),
    ),
    # ------------------------------------------------------------------- pointwise
    "AddBackward0": Operator(
        _SUM,
        lambda options, a, b: torch.add(a, b, alpha=options[0]),
        _saved("alpha"),
        is_fresh=True,
    ),
    "SubBackward0": Operator(
        _SUM, lambda options, a, b: torch.sub(a, b, alpha=options[0]), _saved("alpha")
    ),
    "MulBackward0": Operator(_TWO, lambda _, a, b: torch.mul(a, b)),
    "MulBackward1": _of_one(torch.mul, "other"),
    "DivBackward1": _of_one(torch.div, "other"),
    "NativeDropoutBackward0": Operator(
        (Operand(0), Operand(None, "result1")),
        _native_dropout,
        _saved("p"),
        is_unseen=True,  # whether it trains
    ),
    "DivBackward0": Operator(_TWO, lambda _, a, b: torch.div(a, b)),
    "NegBackward0": _of_one(torch.neg),
    "TanhBackward0": _of_one(torch.tanh),
    "SigmoidBackward0": _of_one(torch.sigmoid),
    "ReluBackward0": _of_one(torch.relu, edit=lambda _, x: torch.relu_(x)),
    "RsqrtBackward0": _of_one(torch.rsqrt),
    "SiluBackward0": _of_saved(functional.silu),
    "GeluBackward0": Operator(
        _X,
        lambda options, x: functional.gelu(x, approximate=options[0]),
        _saved("approximate"),
    ),
    "ExpBackward0": _of_one(torch.exp),
    "SqrtBackward0": _of_one(torch.sqrt),
    "ErfBackward0": _of_saved(torch.erf),
    "MishBackward0": _of_saved(functional.mish),
    "HardswishBackward0": _of_saved(functional.hardswish),
    "HardsigmoidBackward0": _of_saved(functional.hardsigmoid),
    "LeakyReluBackward0": _of_saved(functional.leaky_relu, "negative_slope"),
    "HardtanhBackward0": _of_saved(
        functional.hardtanh,
        "min_val",
        "max_val",
        edit=lambda options, x: functional.hardtanh_(x, *options),
        shown="self",
    ),
    "EluBackward0": _of_saved(_aten.elu, "alpha", "scale", "input_scale"),
    "SoftplusBackward0": _of_saved(functional.softplus, "beta", "threshold"),
    "GluBackward0": _of_saved(functional.glu, "dim"),
    "PowBackward0": _of_saved(torch.pow, "exponent"),
    "ToCopyBackward0": Operator(
        _X_ONLY, lambda dtype, x: x.to(dtype), _dtype, may_lie_otherwise=True
    ),
    "CloneBackward0": Operator(
        _X_ONLY,
        lambda _, x: x.clone(memory_format=torch.contiguous_format),
        may_lie_otherwise=True,
    ),
    "CatBackward0": Operator(
        None, lambda options, *parts: torch.cat(parts, *options), _saved("dim")
    ),
    # ------------------------------------------------------------- norms and sums
    "MeanBackward1": Operator(
        _X_ONLY,
        lambda options, x: x.mean(*options[0], dtype=options[1]),
        lambda node: (_saved("dim", "keepdim")(node), _dtype(node)),
    ),
    "SoftmaxBackward0": _of_one(torch.softmax, "dim"),
    "SafeSoftmaxBackward0": _of_one(_aten._safe_softmax, "dim"),
    "NativeLayerNormBackward0": Operator(
        (
            Operand(0, "input"),
            Operand(1, "weight"),
            Operand(2, "bias"),
            Operand(None, is_epsilon=True),
            Operand(None, "result2"),
        ),
        lambda shape, x, *others: torch.native_layer_norm(x, *shape, *others),
        _saved("normalized_shape"),
        has_many=True,
        has_witness=True,
    ),
    "NativeGroupNormBackward0": Operator(
        (Operand(0, "input"), Operand(1, "weight"), Operand(2)),
        lambda options, *own: torch.native_group_norm(*own, *options),
        _saved("N", "C", "HxW", "group", "eps"),
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
        _saved("training", "eps"),
        has_many=True,
        is_fresh=True,
    ),
    # ---------------------------------------------------------- pools and other sizes
    POOL_AGAIN: Operator(
        _X,
        lambda options, x: _aten.max_pool2d_with_indices(x, *options),
        _saved("kernel_size", "stride", "padding", "dilation", "ceil_mode"),
        has_many=True,
        positions="result1",
    ),
    POOL: Operator(
        (Operand(0, "self"), Operand(None, "result1")), _pooled, positions="result1"
    ),
    "AvgPool2DBackward0": _of_saved(
        functional.avg_pool2d, *_AVERAGE, "divisor_override"
    ),
    "AdaptiveAvgPool2DBackward0": Operator(
        _X, lambda shape, x: functional.adaptive_avg_pool2d(x, shape[-2:]), _shape
    ),
    "UpsampleNearest2DBackward0": _of_one(
        _aten.upsample_nearest2d, "output_size", *_SCALES
    ),
    "UpsampleBilinear2DBackward0": _of_one(
        _aten.upsample_bilinear2d, "output_size", "align_corners", *_SCALES
    ),
    "ConstantPadNdBackward0": _of_one(functional.pad, "pad", is_unseen=True),
    # ---------------------------------------------------------------------- views
    "ViewBackward0": _view(lambda shape, x: x.view(shape), _shape),
    "UnsafeViewBackward0": _view(lambda shape, x: x.view(shape), _shape),
    "ReshapeAliasBackward0": _view(lambda shape, x: x.reshape(shape), _shape),
    "ExpandBackward0": _view(lambda shape, x: x.expand(shape), _shape),
    "TBackward0": _of_view(torch.Tensor.t),
    "TransposeBackward0": _of_view(torch.Tensor.transpose, "dim0", "dim1"),
    "PermuteBackward0": _of_view(torch.Tensor.permute, "dims"),
    "UnsqueezeBackward0": _of_view(torch.Tensor.unsqueeze, "dim"),
    "SqueezeBackward1": _of_view(torch.Tensor.squeeze, "dim"),
    "SelectBackward0": _of_view(torch.Tensor.select, "dim", "index"),
    "UnbindBackward0": _of_view(torch.Tensor.unbind, "dim", has_many=True),
    "SliceBackward0": _of_view(_aten.slice, "dim", "start", "end", "step"),
    "SplitBackward0": _of_view(torch.Tensor.split, "split_size", "dim", has_many=True),
}
"""By the name of the node. Results of other operators, such as attention, are not
rebuilt."""
