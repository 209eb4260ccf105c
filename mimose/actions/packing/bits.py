"""What some nodes need of a tensor in a bit an element, in half a byte, or in nothing.

A ReLU's backward lets a gradient through unless its result is at most zero; a
max-pool's asks for the sizes of its input, and for the place in the window that each
maximum was at. So it takes no values to make the very same gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from mimose.actions.flags import pack_flags, unpack_flags
from mimose.actions.packing.base import Packed, Role, SavedStorage
from mimose.actions.packing.memory import (
    Form,
    fills,
    flat,
    is_alike,
    own_bytes,
    slices,
)
from mimose.tensors import bits

_PLACES = 16
"""As many can be told in half a byte."""
_AT_ONCE = 2**18
"""Elements that are worked on together; a multiple of 8."""


class Bits:
    """Packs what only signs, sizes and windows are read of; exact."""

    is_exact = True

    def takes(self, saved: SavedStorage) -> bool:
        """Whether nobody reads its values."""
        roles = {reader.role for reader in saved.readers}
        if saved.is_source or not roles:
            return False
        if roles == {Role.WINDOW_INDEX}:
            return _same_windows(saved)
        if not roles <= {Role.SIGN, Role.SHAPE}:
            return False
        return is_alike(saved) and saved.whole.is_floating_point()

    def pack(self, saved: SavedStorage) -> Packed:
        """Pack a storage that is taken."""
        roles = {reader.role for reader in saved.readers}
        if Role.WINDOW_INDEX in roles:
            return _Windows.of(saved)
        form = Form(saved.whole)
        return Signs(form, signs_of(saved.whole)) if Role.SIGN in roles else Shape(form)


def signs_of(whole: torch.Tensor) -> torch.Tensor:
    """Return a bit an element: whether a ReLU lets its gradient through.

    It does where its result is not a number.

    Args:
        whole: Dense, a ReLU's result.
    """
    elements = flat(whole)
    n_bytes = -(-len(elements) // 8)
    signs = torch.empty(n_bytes, dtype=torch.uint8, device=whole.device)
    for own in slices(len(elements), _AT_ONCE, whole.device):
        through = (elements[own] <= 0).logical_not_()
        signs[own.start // 8 : -(-own.stop // 8)] = pack_flags(through)
    return signs


def give_signs(elements: torch.Tensor, signs: torch.Tensor) -> None:
    """Make elements zero where a ReLU lets nothing through, and positive elsewhere.

    Args:
        elements: (n,) about a ReLU's result. What has come out as zero by rounding is
            the least above it then.
        signs: What `signs_of` returned.
    """
    elements.clamp_(min=torch.finfo(elements.dtype).tiny)
    for own, through in _flags(signs, len(elements)):
        # As integers: what is not finite becomes zero, too.
        bits(elements[own]).mul_(through)


def _flags(
    signs: torch.Tensor, n_elements: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    for own in slices(n_elements, _AT_ONCE, signs.device):
        held = signs[own.start // 8 : -(-own.stop // 8)]
        yield own, unpack_flags(held, own.stop - own.start)


class Signs(NamedTuple):
    """A ReLU's result: 1 where the gradient goes through, else 0."""

    form: Form
    signs: torch.Tensor

    @property
    def device_bytes(self) -> int:
        """A bit an element."""
        return own_bytes(self.signs)

    @property
    def host_bytes(self) -> int:
        """Nothing."""
        return 0

    def unpack(self) -> torch.Tensor:
        """Return ones and zeros."""
        whole = self.form.empty()
        elements = flat(whole)
        for own, through in _flags(self.signs, self.form.n_elements):
            elements[own] = through
        return whole


class Shape(NamedTuple):
    """A tensor of which nothing but its form is read."""

    form: Form

    @property
    def device_bytes(self) -> int:
        """Nothing."""
        return 0

    @property
    def host_bytes(self) -> int:
        """Nothing."""
        return 0

    def unpack(self) -> torch.Tensor:
        """Return memory with whatever is in it."""
        return self.form.empty()


class _Window(NamedTuple):
    """What a max-pool was told: height before width."""

    size: tuple[int, int]
    """Of its input."""
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def n_places(self) -> int:
        return self.kernel[0] * self.kernel[1]

    def starts(self, shape: torch.Size, device: torch.device) -> list[torch.Tensor]:
        """Return (rows, 1) and (columns,) where each window begins in the input."""
        rows, columns = (
            torch.arange(n, device=device, dtype=torch.int64).mul_(step).sub_(pad)
            for n, step, pad in zip(shape, self.stride, self.padding, strict=True)
        )
        return [rows.unsqueeze(1), columns]


def _same_windows(saved: SavedStorage) -> bool:
    first = saved.readers[0]
    tensor = first.tensor
    return (
        tensor.dtype == torch.int64
        and fills(tensor, saved)
        and _Window(*first.settings).n_places <= _PLACES
        and all(
            reader.settings == first.settings
            and reader.tensor.shape == tensor.shape
            and reader.tensor.stride() == tensor.stride()
            for reader in saved.readers
        )
    )


class _Windows(NamedTuple):
    """A max-pool's indices: a place in the window each, two in a byte."""

    form: Form
    """Of the storage."""
    lies: Form
    """Of the indices in it, (..., rows, columns)."""
    window: _Window
    places: torch.Tensor

    @classmethod
    def of(cls, saved: SavedStorage) -> _Windows:
        reader = saved.readers[0]
        window = _Window(*reader.settings)
        form, lies = Form(saved.whole), Form(reader.tensor)
        device = saved.whole.device
        n_bytes = form.n_elements + form.n_elements % 2
        places = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
        indices, found = _planes(reader.tensor), _planes(lies.of(places))
        rows, columns = window.starts(indices.shape[-2:], device)
        width, (_, across), (down, right) = (
            window.size[1],
            window.kernel,
            window.dilation,
        )
        for index, place in _parts(indices, found):
            row = index.div(width, rounding_mode="floor")
            column = index.sub(row, alpha=width).sub_(columns)
            row.sub_(rows)
            if (down, right) != (1, 1):
                row.div_(down, rounding_mode="floor")
                column.div_(right, rounding_mode="floor")
            place.copy_(row.mul_(across).add_(column))
        return cls(form, lies, window, pack_halves(places))

    @property
    def device_bytes(self) -> int:
        """Half a byte an index."""
        return own_bytes(self.places)

    @property
    def host_bytes(self) -> int:
        """Nothing."""
        return 0

    def unpack(self) -> torch.Tensor:
        """Return the indices."""
        whole = self.form.empty()
        window = self.window
        (_, across), (down, right) = window.kernel, window.dilation
        unpacked = unpack_halves(self.places)
        indices, found = (
            _planes(self.lies.of(whole)),
            _planes(self.lies.of(unpacked)),
        )
        rows, columns = window.starts(indices.shape[-2:], whole.device)
        for index, place in _parts(indices, found):
            row = place.div(across, rounding_mode="floor")
            column = place.sub(row, alpha=across)
            index.copy_(row).mul_(down).add_(rows).mul_(window.size[1])
            index.add_(columns).add_(column, alpha=right)
        return whole


def pack_halves(values: torch.Tensor) -> torch.Tensor:
    """Return (n / 2,) bytes that hold two values each.

    Args:
        values: (n,) bytes below 16, of even number. They are changed.
    """
    pairs = values.view(-1, 2)
    return pairs[:, 1].bitwise_left_shift_(4).bitwise_or(pairs[:, 0])


def unpack_halves(packed: torch.Tensor) -> torch.Tensor:
    """Return (2 n,) the values that were packed."""
    values = torch.empty(packed.numel(), 2, dtype=torch.uint8, device=packed.device)
    torch.bitwise_and(packed, 15, out=values[:, 0])
    torch.bitwise_right_shift(packed, 4, out=values[:, 1])
    return values.view(-1)


def _planes(indices: torch.Tensor) -> torch.Tensor:
    """Return (samples, channels, rows, columns)."""
    return indices if indices.dim() == 4 else indices.unsqueeze(0)


def _parts(
    indices: torch.Tensor, places: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    a_sample = max(1, indices[0].numel()) if len(indices) else 1
    n_samples = max(1, _AT_ONCE // a_sample)
    for own in slices(len(indices), n_samples, indices.device):
        yield indices[own], places[own]
