"""Values in 8 or 4 bits, rounded so that they are right on average.

Elements that lie together share their least and a step; each is held as a number of
steps, rounded up with the probability of what lies above the step below. So a gradient
that is linear in them is right on average, and errors of many steps cancel.

Note: [Levels as they come out]
Narrow precisions round what comes out once more, and always the same way: that would
not cancel. So the chance of going up is taken between the two levels as they will come
out, which is what makes their average the value itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from mimose.actions.packing.base import Packed, Role, SavedStorage
from mimose.actions.packing.bits import (
    give_signs,
    pack_halves,
    signs_of,
    unpack_halves,
)
from mimose.actions.packing.memory import (
    Form,
    flat,
    is_alike,
    own_bytes,
    slices,
)

GROUP = 128
"""Elements that share a least and a step."""
_LEAST_BYTES = 4096
"""Less is not worth it."""
_VALUES = frozenset((Role.VALUE, Role.CONVOLUTION_WEIGHT, Role.LINEAR_WEIGHT))
_NARROW = frozenset((torch.bfloat16, torch.float16))
_DTYPES = _NARROW | {torch.float32, torch.float64}
_GROUPS_AT_ONCE = 2**11
_DRAWS = 4
"""Random numbers of 16 bits in a word of the generator's."""


class Quantize:
    """Holds values in few bits, right on average.

    Its random numbers are its own: dropout and whatever else draws from torch's
    generators is not disturbed.

    Args:
        bits: 8 or 4.
        seed: Settles what is rounded up; equal runs round alike.

    Raises:
        ValueError: ``bits`` is another number.
    """

    is_exact = False

    def __init__(self, bits: int, seed: int = 0) -> None:
        if bits not in (4, 8):
            msg = f"values are held in 8 or 4 bits, got bits={bits}"
            raise ValueError(msg)
        self.bits = bits
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def takes(self, saved: SavedStorage) -> bool:
        """Whether its values are read, and may be a little off."""
        roles = {reader.role for reader in saved.readers}
        if not roles <= _VALUES | {Role.SIGN, Role.SHAPE}:
            return False
        whole = saved.whole
        is_large = whole.nbytes >= _LEAST_BYTES
        is_read = saved.is_source or bool(roles & _VALUES)
        return is_read and is_large and whole.dtype in _DTYPES and is_alike(saved)

    def pack(self, saved: SavedStorage) -> Packed | None:
        """Pack a storage that is taken, if all its values are finite."""
        whole = saved.whole
        elements = flat(whole)
        ranges = _Ranges.of(elements, 2**self.bits - 1)
        if not bool(ranges.steps.isfinite().all()):
            return None
        codes = self._codes(elements, ranges)
        is_signed = any(reader.role is Role.SIGN for reader in saved.readers)
        signs = signs_of(whole) if is_signed else None
        return _Quantized(Form(whole), self.bits, ranges, codes, signs)

    def _codes(self, elements: torch.Tensor, ranges: _Ranges) -> torch.Tensor:
        """Return (bytes,) the codes of all groups, whole bytes each."""
        width = GROUP * self.bits // 8
        n_groups = len(ranges.steps)
        device = elements.device
        codes = torch.empty(n_groups, width, dtype=torch.uint8, device=device)
        for own, part in _parts(elements):
            code = self._rounded(part, ranges.part(own))
            codes[own] = code if self.bits == 8 else pack_halves(code).view(-1, width)
        n_bytes = -(-elements.numel() * self.bits // 8)
        codes = codes.view(-1)
        return codes if len(codes) == n_bytes else codes[:n_bytes].clone()

    def _rounded(self, part: torch.Tensor, ranges: _Ranges) -> torch.Tensor:
        """Return (groups, 128) bytes: how many steps above the least."""
        draws = self._draws(part)
        above = part.to(ranges.least.dtype) - ranges.least
        above.div_(ranges.steps)
        if part.dtype in _NARROW:
            below = above.floor_()
            draws.copy_(_chance(part, below, ranges).gt_(draws))
        above.add_(draws).floor_().clamp_(0, 2**self.bits - 1)
        return above.to(torch.uint8)

    def _draws(self, part: torch.Tensor) -> torch.Tensor:
        """Return random numbers between 0 and 1, as many as there are elements."""
        device = part.device
        words = torch.empty(part.numel() // _DRAWS, dtype=torch.int64, device=device)
        words.random_(-(2**63), None, generator=self._generator(device))
        dtype = torch.float64 if part.dtype == torch.float64 else torch.float32
        return words.view(torch.int16).view(part.shape).to(dtype).add_(_HALF).div_(_ALL)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            generator = torch.Generator(device)
            self._generators[device] = generator.manual_seed(self._seed)
        return self._generators[device]


_HALF, _ALL = 2.0**15, 2.0**16
"""Of as many random numbers. They have as many digits as a number of steps has behind
the point, so that adding one to it rounds nothing."""


class _Ranges(NamedTuple):
    """Of each group the least, and the step to the next level; (groups, 1) each."""

    least: torch.Tensor
    steps: torch.Tensor

    @classmethod
    def of(cls, elements: torch.Tensor, n_steps: int) -> _Ranges:
        dtype = torch.promote_types(elements.dtype, torch.float32)
        n_groups = -(-elements.numel() // GROUP)
        made = torch.empty(2, n_groups, 1, dtype=dtype, device=elements.device)
        least, steps = made
        for own, part in _parts(elements):
            least[own], steps[own] = part.amin(1, True), part.amax(1, True)
        # No group divides by zero, or by a step that was rounded itself.
        steps.sub_(least).div_(n_steps).clamp_(min=torch.finfo(dtype).tiny)
        return cls(least, steps)

    def part(self, own: slice) -> _Ranges:
        return _Ranges(self.least[own], self.steps[own])

    def level(self, code: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return what comes out for codes, which are changed."""
        return code.mul_(self.steps).add_(self.least).to(dtype)


def _chance(part: torch.Tensor, below: torch.Tensor, ranges: _Ranges) -> torch.Tensor:
    """Return the chance of the level above, which makes the average the value.

    Note: [Levels as they come out]

    Args:
        part: (groups, 128) values.
        below: The codes of the levels below.
        ranges: The groups'.
    """
    high = ranges.level(below + 1, part.dtype)
    low = ranges.level(below.clone(), part.dtype)
    # Where they are one, it is the value: 0 / 0, which is above no random number.
    width = (high - low).to(below.dtype)
    return (part - low).to(below.dtype).div_(width)


def _parts(elements: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield some groups of elements at a time, and which they are."""
    n_whole = elements.numel() // GROUP
    groups = elements[: n_whole * GROUP].view(-1, GROUP)
    for own in slices(n_whole, _GROUPS_AT_ONCE, elements.device):
        yield own, groups[own]
    rest = elements[n_whole * GROUP :]
    if rest.numel():
        # The last is filled up with what it has.
        filled = rest[-1:].repeat(GROUP)
        filled[: rest.numel()] = rest
        yield slice(n_whole, n_whole + 1), filled.view(1, GROUP)


class _Quantized(NamedTuple):
    """Codes, ranges, and signs where those are read."""

    form: Form
    bits: int
    ranges: _Ranges
    codes: torch.Tensor
    signs: torch.Tensor | None

    @property
    def device_bytes(self) -> int:
        """The codes', the ranges' and the signs'."""
        signs = () if self.signs is None else (self.signs,)
        return own_bytes(self.codes, self.ranges.least, *signs)

    @property
    def host_bytes(self) -> int:
        """Nothing."""
        return 0

    def unpack(self) -> torch.Tensor:
        """Return the values, about."""
        whole = self.form.empty()
        elements = flat(whole)
        dtype = self.ranges.least.dtype
        for own in slices(len(self.ranges.steps), _GROUPS_AT_ONCE, whole.device):
            target = elements[own.start * GROUP : own.stop * GROUP]
            code = self._code(own)
            filled = code.new_zeros(len(self.ranges.steps[own]) * GROUP, dtype=dtype)
            filled[: len(code)] = code
            level = self.ranges.part(own).level(filled.view(-1, GROUP), whole.dtype)
            target.copy_(level.view(-1)[: len(target)])
        if self.signs is not None:
            give_signs(elements, self.signs)
        return whole

    def _code(self, own: slice) -> torch.Tensor:
        """Return the codes of some groups; the last may be short."""
        width = GROUP * self.bits // 8
        held = self.codes[own.start * width : own.stop * width]
        return held if self.bits == 8 else unpack_halves(held)
