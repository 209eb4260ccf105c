"""A child's device: what it takes to use it, as a task asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mimose.bench.machine import prepare_device

SIM = "sim"
"""The simulated accelerator."""


def is_cpu(device: str) -> bool:
    """Tell a CPU, as torch or a row writes it, from an accelerator."""
    return device.partition(":")[0] == "cpu"


def environment(task: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that a child's allocator reads when torch is imported.

    Args:
        task: With its ``"device"``, and whether it ``"is_expandable"``.
    """
    if not task.get("is_expandable") or task["device"].partition(":")[0] == SIM:
        return {}
    return {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",  # torch before 2.9
    }


def prepare(task: Mapping[str, Any]) -> None:
    """Make a task's device ready, before anything is allocated.

    Args:
        task: May name a ``"device"``, and say whether it ``"is_expandable"``.

    Raises:
        ValueError: A CPU has no segments that could grow.
    """
    name = task.get("device", "cpu")
    prepare_device(name)
    if task.get("is_expandable"):
        if is_cpu(name):
            msg = "expandable segments are an accelerator's: leave --expandable out"
            raise ValueError(msg)
        if name.partition(":")[0] == SIM:
            torch.get_device_module(SIM).set_expandable_segments(True)
