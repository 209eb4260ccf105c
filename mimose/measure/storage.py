"""Counts the bytes and the FLOPs of a call's operators."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from mimose.cost.prices import HALF, SINGLE, TF32
from mimose.tensors import storages_in
from mimose.torch_private import TorchDispatchMode, overload_packet, to_copy

_ATTENTION = {
    getattr(torch.ops.aten, name)
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
}


_CONVOLUTIONS = {torch.ops.aten.convolution, torch.ops.aten._convolution}


def attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """Return the FLOPs of attention. Torch's formula fails on grouped heads up to 2.11.

    Args:
        query: (..., heads, queries, width).
        key: (..., heads or groups of them, keys, width).
        value: (..., the same, keys, width of the output).
    """
    widths = query.shape[-1] + value.shape[-1]
    return 2 * query.shape[:-1].numel() * key.shape[-2] * widths


def precision_of(dtype: torch.dtype, is_convolution: bool) -> str:
    """Return the precision of a product: see `mimose.cost.prices`.

    Args:
        dtype: Of its operands.
        is_convolution: Torch's flags allow TF32 to convolutions and to others apart.
    """
    if dtype.itemsize <= 2:
        return HALF
    backends: Any = torch.backends
    rules = backends.cudnn.conv if is_convolution else backends.cuda.matmul
    is_short = dtype == torch.float32 and rules.fp32_precision == "tf32"
    return TF32 if is_short else SINGLE


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages made by operators while it is active.

    A storage counts if an operator *made* it: not if the result is a view, a detached
    alias or an in-place result of an argument. It counts until it is freed. Memory that
    an operator allocates and frees inside itself is not counted, nor is what FSDP2
    gathers weights in: a thread of the process group frees it at any time.

    Attributes:
        live_bytes: Bytes alive now.
        peak_bytes: The highest total so far.
        flops: FLOPs of the products, convolutions and attention that ran, by the
            formulas of `torch.utils.flop_counter`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self.flops = 0
        self._by_precision: Counter[str] = Counter()
        # storage identity -> (weak reference, bytes)
        self._made: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._copies: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator and count the storages that it made."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "fsdp":
            for key in storages_in((args, kwargs, result)):
                self._freed(key)
        elif isinstance(result, (torch.Tensor, list, tuple)):
            self._count(args, kwargs, result)
            if func is to_copy and _is_weight(args[0]):
                self._copies.update(storages_in(result))
        packet, flops = overload_packet(func), 0
        if packet in _ATTENTION:
            flops = attention_flops(*args[:3])
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
        if flops:
            self.flops += flops
            precision = precision_of(args[0].dtype, packet in _CONVOLUTIONS)
            self._by_precision[precision] += flops
        return result

    def precision(self) -> str:
        """Return the precision of most FLOPs; "" without any."""
        most = self._by_precision.most_common(1)
        return most[0][0] if most else ""

    def copied_bytes(self) -> int:
        """Sum the live bytes of copies of weights in another precision."""
        return sum(self._made[key][1] for key in self._copies if key in self._made)

    def bytes_made(self, tree: object) -> int:
        """Sum the bytes of the tracked storages of `tree`'s tensors."""
        keys = storages_in(tree)
        return sum(self._made[key][1] for key in keys if key in self._made)

    def _count(self, args: Any, kwargs: Any, result: Any) -> None:
        made = storages_in(result)
        new = made.keys() - self._made.keys()
        if not new:
            return
        for key in new - storages_in((args, kwargs)).keys():
            n_bytes = made[key].nbytes()
            if n_bytes:
                self._add(key, made[key], n_bytes)

    def _add(self, key: int, storage: torch.UntypedStorage, n_bytes: int) -> None:
        self._made[key] = weakref.ref(storage, lambda _: self._freed(key)), n_bytes
        self.live_bytes += n_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _freed(self, key: int) -> None:
        self._copies.discard(key)
        _, n_bytes = self._made.pop(key, (None, 0))
        self.live_bytes -= n_bytes


def _is_weight(tensor: torch.Tensor) -> bool:
    """Whether autocast would keep a copy of it; inputs may be leaves, too."""
    is_single = tensor.dtype == torch.float32
    return is_single and tensor.requires_grad and isinstance(tensor, nn.Parameter)
