"""Registers the simulated accelerator as a torch device called ``sim``."""

from __future__ import annotations

from types import ModuleType

import torch
from torch.utils import backend_registration

from mimose.sim import device
from mimose.sim.build import build
from mimose.torch_private import register_device_module

_loaded = False


def use() -> ModuleType:
    """Load the simulated accelerator into this process; return ``torch.sim``.

    From then on it is the process's accelerator, as ``torch.accelerator`` sees it, and
    the CPU's allocator is wrapped. Harmless twice. Its allocator is set up as
    ``PYTORCH_ALLOC_CONF`` says: ``expandable_segments``,
    ``garbage_collection_threshold`` and ``max_split_size_mb``.

    Raises:
        SimUnavailableError: It cannot be built here.
    """
    global _loaded
    if not _loaded:
        torch.ops.load_library(str(build()))  # type: ignore[no-untyped-call]
        backend_registration.rename_privateuse1_backend("sim")
        torch.ops.sim.start()
        device.fill_default_generators()
        register_device_module("sim", device)
        backend_registration.generate_methods_for_privateuse1_backend()
        _loaded = True
    return device
