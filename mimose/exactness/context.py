"""The random state, autocast and flags around a forward, for its recomputation.

A recomputation needs torch's random state (of the CPU and of accelerators), autocast,
and the flags that choose kernels as its forward had them. For example,
``with sdpa_kernel(...)`` around a forward has ended when the backward runs, and another
attention kernel would save other tensors.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from mimose.torch_private import (
    KERNEL_FLAGS,
    choose_attention,
    function_modes,
    matmul_precision,
    set_function_modes,
)

_CPU = torch.default_generator
_WITHOUT = frozenset(("cpu", "meta"))
"""Device types without a random state beyond the CPU's."""


def accelerators(tensors: Iterable[object]) -> tuple[torch.device, ...]:
    """Return the devices of these tensors that have their own random state."""
    found = dict.fromkeys(t.device for t in tensors if isinstance(t, torch.Tensor))
    return tuple([device for device in found if device.type not in _WITHOUT])


def accelerators_of(module: nn.Module) -> tuple[torch.device, ...]:
    """Return the accelerators of a module's parameters and buffers."""
    return accelerators(itertools.chain(module.parameters(), module.buffers()))


def saved_random_state(devices: Iterable[torch.device] = ()) -> Callable[[], None]:
    """Save the random state of the CPU and of some accelerators.

    Args:
        devices: The accelerators.

    Returns:
        A function that restores it.
    """
    cpu = _CPU.get_state()
    others = []
    for device in devices:
        state = torch.get_device_module(device).get_rng_state(device)
        others.append((device, state))

    def restore() -> None:
        _CPU.set_state(cpu)
        for device, state in others:
            torch.get_device_module(device).set_rng_state(state, device)

    return restore


def _casts(kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the autocast settings by device type."""
    return [
        {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        for kind in kinds
    ]


_OPEN: Any = object()
"""Stands for a flag that cannot be read, and so stays unchanged."""


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


def flags_now() -> list[Any]:
    """Return the values of all flags.

    A precision that was set through torch's newer API cannot be read through the older.
    """
    try:
        return [read() for read in _READ]
    except RuntimeError:
        return [*(read() for read in _READ[:-1]), _OPEN]


def _set_flags(flags: list[Any]) -> None:
    for (_, put), is_now, value in zip(_FLAGS, flags_now(), flags, strict=True):
        if is_now != value:
            put(value)


def settle_flags(device: torch.device) -> None:
    """Make torch set now the flags that it sets at a process's first attention.

    On Hopper and Blackwell, torch then prefers cuDNN's kernels to flash attention's. If
    a layer's forward read the order before, its recomputation would use other kernels.

    Args:
        device: Where attention will run.
    """
    if device.type == "cuda":
        choose_attention(torch.empty(1, 1, 1, 8, dtype=torch.half, device=device))


class Context:
    """The random state, autocast and flags around a call that begins now.

    Args:
        devices: Accelerators from which the call may draw random numbers.

    Attributes:
        draw_again: Restores the random state, so that the same numbers are drawn.
    """

    __slots__ = ("_casts", "_devices", "_flags", "_kinds", "draw_again")

    def __init__(self, devices: tuple[torch.device, ...]) -> None:
        self._devices = devices
        self.draw_again = saved_random_state(devices)
        self._kinds = (*{device.type: None for device in devices}, "cpu")
        self._casts = _casts(self._kinds)
        self._flags = flags_now()

    @contextlib.contextmanager
    def as_then(self) -> Iterator[None]:
        """Restore all of it; put back today's settings afterwards."""
        restore_random, flags = saved_random_state(self._devices), flags_now()
        now = _casts(self._kinds)
        try:
            if flags != self._flags:
                _set_flags(self._flags)
            with contextlib.ExitStack() as stack:
                for cast, today in zip(self._casts, now, strict=True):
                    if cast != today:
                        stack.enter_context(torch.autocast(**cast))
                yield
        finally:
            restore_random()
            if flags_now() != flags:
                _set_flags(flags)
