"""Lossy actions: saved tensors in fewer bits, or averaged over neighbors.

A mode that sees each call of a function knows which operation saves a tensor, and so
for what its backward reads it. If the gradient is smooth in a saved value, a small
error of the value makes a small error of the gradient: such operations are listed here.
What other operations save is not changed, because a small error may make a large one:
results and sums of attention, for example. The backward of a ReLU only asks whether its
result is above zero, and that of a max-pool only for the sizes of its input. These take
one bit an element, or nothing, and stay exact.

Sources: `pool` averages inputs of convolutions and linear layers, as in
"Backpropagation with Compressed Activations" (Barley and Fröning, arXiv:2409.11902).
`quantize` holds saved tensors in few bits, as ActNN (Chen et al., ICML 2021) and GACT
(Liu et al., ICML 2022) do.
"""

from __future__ import annotations

import enum
import itertools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from mimose.actions.flags import pack_flags, unpack_flags
from mimose.actions.host import Packed
from mimose.planners import ActionSpec
from mimose.planners.actions import POOL, POOL_4, QUANTIZE, QUANTIZE_4
from mimose.torch_private import storage_key

_DTYPES = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))


class Role(enum.Enum):
    """What the backward needs of a saved tensor."""

    WEIGHT = enum.auto()
    """Its values, but only for the gradient of the weight that it was multiplied
    with."""
    VALUE = enum.auto()
    """Its values, in which the gradient is smooth."""
    SIGN = enum.auto()
    """Only whether its elements are above zero: the result of a ReLU."""
    SHAPE = enum.auto()
    """Only its sizes: the input of a max-pool."""


# ------------------------------------------------------------- who saves a tensor now

_PRODUCTS = frozenset(("conv1d", "conv2d", "conv3d", "linear"))
"""Functions that multiply their first argument with a weight."""
_NORMS = frozenset(("batch_norm", "group_norm", "layer_norm", "rms_norm"))
_OF_ARGUMENTS = {
    **dict.fromkeys(("matmul", "__matmul__", "mm", "bmm"), 2),
    **dict.fromkeys(("mul", "__mul__", "__rmul__", "mul_", "__imul__"), 2),
    **dict.fromkeys(("div", "__truediv__", "square"), 1),
    **dict.fromkeys(("gelu", "silu", "elu", "mish", "softplus", "glu", "erf"), 1),
    "scaled_dot_product_attention": 3,
}
"""The number of first arguments that are saved, in which the gradient is smooth."""
_OF_RESULTS = frozenset(("sigmoid", "tanh", "softmax"))
_POWERS = frozenset(("pow", "__pow__"))


class Operation(NamedTuple):
    """A running call of a function."""

    name: str
    args: Sequence[Any]

    def role(self, tensor: torch.Tensor) -> Role | None:
        """Return the role of a tensor that it saves; None if it must stay exact."""
        name, args = self.name, self.args
        if name == "addmm":
            return Operation("linear", args[1:]).role(tensor)
        if name in ("relu", "relu_"):
            return Role.SIGN
        if name in _OF_RESULTS:
            return Role.VALUE
        if not args or not isinstance(args[0], torch.Tensor):
            return None
        if name == "max_pool2d":
            return Role.SHAPE if _is_same(tensor, args[0]) else None
        if name in _PRODUCTS or name in _NORMS:
            return self._operand_role(tensor)
        if name in _POWERS:  # lower ones are steep near zero
            is_smooth = isinstance(args[1], (int, float)) and args[1] >= 1
            return Role.VALUE if is_smooth and _is_same(tensor, args[0]) else None
        own = args[: _OF_ARGUMENTS.get(name, 0)]
        return Role.VALUE if any(_is_same(tensor, each) for each in own) else None

    def _operand_role(self, tensor: torch.Tensor) -> Role | None:
        """Return the role of the first argument, which autocast may have cast."""
        given, *others = self.args
        weights = [each for each in others if isinstance(each, torch.Tensor)]
        if isinstance(given, nn.Parameter):
            return None
        if not _is_same(tensor, given):
            is_alike = tensor.numel() == given.numel()
            is_alike = is_alike and tensor.shape[-1:] == given.shape[-1:]
            is_cast = is_alike and tensor.dtype != given.dtype
            if not is_cast or any(each.numel() == given.numel() for each in weights):
                return None
        is_product = self.name in _PRODUCTS and isinstance(self.args[1], nn.Parameter)
        return Role.WEIGHT if is_product else Role.VALUE


def _is_same(tensor: torch.Tensor, given: object) -> bool:
    """Whether a tensor shares the storage of another one that is not a weight."""
    if not isinstance(given, torch.Tensor) or isinstance(given, nn.Parameter):
        return False
    one, other = tensor.untyped_storage(), given.untyped_storage()
    return storage_key(one) == storage_key(other)


# ------------------------------------------------------------------------- the codecs


def _packed(
    tensor: torch.Tensor, held: Sequence[torch.Tensor], fill: Callable[..., None]
) -> Packed:
    """Return a storage in fewer bytes.

    Args:
        tensor: A tensor in the storage.
        held: The tensors that are held in its place.
        fill: Fills the (n,) elements of a storage from these.
    """
    like, n_elements = tensor.new_empty(0), _elements(tensor).numel()

    def unpack() -> torch.UntypedStorage:
        elements = like.new_empty(n_elements)
        fill(elements, *held)
        return elements.untyped_storage()

    n_bytes = sum(each.untyped_storage().nbytes() for each in held)
    return Packed(n_bytes, 0, unpack)


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return (n,) all elements of a tensor's storage, in their order."""
    return tensor.new_empty(0).set_(tensor.untyped_storage())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has each element of its storage once, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return tensor.nbytes == tensor.untyped_storage().nbytes()


def _pack_signs(tensor: torch.Tensor) -> torch.Tensor:
    """Return a bit for each element: whether a ReLU passes its gradient on.

    It does so also if its result is NaN.
    """
    return pack_flags((_elements(tensor) <= 0).logical_not_())


def _fill_signs(elements: torch.Tensor, signs: torch.Tensor) -> None:
    elements.copy_(unpack_flags(signs, elements.numel()))


class _CallCodec(TorchFunctionMode):
    """Packs what one call saves, by its role: a `Codec`.

    Args:
        values: Packs values with errors.
    """

    def __init__(self, values: Quantize | Pool) -> None:
        super().__init__()
        self._values = values
        self._operation = Operation("", ())
        self._signs: dict[int, tuple[weakref.ref[Any], torch.Tensor]] = {}
        """Signs by storage of a ReLU's result."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function, and record it while it runs."""
        outer = self._operation
        self._operation = Operation(getattr(func, "__name__", ""), args)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._operation = outer

    def role(self, tensor: torch.Tensor) -> tuple[Role, torch.dtype] | None:
        """Return the role and dtype of a saved tensor; None if it stays."""
        role = self._operation.role(tensor)
        if role is None or tensor.dtype not in _DTYPES:
            return None
        is_exact = role in (Role.SIGN, Role.SHAPE)
        is_taken = _is_dense(tensor) if is_exact else role in self._values.roles
        return (role, tensor.dtype) if is_taken else None

    def pack(
        self, tensor: torch.Tensor, role: tuple[Role, torch.dtype]
    ) -> Packed | None:
        """Pack a tensor's storage for its role."""
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if role[0] is Role.SHAPE:
            return _packed(tensor, (), lambda elements: None)  # no backward reads it
        if role[0] is Role.SIGN:
            signs = _pack_signs(tensor)
            self._signs[key] = weakref.ref(storage), signs
            return _packed(tensor, (signs,), _fill_signs)
        ref, known = self._signs.get(key, (None, None))
        own = known if ref is not None and ref() is storage else None
        return self._values.pack(tensor, self._operation, own)


# ----------------------------------------------------------------------- quantization

_GROUP = 128
"""Number of elements that share a minimum and a step."""
_AT_ONCE = 2**13
"""Number of groups that are processed together."""


class Quantize:
    """Holds values in few bits, rounded without bias.

    Neighbouring elements share a minimum and a step. Each is held as a number of steps,
    rounded up or down at random so that its mean is exact. So the errors of many
    elements cancel in a gradient that is linear in them. It draws from its own
    generators, so dropout and other users of torch's generators are not affected.

    Args:
        bits: 8 or 4.
    """

    roles = frozenset((Role.WEIGHT, Role.VALUE))

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._generators: dict[torch.device, torch.Generator] = {}

    def pack(
        self, tensor: torch.Tensor, operation: Operation, signs: torch.Tensor | None
    ) -> Packed | None:
        """Pack a tensor's storage, if all its values are finite: see `Pool.pack`."""
        del operation, signs
        elements = _elements(tensor)
        short = -elements.numel() % _GROUP
        groups = functional.pad(elements, (0, short)) if short else elements
        groups = groups.view(-1, _GROUP)
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        least, most = groups.amin(1, True).to(dtype), groups.amax(1, True).to(dtype)
        # No step is zero or subnormal.
        steps = (most - least).div_(2**self._bits - 1)
        steps.clamp_(min=torch.finfo(dtype).tiny)
        if not bool(steps.isfinite().all()):
            return None
        ranges = torch.stack((least, steps))
        parts = zip(_split(groups), _split(ranges, 1), strict=True)
        codes = torch.cat([self._codes(*part) for part in parts])
        return _packed(tensor, (ranges, codes), self._fill)

    def _codes(self, part: torch.Tensor, ranges: torch.Tensor) -> torch.Tensor:
        """Return (groups, bytes) the number of steps above the minimum."""
        least, steps = ranges
        above = part.to(least.dtype).sub(least).div_(steps)
        device = part.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(0)
        draws = torch.empty_like(above).uniform_(generator=self._generators[device])
        above.add_(draws).floor_().clamp_(0, 2**self._bits - 1)
        code = above.to(torch.uint8)
        if self._bits == 8:
            return code
        return code[:, 1::2].bitwise_left_shift(4).bitwise_or_(code[:, ::2])

    def _fill(
        self, elements: torch.Tensor, ranges: torch.Tensor, codes: torch.Tensor
    ) -> None:
        parts = zip(_split(codes), _split(ranges, 1), strict=True)
        for at, (code, (least, steps)) in enumerate(parts):
            if self._bits == 4:
                halves = code.bitwise_and(15), code.bitwise_right_shift(4)
                code = torch.stack(halves, 2).flatten(1)
            level = code.to(least.dtype).mul_(steps).add_(least).view(-1)
            target = elements[at * _AT_ONCE * _GROUP :][: level.numel()]
            target.copy_(level[: target.numel()])


def _split(groups: torch.Tensor, dim: int = 0) -> Sequence[torch.Tensor]:
    parts: Sequence[torch.Tensor] = torch.split(groups, _AT_ONCE, dim)
    return parts


# ---------------------------------------------------------------------------- pooling


class Pool:
    """Holds means over neighbouring places of what only a weight's gradient reads.

    The gradient of a layer's input needs the weight and not the input, so it stays
    exact. The gradient of the weight sums products over all places, and neighbouring
    places are alike. If a ReLU's backward reads the same storage, zeros are restored,
    and a block's mean is over its other elements, so that its sum is unchanged.

    Args:
        factor: The length of a block in each dimension of places: height and width of
            images, the sequence of texts.
    """

    roles = frozenset((Role.WEIGHT,))

    def __init__(self, factor: int) -> None:
        self._factor = factor

    def pack(
        self, tensor: torch.Tensor, operation: Operation, signs: torch.Tensor | None
    ) -> Packed | None:
        """Pack a tensor's storage, if the tensor fills it and has several places.

        Args:
            tensor: The saved tensor.
            operation: The operation that saves it.
            signs: A bit for each element if it is a ReLU's result; otherwise None.

        Returns:
            None if it must stay.
        """
        found = _planes(tensor, operation)
        if found is None or not _is_dense(tensor):
            return None
        planes, dims = found
        block = [self._factor if dim in dims else 1 for dim in (2, 3)]
        if max(planes.shape[dim] for dim in dims) < 2:
            return None
        means = _means(planes, block)
        if signs is not None:
            counted = _means((planes > 0).to(planes.dtype), block)
            means.div_(counted.clamp_(min=1 / math.prod(block)))
        looks = planes.shape, planes.stride()

        def fill(
            elements: torch.Tensor, means: torch.Tensor, *signs: torch.Tensor
        ) -> None:
            whole = elements.as_strided(*looks)
            for row, column in itertools.product(*map(range, block)):
                target = whole[:, :, row :: block[0], column :: block[1]]
                height, width = target.shape[2:]
                target.copy_(means[:, :, :height, :width])
            for each in signs:
                flags = unpack_flags(each, elements.numel())
                elements.masked_fill_(flags.logical_not(), 0)

        held = (means,) if signs is None else (means, signs)
        return _packed(tensor, held, fill)


def _planes(
    tensor: torch.Tensor, operation: Operation
) -> tuple[torch.Tensor, Sequence[int]] | None:
    """Return (samples, channels, rows, columns) an operand, and the dims of places."""
    name, dims = operation.name, operation.args[0].dim()
    if name == "conv2d" and dims == 4:
        return tensor, (2, 3)
    if name == "conv1d" and dims == 3:
        return tensor.unsqueeze(2), (3,)
    if name != "linear" or dims != 3 or not tensor.is_contiguous():
        return None
    return tensor.view(operation.args[0].shape).unsqueeze(1), (2,)


def _means(planes: torch.Tensor, block: list[int]) -> torch.Tensor:
    """Return the means of blocks; those at the edge may be smaller."""
    return functional.avg_pool2d(planes, block, ceil_mode=True, count_include_pad=False)


CODECS: Mapping[ActionSpec, Callable[[], Callable[[], _CallCodec]]] = {
    POOL: lambda: partial(_CallCodec, Pool(2)),
    POOL_4: lambda: partial(_CallCodec, Pool(4)),
    QUANTIZE: lambda: partial(_CallCodec, Quantize(8)),
    QUANTIZE_4: lambda: partial(_CallCodec, Quantize(4)),
}
"""What makes the codecs of a session's calls, by lossy action."""
