"""What is installed, what the device is, and which private parts of torch are there."""

from __future__ import annotations

import os
import pkgutil
import platform
from collections.abc import Iterator

import torch

from benchmarks.check.line import Line, impossible, judged, told
from mimose.bench.machine import version_of

_LEAST_TORCH, _LEAST_PYTHON = (2, 9), (3, 10)
_NEEDED = ("numpy", "scipy", "scikit-learn", "cachetools")
_FURTHER = ("transformers", "accelerate", "lightning", "triton", "pytest")
_SETTINGS = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
)
_PRIVATE = {
    "_C._accelerator_getDeviceStats": "the public statistics, flattened",
    "_C._accelerator_getAllocatorSettings": "the environment's settings alone",
    "_C._storage_Use_Count": "none: no step can be measured",
    "_C._current_graph_task_id": "none: optimizer steps inside backward are not seen",
    "_C._autograd._push_saved_tensors_default_hooks": "none: compiled layers",
    "_C._dynamo.eval_frame._set_lru_cache": "the cache of compiled code as it is",
    "_subclasses.fake_tensor.FakeTensorMode": "none: FLOPs of compiled layers",
    "accelerator.get_memory_info": "the device module's mem_get_info",
}
"""Private parts of torch (one is public, but new), and what is used without them."""


def software(device: torch.device) -> Iterator[Line]:
    """Name versions."""
    del device
    number = tuple(int(part) for part in torch.__version__.split(".")[:2])
    python = platform.python_version()
    yield judged("torch", "2.9 or newer", torch.__version__, number >= _LEAST_TORCH)
    found = tuple(int(part) for part in python.split(".")[:2])
    yield judged("python", "3.10 or newer", python, found >= _LEAST_PYTHON)
    for name in _NEEDED:
        version = version_of(name, "missing")
        yield judged(name, "installed", version, version != "missing")
    others = (f"{name} {version_of(name, 'missing')}" for name in _FURTHER)
    yield told("others", ", ".join(others))


def hardware(device: torch.device) -> Iterator[Line]:
    """Name the device, and what drives it."""
    module = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    yield told("device", module.get_device_name(device))
    yield told("memory", f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    yield told("host", f"{platform.platform()}, {os.cpu_count()} cores")
    if device.type != "cuda":
        yield impossible("driver", f"{device.type} has none")
        return
    # Private, for nothing public tells the driver's version without nvidia-smi.
    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: "unknown")()
    yield told(
        "driver", f"supports CUDA {driver}; torch is built for {torch.version.cuda}"
    )
    yield told("cuDNN", torch.backends.cudnn.version())  # type: ignore[no-untyped-call]


def settings(device: torch.device) -> Iterator[Line]:
    """Tell how the allocator is set up."""
    told_by = {name: os.environ.get(name, "unset") for name in _SETTINGS}
    yield told("settings", ", ".join(f"{n}={value}" for n, value in told_by.items()))
    if device.type != "cuda":
        yield impossible("allocator", f"{device.type} has one only")
        return
    backend = torch.cuda.get_allocator_backend()
    yield judged("allocator", "native", backend, backend == "native")


def private_parts(device: torch.device) -> Iterator[Line]:
    """Tell which private parts of torch are there."""
    del device
    for path, instead in _PRIVATE.items():
        is_there = _is_there(path)
        expected = f"there; else {instead}"
        yield judged(
            f"torch.{path}", expected, "there" if is_there else "missing", is_there
        )


CHECKS = (software, hardware, settings, private_parts)


def _is_there(path: str) -> bool:
    try:
        pkgutil.resolve_name(f"torch.{path}")
    except (ImportError, AttributeError):
        return False
    return True
