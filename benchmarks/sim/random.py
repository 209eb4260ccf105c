"""The random state of the simulated accelerator, as in `torch.cuda`.

A state is a seed and an offset that grows by 4 with every operator that draws, as that
of CUDA's generators does.
"""

from __future__ import annotations

import torch

from benchmarks.sim.indices import Device, index_of, n_devices

__all__ = [
    "get_rng_state",
    "manual_seed",
    "manual_seed_all",
    "set_rng_state",
]

default_generators: tuple[torch.Generator, ...] = ()
"""The devices' own generators; filled by `benchmarks.sim.use`."""


def fill_default_generators() -> None:
    """Fetch the devices' own generators, once they are there."""
    global default_generators
    default_generators = tuple(
        torch.ops.sim.default_generator(index) for index in range(n_devices())
    )


def get_rng_state(device: Device = None) -> torch.Tensor:
    """Return a copy of a device's random state: 16 bytes on the CPU."""
    return default_generators[index_of(device)].get_state()


def set_rng_state(state: torch.Tensor, device: Device = None) -> None:
    """Put a device's random state back."""
    default_generators[index_of(device)].set_state(state)


def manual_seed(seed: int) -> None:
    """Set the seed of the current device."""
    default_generators[index_of()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Set the seed of all devices."""
    for generator in default_generators:
        generator.manual_seed(seed)
