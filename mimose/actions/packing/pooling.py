"""What a weight's gradient alone reads, averaged over neighbouring places.

The gradient of a layer's input asks for its weight and not for its input, so that it
stays exact; the weight's own sums products over all places, and neighbouring places
are alike. In the backward each place has the mean of its block.

Note: [Zeros]
Where a ReLU's backward reads the same storage, a bit an element is held besides. Then
what was zero is zero again, and the block's mean is over the others: the sum over a
block stays what it was, and more of its values are right.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from mimose.actions.packing.base import Packed, Reader, Role, SavedStorage
from mimose.actions.packing.bits import give_signs, signs_of
from mimose.actions.packing.memory import Form, fills, flat, own_bytes, slices

_WEIGHTS = frozenset((Role.CONVOLUTION_WEIGHT, Role.LINEAR_WEIGHT))
_POOLED = _WEIGHTS | {Role.SIGN, Role.SHAPE}
_AT_ONCE = 2**20
"""Elements that are averaged together."""
_DTYPES = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))


class Pool:
    """Averages what only weights' gradients read.

    Args:
        factor: The block's length in each dimension of the place: height and width of
            images, the sequence of texts.

    Raises:
        ValueError: It is not at least 2.
    """

    is_exact = False

    def __init__(self, factor: int) -> None:
        if factor < 2:
            msg = f"blocks are 2 long or more, got factor={factor}"
            raise ValueError(msg)
        self.factor = factor

    def takes(self, saved: SavedStorage) -> bool:
        """Whether weights' gradients are all that reads its values, at many places."""
        roles = {reader.role for reader in saved.readers}
        if saved.is_source or not roles <= _POOLED or not roles & _WEIGHTS:
            return False
        if saved.whole.dtype not in _DTYPES:
            return False
        found = {_places(reader, saved) for reader in saved.readers if _reads(reader)}
        return len(found) == 1 and self._saves(found.pop())

    def _saves(self, places: _Places | None) -> bool:
        if places is None:
            return False
        return max(places.spatial, default=1) > 1 and 0 not in places.shape

    def pack(self, saved: SavedStorage) -> Packed:
        """Pack a storage that is taken."""
        reader = next(filter(_reads, saved.readers))
        places = _places(reader, saved)
        assert places is not None
        is_signed = any(reader.role is Role.SIGN for reader in saved.readers)
        signs = signs_of(saved.whole) if is_signed else None
        means = _means(places.of(saved.whole), self.factor, is_signed)
        return _Pooled(Form(saved.whole), places, self.factor, means, signs)


def _reads(reader: Reader) -> bool:
    return reader.role in _WEIGHTS


class _Places(NamedTuple):
    """A storage's elements, (samples, channels, *places)."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def spatial(self) -> tuple[int, ...]:
        return self.shape[2:]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a tensor that fills a storage, so."""
        return flat(whole).as_strided(
            self.shape, self.stride, int(whole.storage_offset())
        )


def _places(reader: Reader, saved: SavedStorage) -> _Places | None:
    tensor = reader.tensor
    if not fills(tensor, saved):
        return None
    if reader.role is Role.LINEAR_WEIGHT:
        shape: tuple[int, ...] = reader.settings
        if len(shape) < 3 or not tensor.is_contiguous():
            return None
        if len(shape) == 3:  # a second dimension: such images are averaged fastest
            shape = (*shape[:2], 1, shape[2])
        tensor = tensor.view(shape).movedim(-1, 1)
    return _Places(tuple(tensor.shape), tuple(tensor.stride()))


def _means(x: torch.Tensor, factor: int, is_signed: bool) -> torch.Tensor:
    """Return (samples, channels, *blocks) the blocks' means, dense.

    Args:
        x: (samples, channels, *places).
        factor: A block's length; blocks at the edge are as long as there is something.
        is_signed: Whether the mean is over what is above zero: Note: [Zeros].
    """
    blocks = [-(-size // factor) for size in x.shape[2:]]
    means = torch.empty(
        (*x.shape[:2], *blocks),
        dtype=x.dtype,
        device=x.device,
        memory_format=_format(x),
    )
    for samples, rows in _parts(x, blocks[0], factor):
        part = x[samples, :, rows.start * factor : rows.stop * factor]
        counted = part > 0 if is_signed else _ones(part)
        counts = _sums(counted, factor).clamp_(min=1)
        means[samples, :, rows] = _sums(part, factor).div_(counts)
    return means


def _parts(x: torch.Tensor, n_rows: int, factor: int) -> Iterator[tuple[slice, slice]]:
    """Yield samples, and rows of their blocks, that are averaged together."""
    a_sample = x[0].numel()
    a_row = a_sample * factor // x.shape[2]
    for samples in slices(len(x), max(1, _AT_ONCE // a_sample), x.device):
        for rows in slices(n_rows, max(1, _AT_ONCE // max(1, a_row)), x.device):
            yield samples, rows


def _ones(x: torch.Tensor) -> torch.Tensor:
    """Return a one for each place, of all samples and channels."""
    return torch.ones((1, 1, *x.shape[2:]), dtype=torch.bool, device=x.device)


def _sums(x: torch.Tensor, factor: int) -> torch.Tensor:
    """Return the sums of all blocks, in a precision that adds up well."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    for dim in range(2, x.dim()):
        parts = (_every(x, dim, start, factor) for start in range(factor))
        total = next(parts).to(dtype, copy=True)
        for part in parts:
            total.narrow(dim, 0, part.shape[dim]).add_(part)
        x = total
    return x


def _format(x: torch.Tensor) -> torch.memory_format:
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if last is not None and x.is_contiguous(memory_format=last):
        return last
    return torch.contiguous_format


class _Pooled(NamedTuple):
    """Means of blocks, and signs where those are read."""

    form: Form
    places: _Places
    factor: int
    means: torch.Tensor
    signs: torch.Tensor | None

    @property
    def device_bytes(self) -> int:
        """The means' and the signs'."""
        signs = () if self.signs is None else (self.signs,)
        return own_bytes(self.means, *signs)

    @property
    def host_bytes(self) -> int:
        """Nothing."""
        return 0

    def unpack(self) -> torch.Tensor:
        """Return the means, each over its block."""
        whole = self.form.empty()
        for target, mean in self._blocks(self.places.of(whole)):
            target.copy_(mean)
        if self.signs is not None:
            give_signs(flat(whole), self.signs)
        return whole

    def _blocks(self, x: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each place of all blocks, and the means that go there."""
        for starts in itertools.product(range(self.factor), repeat=x.dim() - 2):
            target, means = x, self.means
            for dim, start in enumerate(starts, 2):
                target = _every(target, dim, start, self.factor)
                means = means.narrow(dim, 0, target.shape[dim])
            if target.numel():
                yield target, means


def _every(x: torch.Tensor, dim: int, start: int, step: int) -> torch.Tensor:
    steps = (*(slice(None) for _ in range(dim)), slice(start, None, step))
    return x[steps]
