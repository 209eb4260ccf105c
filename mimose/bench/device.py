"""Prepares devices, which are given by torch's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mimose.bench.usage import UsageError

SIM = "sim"
"""The simulated accelerator, which is built on its first use."""


def kind_of(device: str) -> str:
    """Return a device's type, such as ``"cuda"`` for ``"cuda:1"``, also for a row's."""
    return device.partition(":")[0]


def is_cpu(device: str) -> bool:
    """Whether a device, as torch or a row writes it, is a CPU."""
    return kind_of(device) == "cpu"


def segments_environment(expandable: bool) -> dict[str, str]:
    """Return variables that turn expandable segments of the allocator on or off."""
    setting = f"expandable_segments:{expandable}"
    return {
        "PYTORCH_ALLOC_CONF": setting,
        "PYTORCH_CUDA_ALLOC_CONF": setting,  # torch before 2.9
    }


def environment_of(task: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that a child's allocator reads when torch is imported.

    They follow from the task's ``"is_expandable"``, if it has that. A session reads
    them, too.
    """
    return segments_environment(True) if task.get("is_expandable") else {}


def prepare(task: Mapping[str, Any]) -> None:
    """Register a task's device with torch, before anything is allocated.

    Args:
        task: May have a ``"device"`` and ``"is_expandable"``.

    Raises:
        ValueError: Expandable segments were asked for on a CPU.
        SimUnavailableError: The simulated device cannot be compiled here.
    """
    name = task.get("device", "cpu")
    is_expandable = task.get("is_expandable", False)
    if is_expandable and is_cpu(name):
        msg = "expandable segments are an accelerator's: leave --expandable out"
        raise ValueError(msg)
    if kind_of(name) == SIM:
        import torch

        from mimose import sim

        sim.use()
        if is_expandable:
            torch.get_device_module(SIM).set_expandable_segments(True)


def need_device(device: str) -> None:
    """Check that torch has a device here, and register it.

    Args:
        device: The value of ``--device``.

    Raises:
        UsageError: It has not.
    """
    import torch

    try:
        prepare({"device": device})
    except RuntimeError as error:
        msg = f"--device {device}: {error}"
        raise UsageError(msg) from error
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        msg = f"--device {device}: torch knows no such device"
        raise UsageError(msg) from error
    found = torch.accelerator.current_accelerator()
    n_found = torch.accelerator.device_count() if found and found.type == kind else 0
    if kind != "cpu" and (torch.device(device).index or 0) >= n_found:
        msg = f"--device {device}: torch sees {n_found or 'none'} here"
        raise UsageError(msg)
