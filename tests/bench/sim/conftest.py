"""Handing out device memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch


@pytest.fixture
def take() -> Callable[..., torch.Tensor]:
    """Allocate so many bytes on a simulated device."""

    def allocate(n_bytes: float, device: str = "sim:0") -> torch.Tensor:
        return torch.empty(int(n_bytes), dtype=torch.uint8, device=device)

    return allocate


@pytest.fixture
def numbers() -> Callable[..., dict[str, int]]:
    """Read current numbers of a device's allocator by their names, over all pools."""

    def read(*names: str, device: int = 0) -> dict[str, int]:
        stats = torch.accelerator.memory_stats(device)
        return {name: stats[f"{name}.all.current"] for name in names}

    return read
