"""Counting the storages that operators make."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

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


def attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """Return the FLOPs of attention; torch's own formula refuses grouped heads to 2.11.

    Args:
        query: (..., heads, queries, width).
        key: (..., heads or groups of them, keys, width).
        value: (..., the same, keys, width of the output).
    """
    widths = query.shape[-1] + value.shape[-1]
    return 2 * query.shape[:-1].numel() * key.shape[-2] * widths


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages made by operators while it is active.

    A storage counts when an operator *made* it: not when the operator's result is a
    view, a detached alias or an in-place result of one of its arguments. It stops
    counting when it is freed. Memory that an operator takes and gives back inside
    itself is not seen.

    Attributes:
        live_bytes: Alive now.
        peak_bytes: The highest total so far.
        flops: Floating-point operations of the products, convolutions and attention
            that ran, by `torch.utils.flop_counter`'s formulas.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self.flops = 0
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
        """Run the operator and count what it made."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(result, (torch.Tensor, list, tuple)):
            self._count(args, kwargs, result)
            if func is to_copy and _is_weight(args[0]):
                self._copies.update(storages_in(result))
        packet = overload_packet(func)
        if packet in _ATTENTION:
            self.flops += attention_flops(*args[:3])
        elif packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=result)
        return result

    def copied_bytes(self) -> int:
        """Sum the bytes alive of copies of weights in another precision."""
        return sum(self._made[key][1] for key in self._copies if key in self._made)

    def bytes_made(self, tree: object) -> int:
        """Sum the bytes of the tracked storages that `tree`'s tensors live in."""
        keys = storages_in(tree)
        return sum(self._made[key][1] for key in keys if key in self._made)

    def _count(self, args: Any, kwargs: Any, result: Any) -> None:
        made = storages_in(result)
        if not made:
            return
        inputs = {**storages_in(args), **storages_in(kwargs)}
        for key, storage in made.items():
            if key not in inputs and key not in self._made:
                self._add(key, storage)

    def _add(self, key: int, storage: torch.UntypedStorage) -> None:
        n_bytes = storage.nbytes()
        if n_bytes == 0:
            return

        def freed(_: object) -> None:
            self._copies.discard(key)
            if self._made.pop(key, None) is not None:
                self.live_bytes -= n_bytes

        self._made[key] = (weakref.ref(storage, freed), n_bytes)
        self.live_bytes += n_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def _is_weight(tensor: torch.Tensor) -> bool:
    """Whether autocast would keep a copy of it: a leaf that is trained, and no view."""
    return tensor.is_leaf and tensor.requires_grad and tensor.dtype == torch.float32
