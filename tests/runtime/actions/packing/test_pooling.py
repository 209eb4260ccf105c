"""Means of neighbouring places: which, of what, and what is held."""

import itertools

import pytest
import torch

from mimose.actions.packing.base import Reader, Role, SavedStorage
from mimose.actions.packing.pooling import Pool

LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
}
SHAPES = [(3, 5, 8, 12), (3, 5, 7, 13), (2, 3, 1, 9), (2, 3, 10), (2, 3, 5, 6, 7)]


def _saved(x, *roles, settings=()):
    """The storage of an image, and who reads it."""
    whole = x.as_strided((x.numel(),), (1,), 0)
    readers = [Reader(role, x, settings) for role in roles]
    return SavedStorage(whole, readers, is_source=False)


def _unpacked(packed, x):
    whole = packed.unpack()
    assert (whole.dtype, whole.shape) == (x.dtype, (x.numel(),))
    return whole.as_strided(x.shape, x.stride(), 0)


def _blocks(x, factor):
    """Each block of the places."""
    starts = [range(0, size, factor) for size in x.shape[2:]]
    for corner in itertools.product(*starts):
        yield x[(..., *(slice(start, start + factor) for start in corner))]


def _mean(block, is_signed):
    places = tuple(range(2, block.dim()))
    total = block.double().sum(places, True)
    count = (block > 0).sum(places, True) if is_signed else block[0, 0].numel()
    return total / (count.clamp(min=1) if is_signed else count)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "factor", "is_signed"),
    [(torch.float32, 2, True), (torch.bfloat16, 4, False)],
)
def test_each_place_has_the_mean_of_its_block(dtype, layout, shape, factor, is_signed):
    """Blocks at the edge are over what is there; with signs, over what is not zero."""
    torch.manual_seed(0)
    x = torch.randn(shape) + 0.5
    x = layout(x.relu() if is_signed else x).to(dtype)
    roles = [Role.CONVOLUTION_WEIGHT] + [Role.SIGN] * is_signed
    packed = Pool(factor).pack(_saved(x, *roles))
    found = _unpacked(packed, x)
    assert found.stride() == x.stride()
    for block, made in zip(_blocks(x, factor), _blocks(found, factor), strict=True):
        mean = _mean(block, is_signed).to(dtype).expand_as(block)
        expected = mean * (block > 0) if is_signed else mean
        torch.testing.assert_close(made, expected)
    blocks = x[0, 0].numel() and sum(1 for _ in _blocks(x, factor))
    signs = -(-x.numel() // 8) if is_signed else 0
    held = blocks * x.shape[0] * x.shape[1] * x.element_size() + signs
    assert (held, 0) == (packed.device_bytes, packed.host_bytes)


@pytest.mark.parametrize("shape", [(3, 7, 6), (2, 5, 6, 4)])
def test_a_sequence_is_averaged_along_itself(shape):
    """Neighbouring texts do not mix, nor do features."""
    x = torch.randn(shape)
    rows = x.view(-1, shape[-1])
    saved = _saved(rows, Role.LINEAR_WEIGHT, settings=shape)
    packed = Pool(2).pack(saved)
    found = _unpacked(packed, rows).view(shape).movedim(-1, 1)
    for block, made in zip(
        _blocks(x.movedim(-1, 1), 2), _blocks(found, 2), strict=True
    ):
        torch.testing.assert_close(made, _mean(block, False).float().expand_as(made))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_signs_are_those_that_were(dtype):
    """Also where a mean rounds to zero, or is not finite."""
    least = 6e-8 if dtype is torch.float16 else 1e-45
    x = torch.zeros(1, 4, 2, 8)
    x[0, 0, 0, 0], x[0, 1, 1, 1] = least, least
    x[0, 2, 0, ::2], x[0, 3, 0, ::3] = float("inf"), float("nan")
    x = x.to(dtype)
    packed = Pool(4).pack(_saved(x, Role.CONVOLUTION_WEIGHT, Role.SIGN))
    assert torch.equal(x <= 0, _unpacked(packed, x) <= 0)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((16, 16, 128, 128), torch.float32), ((1, 16, 512, 512), torch.bfloat16)],
)
def test_working_memory(shape, dtype, meter):
    """What is held while something is packed; to unpack makes the storage itself."""
    x = torch.randn(shape).relu_().to(dtype)
    saved = _saved(x, Role.CONVOLUTION_WEIGHT, Role.SIGN)
    before = meter.live_bytes()
    meter.reset_peak()
    packed = Pool(2).pack(saved)
    assert meter.peak_bytes() - before < 1.0 * x.nbytes
    before = meter.live_bytes()
    meter.reset_peak()
    packed.unpack()
    assert meter.peak_bytes() - before < 1.1 * x.nbytes


@pytest.mark.sim
def test_on_an_accelerator(sim):
    """The same numbers as on a CPU, and the bytes that are said."""
    x = torch.randn(4, 8, 33, 32).relu_()
    own = x.to("sim")
    expected = Pool(2).pack(_saved(x, Role.CONVOLUTION_WEIGHT, Role.SIGN)).unpack()
    saved = _saved(own, Role.CONVOLUTION_WEIGHT, Role.SIGN)
    before = sim.memory_allocated()
    packed = Pool(2).pack(saved)
    held = sim.memory_allocated() - before
    assert packed.device_bytes <= held <= packed.device_bytes + 2 * 512
    torch.testing.assert_close(packed.unpack().cpu(), expected)
