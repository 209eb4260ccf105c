"""Means of neighbouring places: which, of what, and what is held."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.proofs.packed_call import packed_call
from mimose.run.actions.packing import pooling
from mimose.run.actions.packing.base import Reader, Role, SavedStorage
from mimose.run.actions.packing.bits import Bits
from mimose.run.actions.packing.pooling import Pool

LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
}
SHAPES = [(3, 5, 8, 12), (3, 5, 7, 13), (2, 3, 1, 9), (2, 3, 10), (2, 3, 5, 6, 7)]
PRECISIONS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


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


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("factor", [2, 4])
@pytest.mark.parametrize("is_signed", [False, True])
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


@pytest.mark.parametrize("shape", [(3, 10, 6), (3, 7, 6), (2, 5, 6, 4)])
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


@pytest.mark.parametrize("at_once", [1, 7, 100, 10**6])
def test_however_much_is_worked_on_at_once(at_once, monkeypatch):
    """The same means."""
    x = torch.randn(3, 4, 9, 7)
    expected = Pool(2).pack(_saved(x, Role.CONVOLUTION_WEIGHT)).unpack()
    monkeypatch.setattr(pooling, "_AT_ONCE", at_once)
    found = Pool(2).pack(_saved(x, Role.CONVOLUTION_WEIGHT)).unpack()
    assert torch.equal(expected, found)


def test_what_is_not_taken():
    """What others read, sources, single places, parts of storages, two views."""
    x, pool = torch.randn(2, 4, 4, 4), Pool(2)
    weight = Role.CONVOLUTION_WEIGHT
    assert pool.takes(_saved(x, weight, weight, Role.SIGN, Role.SHAPE))
    assert not pool.takes(_saved(x, weight)._replace(is_source=True))
    assert not pool.takes(_saved(x, Role.SIGN))
    for other in (Role.VALUE, Role.FRAGILE, Role.WINDOW_INDEX):
        assert not pool.takes(_saved(x, weight, other))
    assert not pool.takes(_saved(x[:, :, :1, :1].clone(), weight))
    assert not pool.takes(_saved(x[:0], weight))
    rows = x.view(-1, 4)
    assert not pool.takes(_saved(rows, Role.LINEAR_WEIGHT, settings=(32, 4)))
    turned = Reader(weight, x.transpose(2, 3))
    both = [Reader(weight, x), turned]
    assert not pool.takes(SavedStorage(x, both, is_source=False))
    assert not pool.takes(SavedStorage(x, [Reader(weight, x[:1])], is_source=False))
    with pytest.raises(ValueError, match="got factor=1"):
        Pool(1)


@pytest.mark.parametrize("factor", [2, 4])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_only_gradients_of_weights_are_others(factor, layout):
    """Those of inputs and biases are the same to the bit."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 8, 3), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 1)),
    ).to(memory_format=layout)
    x = torch.randn(4, 3, 21, 21).contiguous(memory_format=layout).requires_grad_()
    names, weights = zip(*model.named_parameters(), strict=True)
    expected = torch.autograd.grad(model(x).square().sum(), (x, *weights))
    call = packed_call(model, x, [Bits(), Pool(factor)], weights)
    found = torch.autograd.grad(call.output.square().sum(), (x, *weights))
    for name, one, other in zip(("x", *names), expected, found, strict=True):
        assert torch.equal(one, other) is not name.endswith("weight"), name
    assert call.device_bytes < call.saved_bytes / 3


@pytest.mark.parametrize("factor", [2, 4])
@pytest.mark.parametrize("coarse", [8, 32])
def test_zeros_that_are_known_make_the_gradient_better(factor, coarse):
    """Means over what is not zero, put where it was; smooth images and noise."""
    torch.manual_seed(0)
    drawn = torch.randn(8, 16, coarse, coarse)
    x = functional.interpolate(drawn, (32, 32), mode="bicubic").relu_()
    model = nn.Conv2d(16, 16, 3, padding=1)
    direction = model(x).detach()

    def gradient(operand):
        return torch.nn.grad.conv2d_weight(
            operand, model.weight.shape, direction, padding=1
        )

    weight, exact, errors = Role.CONVOLUTION_WEIGHT, gradient(x), []
    for roles in ((weight, Role.SIGN), (weight,)):
        operand = _unpacked(Pool(factor).pack(_saved(x, *roles)), x)
        errors.append(float((gradient(operand) - exact).norm() / exact.norm()))
    assert errors[0] < 0.9 * errors[1]


def test_what_is_alike_within_its_blocks_has_the_same_gradient():
    """The mean is then each of them."""
    x = torch.randn(4, 3, 6, 6).repeat_interleave(2, 2).repeat_interleave(2, 3)
    model = nn.Conv2d(3, 4, 3)
    expected = torch.autograd.grad(model(x).square().sum(), model.weight)
    call = packed_call(model, x, [Pool(2)], tuple(model.parameters()))
    found = torch.autograd.grad(call.output.square().sum(), model.weight)
    torch.testing.assert_close(expected, found)
    assert 4 * call.device_bytes == call.saved_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(16, 16, 128, 128), (1, 16, 512, 512)])
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
