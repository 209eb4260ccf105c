"""What is set in the process around a forward: as it was, for its recomputation.

Torch's random state, of the CPU and of accelerators; autocast; and the flags that
choose kernels. ``with sdpa_kernel(...)`` around a forward is over when its backward
comes, and another attention kernel would save other tensors.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

from mimose.torch_private import (
    KERNEL_FLAGS,
    choose_attention,
    function_modes,
    matmul_precision,
    set_function_modes,
)

Flags: TypeAlias = "list[Any]"

_CPU = torch.default_generator
_WITHOUT = frozenset(("cpu", "meta"))
"""Devices with no random state besides the CPU's."""

# ------------------------------------------------------------------------ random state


def accelerators(tensors: Iterable[object]) -> tuple[torch.device, ...]:
    """Return the devices of these tensors that have a random state of their own."""
    found: dict[torch.device, None] = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and not tensor.is_cpu:
            found[tensor.device] = None
    return tuple([d for d in found if d.type not in _WITHOUT]) if found else ()


def accelerators_of(module: nn.Module) -> tuple[torch.device, ...]:
    """Return those of a module's parameters and buffers."""
    return accelerators(itertools.chain(module.parameters(), module.buffers()))


class RandomState:
    """The CPU's random state as it is now, and that of some accelerators.

    Args:
        devices: The accelerators.
    """

    __slots__ = ("_cpu", "_others")

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self._cpu = _CPU.get_state()
        self._others: dict[torch.device, torch.Tensor] = {}
        for device in devices:
            module = torch.get_device_module(device)
            self._others[device] = module.get_rng_state(device)

    def restore(self) -> None:
        """Put it back."""
        _CPU.set_state(self._cpu)
        for device, state in self._others.items():
            torch.get_device_module(device).set_rng_state(state, device)

    def as_now(self) -> RandomState:
        """Return the present state of the same devices."""
        return RandomState(self._others)


# ---------------------------------------------------------------------------- autocast


def _casts(kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return what autocast is set to, by kind of device; [] where it is off for all."""
    if not any(map(torch.is_autocast_enabled, kinds)):
        return []
    return [
        {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        for kind in kinds
    ]


# ------------------------------------------------------------------------------- flags

_OPEN: Any = object()
"""In place of a flag that cannot be read; it is left as it is."""


def _set_precision(precision: Any) -> None:
    if precision is not _OPEN:
        torch.set_float32_matmul_precision(precision)


_FLAGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (function_modes, set_function_modes),
    *KERNEL_FLAGS,
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_default_dtype, torch.set_default_dtype),
    # The last one: see `flags_now`.
    (matmul_precision, _set_precision),
)
_READ = tuple(get for get, _ in _FLAGS)


def flags_now() -> Flags:
    """Return what the flags are.

    Precision that was set in torch's newer way cannot be read in the older one.
    """
    try:
        return [read() for read in _READ]
    except RuntimeError:
        return [*(read() for read in _READ[:-1]), _OPEN]


def _set_flags(flags: Flags) -> None:
    for (_, put), is_now, value in zip(_FLAGS, flags_now(), flags, strict=True):
        if is_now != value:
            put(value)


def settle_flags(device: torch.device) -> None:
    """Have torch settle now what it sets itself at a process's first attention.

    On Hopper and Blackwell that puts cuDNN's kernels before flash attention's. A layer
    whose forward read the order before would be recomputed with other kernels.

    Args:
        device: Where attention will run.
    """
    if device.type == "cuda":
        choose_attention(torch.empty(1, 1, 1, 8, dtype=torch.half, device=device))


# -------------------------------------------------------------------------------- both


class Context:
    """What is set around a call that begins now.

    Args:
        devices: Accelerators that the call may draw on.
    """

    __slots__ = ("_casts", "_flags", "_kinds", "_random")

    def __init__(self, devices: tuple[torch.device, ...]) -> None:
        self._random = RandomState(devices)
        self._kinds: tuple[str, ...] = ("cpu",)
        if devices:
            self._kinds = (*{device.type: None for device in devices}, "cpu")
        self._casts = _casts(self._kinds)
        self._flags = flags_now()

    def draw_again(self) -> None:
        """Have random numbers be those that the call has drawn."""
        self._random.restore()

    @contextlib.contextmanager
    def as_then(self) -> Iterator[None]:
        """Set all of it as it was; put back, afterwards, what is set now."""
        random, flags = self._random.as_now(), flags_now()
        casts = self._casts
        if not casts and _casts(self._kinds):
            casts = [{"device_type": k, "enabled": False} for k in self._kinds]
        try:
            if flags != self._flags:
                _set_flags(self._flags)
            with contextlib.ExitStack() as stack:
                for cast in casts:
                    stack.enter_context(torch.autocast(**cast))
                yield
        finally:
            random.restore()
            if flags_now() != flags:
                _set_flags(flags)
