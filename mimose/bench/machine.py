"""Describes the machine of a measurement, and makes processes comparable."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import resource
from collections.abc import Mapping
from pathlib import Path

from mimose.bench.device import SIM, is_cpu, kind_of

_VERSIONS = ("torch", "transformers", "mimose")

SLACK_BYTES = 32 * 2**20
"""Bytes that a process may map beyond the budget; see `limit_memory`."""


def worker_environment(threads: int) -> dict[str, str]:
    """Return the environment of each strategy's process.

    Waiting threads must sleep: two that spin beside another busy process can make a
    step many times slower.
    """
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


@functools.cache
def describe_machine(device: str = "cpu") -> Mapping[str, str]:
    """Return the device and the versions, as columns of a row."""
    versions = {name: version_of(name) for name in _VERSIONS}
    return {
        "device": f"cpu: {_processor()}" if is_cpu(device) else _accelerator(device),
        "python": platform.python_version(),
        **versions,
    }


def load_average() -> float:
    """Return the machine's load average over the last minute."""
    return round(os.getloadavg()[0], 2)


def available_bytes() -> int | None:
    """Return the memory that processes can still allocate; None if not known."""
    return kernel_bytes("/proc/meminfo", "MemAvailable")


def kernel_bytes(path: str, name: str) -> int | None:
    """Return an entry of a file of the kernel; None if there is none.

    Args:
        path: A file of lines such as ``VmData: 12 kB``.
        name: The entry.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return None


def limit_memory(budget_bytes: int, resident_bytes: int) -> None:
    """Make allocations fail that would take this process beyond a budget.

    ``RLIMIT_DATA`` limits writable private mappings, but the budget is for resident
    memory. Both grow by a tensor's bytes when it is allocated. So the limit is the
    mapped bytes now, plus the budget minus the resident bytes now, plus `SLACK_BYTES`
    for memory that is mapped and never touched: thread stacks, arenas, a library that
    is loaded late.

    Call it at the begin of each step, because such mappings add up: oneDNN alone maps
    256 KiB for each kernel that it generates for a new shape, and touches 4 KiB of it.
    """
    mapped = kernel_bytes("/proc/self/status", "VmData")
    if mapped is None:
        msg = "/proc/self/status has no VmData: memory can be limited on Linux only"
        raise OSError(msg)
    room = max(0, budget_bytes - resident_bytes)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (mapped + room + SLACK_BYTES, hard))


def version_of(package: str, otherwise: str = "unknown") -> str:
    """Return a package's version; `otherwise` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return otherwise


def _accelerator(device: str) -> str:
    import torch

    if kind_of(device) == SIM:
        return f"{device}: simulated accelerator"
    found = torch.device(device)
    if found.type == "cuda":
        return f"{device}: {torch.cuda.get_device_name(found)}"
    return device


def _processor() -> str:
    cores = os.cpu_count()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2] for line in lines if line.startswith("model name"))
    name = " ".join(next(names, platform.machine()).split())
    return f"{name}, {cores} cores"
