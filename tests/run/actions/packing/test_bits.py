"""Signs, sizes and windows: what is held, and that gradients stay what they are."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.proofs.packed_call import packed_call
from mimose.run.actions.packing.base import Reader, Role, SavedStorage
from mimose.run.actions.packing.bits import Bits, give_signs, signs_of

LAYOUTS = [torch.contiguous_format, torch.channels_last]
PRECISIONS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
POOLS = {
    "resnet": {"kernel_size": 3, "stride": 2, "padding": 1},
    "vgg": {"kernel_size": 2},
    "ceiling": {"kernel_size": 3, "stride": 2, "ceil_mode": True},
    "dilated": {"kernel_size": 3, "stride": 1, "padding": 1, "dilation": 2},
    "oblong": {"kernel_size": (2, 5), "stride": (3, 2), "padding": (0, 2)},
    "wider than the input": {"kernel_size": (1, 16), "padding": (0, 8)},
    "sixteen": {"kernel_size": 4, "stride": 3, "padding": 2},
}


def _gradients(run, x, codecs):
    """The gradient without and with codecs, and the call."""
    given = x.detach().requires_grad_()
    output = run(given)
    torch.manual_seed(1)
    direction = torch.randn_like(output)
    (expected,) = torch.autograd.grad(output, given, direction)
    call = packed_call(run, given, codecs)
    (found,) = torch.autograd.grad(call.output, given, direction)
    return expected, found, call


def _image(dtype, layout, size=(3, 5, 13, 11)):
    torch.manual_seed(0)
    return torch.randn(size).to(dtype).contiguous(memory_format=layout)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
def test_a_relu_and_a_max_pool_behind_it_need_no_values(dtype, layout, pool):
    """One bit an element for both, half a byte a window; the very same gradient."""
    x = _image(dtype, layout)

    def run(x):
        return functional.max_pool2d(x.clone().relu(), **pool)

    expected, found, call = _gradients(run, x, [Bits()])
    assert torch.equal(expected, found)
    assert found.stride() == expected.stride()
    n_windows = call.output.numel()
    held = sorted(storage.device_bytes for storage in call.storages)
    assert held == sorted([-(-x.numel() // 8), -(-n_windows // 2)])


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_numbers_that_are_none_and_zeros_of_either_sign(dtype):
    """A ReLU lets the gradient through where its result is not a number."""
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1, -1])
    x = torch.cat([x, torch.full((2,), torch.finfo(dtype).tiny)]).to(dtype)
    expected, found, call = _gradients(lambda x: x.clone().relu(), x, [Bits()])
    assert torch.equal(expected, found)
    assert found[0] != 0
    assert 2 == call.device_bytes


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_windows_of_nothing_but(value):
    """The maximum of such a window is somewhere in it as well."""
    x = torch.full((2, 3, 9, 9), value)

    def run(x):
        return functional.max_pool2d(x.clone(), 3, 2, 1)

    expected, found, call = _gradients(run, x, [Bits()])
    assert torch.equal(expected, found)
    assert all(storage.packed for storage in call.storages)


@pytest.mark.parametrize(
    ("run", "x"),
    [
        (lambda x: functional.max_pool1d(x.clone(), 3, 2), torch.randn(4, 6, 17)),
        (lambda x: functional.max_pool2d(x.clone(), 2), torch.randn(6, 17, 4)),
        (lambda x: functional.max_pool3d(x.clone(), 2), torch.randn(2, 3, 6, 7, 8)),
        (lambda x: functional.avg_pool2d(x.clone(), 3), torch.randn(2, 3, 9, 8)),
        (lambda x: functional.avg_pool3d(x.clone(), 2), torch.randn(2, 3, 6, 7, 8)),
        (
            lambda x: functional.adaptive_avg_pool2d(x.clone(), (3, 4)),
            torch.randn(2, 3, 9, 8),
        ),
        (
            lambda x: functional.adaptive_max_pool2d(x.clone(), (3, 4)),
            torch.randn(2, 3, 9, 8),
        ),
    ],
)
def test_pools_read_nothing_of_their_input(run, x, monkeypatch):
    """Their gradients are the same with anything in its place; it takes no memory."""
    make = torch.empty_strided

    def poisoned(*args, dtype, **options):
        made = make(*args, dtype=dtype, **options)
        return made.fill_(float("nan")) if dtype.is_floating_point else made

    monkeypatch.setattr(torch, "empty_strided", poisoned)
    expected, found, call = _gradients(run, x, [Bits()])
    assert torch.equal(expected, found)
    assert 0 in [storage.device_bytes for storage in call.storages]


def test_tensors_that_are_transposed_and_empty():
    """Whatever the layout, as long as the storage is filled."""
    x = torch.randn(7, 5, 3)
    for run in (
        lambda x: x.clone().transpose(0, 2).relu(),
        lambda x: x.clone().relu().permute(2, 0, 1),
        lambda x: x[:0].clone().relu(),
        lambda x: x.clone()[1:4].relu_(),
    ):
        expected, found, call = _gradients(run, x, [Bits()])
        assert torch.equal(expected, found)
        assert all(storage.packed for storage in call.storages)


def test_in_place():
    """As most models have their ReLUs."""
    run = nn.Sequential(nn.BatchNorm2d(5), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    x = _image(torch.float32, torch.contiguous_format)
    expected, found, call = _gradients(run, x, [Bits()])
    assert torch.equal(expected, found)
    assert 2 == sum(storage.packed is not None for storage in call.storages)


def test_what_is_not_taken():
    """Values that somebody reads, large windows, parts of storages, sources."""
    codec, x = Bits(), torch.randn(4, 4)
    sign = Reader(Role.SIGN, x)
    assert codec.takes(SavedStorage(x, [sign], is_source=False))
    assert not codec.takes(SavedStorage(x, [sign], is_source=True))
    for role in (Role.VALUE, Role.CONVOLUTION_WEIGHT, Role.FRAGILE):
        readers = [sign, Reader(role, x)]
        assert not codec.takes(SavedStorage(x, readers, is_source=False))
    other = Reader(Role.SIGN, x.view(torch.bfloat16))
    assert not codec.takes(SavedStorage(x, [other], is_source=False))
    indices = torch.zeros(1, 1, 4, 4, dtype=torch.int64)
    one = ((1, 1),) * 4
    for kernel, shown, is_taken in (
        ((4, 4), indices, True),
        ((17, 1), indices, False),
        ((4, 4), indices[..., 1:], False),
    ):
        settings = ((8, 8), kernel, *one[:3])
        reader = Reader(Role.WINDOW_INDEX, shown, settings)
        saved = SavedStorage(indices, [reader], is_source=False)
        assert codec.takes(saved) is is_taken


def test_more_than_is_worked_on_at_once():
    """Nothing is lost where two slices meet."""
    x = torch.randn(2**18 + 77)
    made = torch.full_like(x, 3.0)
    give_signs(made, signs_of(x))
    assert torch.equal(made, torch.where(x > 0, 3.0, 0.0))


@pytest.mark.sim
def test_on_an_accelerator(sim):
    """The same on the device, which holds no more than is said."""
    x = _image(torch.float32, torch.contiguous_format, (4, 8, 64, 64)).to("sim")
    leaf = x.requires_grad_()

    def run(x):
        return functional.max_pool2d(x.clone().relu(), 3, 2, 1)

    expected, found, _ = _gradients(run, x, [Bits()])
    assert torch.equal(expected.cpu(), found.cpu())
    before = sim.memory_allocated()
    call = packed_call(run, leaf, [Bits()])
    held = sim.memory_allocated() - before - call.output.nbytes
    assert 0 < call.device_bytes < call.saved_bytes / 20
    assert call.device_bytes <= held <= call.device_bytes + 2 * 512
