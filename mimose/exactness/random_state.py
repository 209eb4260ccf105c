"""torch's random state, the CPU's and accelerators': saved and put back.

Note: [Places]
A copy of an accelerator's random state takes microseconds. CUDA's generators tell where
they are, by a seed and an offset, and go there, in a fraction of one. Where this place
is all there is to the state it is saved in place of a copy; so no layer has to be known
to draw, or not to draw, before it is recomputed. What a backend's generators can do is
tried out, not believed: there are some whose offset is always zero. Theirs are copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NoReturn, TypeAlias

import torch
from torch import nn

from mimose.exceptions import MimoseError

State: TypeAlias = "tuple[int, int] | torch.Tensor"
"""A place, as seed and offset, or a copy."""

_CPU = torch.default_generator
_WITHOUT = frozenset(("cpu", "meta"))
"""Devices with no random state besides the CPU's."""
_LACKS = (AttributeError, LookupError, TypeError, RuntimeError)
"""What calling a part of a backend raises that is not there."""


class DeviceRandom:
    """The default generator of an accelerator, by its place or by copies.

    Args:
        device: The accelerator.

    Raises:
        MimoseError: Its random state cannot be saved and put back.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator: Any = None
        """Where its place is all there is to the state; see Note: [Places]."""
        try:
            self._module: Any = torch.get_device_module(device)
            before = self.save()
            repeats = self._repeats()
        except _LACKS as error:
            self._refuse(f"{type(error).__name__}: {error}", error)
        if not repeats:
            self._refuse("with its state put back, it draws other numbers")
        try:
            generator = self._module.default_generators[device.index or 0]
            if self._is_all(generator):
                self._generator = generator
        except _LACKS:
            pass
        self._module.set_rng_state(before, device)

    @property
    def is_copied(self) -> bool:
        """Whether the state is saved as a copy."""
        return self._generator is None

    def save(self) -> State:
        """Return the state."""
        if self._generator is not None:
            return _place(self._generator)
        state: torch.Tensor = self._module.get_rng_state(self._device)
        return state

    def is_at(self, state: State) -> bool:
        """Whether it is where `save` has found it."""
        now = self.save()
        if isinstance(now, torch.Tensor) and isinstance(state, torch.Tensor):
            return torch.equal(now, state)
        return now == state

    def put(self, state: State) -> None:
        """Put back what `save` returned."""
        if isinstance(state, torch.Tensor):
            self._module.set_rng_state(state, self._device)
        else:
            _go(self._generator, state)

    def _repeats(self) -> bool:
        """Whether the same numbers come again after the state was put back."""
        before = self.save()
        one = torch.rand(8, device=self._device)
        self.put(before)
        return torch.equal(one, torch.rand(8, device=self._device))

    def _is_all(self, generator: Any) -> bool:
        """Whether a generator's place, gone to again, is the state that was there."""
        torch.rand(1, device=self._device)  # where a seed alone leads does not count
        seed, offset = _place(generator)
        before = self._module.get_rng_state(self._device)
        torch.randn(5, device=self._device)
        generator.manual_seed(seed ^ 1)
        _go(generator, (seed, offset))
        return torch.equal(before, self._module.get_rng_state(self._device))

    def _refuse(self, why: str, error: BaseException | None = None) -> NoReturn:
        msg = (
            f"the random state of {self._device} cannot be saved and put back ({why}): "
            f"layers with dropout would be recomputed with other numbers, and their "
            f"gradients be wrong. Train on another device, or with a version of its "
            f"backend whose module in torch has get_rng_state and set_rng_state"
        )
        raise MimoseError(msg) from error


def _place(generator: Any) -> tuple[int, int]:
    return generator.initial_seed(), generator.get_offset()


def _go(generator: Any, place: tuple[int, int]) -> None:
    seed, offset = place
    if generator.initial_seed() != seed:
        generator.manual_seed(seed)
    generator.set_offset(offset)


_known: dict[torch.device, DeviceRandom] = {}
"""Default generators are the process's, and so is what is known of them."""


def refuse_unsaveable(device: torch.device) -> None:
    """Make sure that a device's random state can be saved and put back.

    Args:
        device: The device; it is tried out anew, and left as it was.

    Raises:
        MimoseError: It cannot.
    """
    if device.type not in _WITHOUT:
        _known[device] = DeviceRandom(device)


def of_device(device: torch.device) -> DeviceRandom:
    """Return the generator of an accelerator."""
    if device not in _known:
        refuse_unsaveable(device)
    return _known[device]


def accelerators(tensors: Iterable[object]) -> tuple[torch.device, ...]:
    """Return the devices of these tensors that have a random state of their own."""
    found: dict[torch.device, None] = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and not tensor.is_cpu:
            found[tensor.device] = None
    return tuple([d for d in found if d.type not in _WITHOUT]) if found else ()


def accelerators_of(module: nn.Module) -> tuple[torch.device, ...]:
    """Return those of a module's parameters and buffers."""
    return accelerators(itertools.chain(module.parameters(), module.buffers()))


class RandomState:
    """The CPU's random state as it is now, and that of some accelerators.

    Args:
        devices: The accelerators.
    """

    __slots__ = ("_cpu", "_others")

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self._cpu = _CPU.get_state()
        self._others: dict[torch.device, State] = {}
        for device in devices:
            self._others[device] = of_device(device).save()

    def restore(self) -> None:
        """Put it back."""
        _CPU.set_state(self._cpu)
        for device, state in self._others.items():
            of_device(device).put(state)

    def is_now(self) -> bool:
        """Whether nothing was drawn since."""
        return torch.equal(self._cpu, _CPU.get_state()) and all(
            of_device(device).is_at(state) for device, state in self._others.items()
        )

    def as_now(self) -> RandomState:
        """Return the present state of the same devices."""
        return RandomState(self._others)
