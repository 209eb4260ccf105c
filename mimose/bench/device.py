"""Devices by the names that torch gives them: what it takes to use one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mimose.usage import UsageError

SIM = "sim"
"""The simulated accelerator, which is built on its first use."""


def kind_of(device: str) -> str:
    """Return a device's kind: ``"cuda"`` of ``"cuda:1"``, and of a row's own words."""
    return device.partition(":")[0]


def is_cpu(device: str) -> bool:
    """Tell a CPU, as torch or a row writes it, from an accelerator."""
    return kind_of(device) == "cpu"


def segments_environment(expandable: bool) -> dict[str, str]:
    """Return the variables by which torch's allocator takes one kind of segments."""
    setting = f"expandable_segments:{expandable}"
    return {
        "PYTORCH_ALLOC_CONF": setting,
        "PYTORCH_CUDA_ALLOC_CONF": setting,  # torch before 2.9
    }


def environment_of(task: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that a child's allocator reads when torch is imported.

    They follow from the task's ``"device"`` and ``"is_expandable"``, if it has these.
    """
    if not task.get("is_expandable") or kind_of(task["device"]) == SIM:
        return {}
    return segments_environment(True)


def prepare(task: Mapping[str, Any]) -> None:
    """Make a task's device known to torch, before anything is allocated.

    Args:
        task: May name a ``"device"``, and say whether it ``"is_expandable"``.

    Raises:
        ValueError: A CPU has no segments that could grow.
        SimUnavailableError: The simulated accelerator cannot be built here.
        ModuleNotFoundError: It is not part of an installed wheel.
    """
    name = task.get("device", "cpu")
    is_expandable = task.get("is_expandable", False)
    if is_expandable and is_cpu(name):
        msg = "expandable segments are an accelerator's: leave --expandable out"
        raise ValueError(msg)
    if kind_of(name) == SIM:
        import torch

        from benchmarks import sim

        sim.use()
        if is_expandable:
            torch.get_device_module(SIM).set_expandable_segments(True)


def need_device(device: str) -> None:
    """Make sure that torch has a device here.

    Args:
        device: As a command line's ``--device`` names it; `prepare` has it then.

    Raises:
        UsageError: It has not.
    """
    import torch

    try:
        prepare({"device": device})
    except (RuntimeError, ModuleNotFoundError) as error:
        msg = f"--device {device}: the simulated accelerator cannot be had: {error}"
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
