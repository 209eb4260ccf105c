"""Making the simulated accelerator a device of torch's, called ``sim``."""

from __future__ import annotations

import types
from typing import Any

import torch

from mimose.bench.sim.build import build

N_DEVICES = 2

_module: types.ModuleType | None = None


def use() -> Any:
    """Load the simulated accelerator into this process; return its module.

    From then on it is the process's accelerator, as ``torch.accelerator`` sees it.
    Harmless twice.

    Raises:
        SimUnavailableError: It cannot be built here.
    """
    global _module
    if _module is None:
        torch.ops.load_library(str(build()))
        torch.utils.rename_privateuse1_backend("sim")
        torch.ops.sim.start()
        _module = _make_module()
        torch._register_device_module("sim", _module)
    return _module


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return int(torch.ops.sim.get_device()) if index is None else index


class _Device:
    """Makes another of the devices current for a while."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = torch.ops.sim.get_device()
        torch.ops.sim.set_device(self._index)

    def __exit__(self, *_: object) -> None:
        torch.ops.sim.set_device(self._before)


def _make_module() -> types.ModuleType:
    ops = torch.ops.sim
    module = types.ModuleType("torch.sim")
    module.__dict__.update(
        device=_Device,
        _initialized=True,
        _is_in_bad_fork=lambda: False,
        is_available=lambda: True,
        is_initialized=lambda: True,
        _lazy_init=lambda: None,
        device_count=lambda: N_DEVICES,
        current_device=lambda: ops.get_device(),
        set_device=lambda device: ops.set_device(_index(device)),
        synchronize=lambda device=None: None,
        get_rng_state=lambda device=None: ops.get_rng_state(_index(device)),
        set_rng_state=lambda state, device=None: ops.set_rng_state(
            _index(device), state
        ),
        manual_seed=lambda seed: ops.manual_seed(_index(), seed),
        manual_seed_all=lambda seed: [
            ops.manual_seed(index, seed) for index in range(N_DEVICES)
        ],
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        set_limit=lambda n_bytes, device=None: ops.set_limit(_index(device), n_bytes),
    )
    return module
