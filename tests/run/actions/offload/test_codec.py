"""What goes to the host comes back to the bit, once, and leaves nothing behind."""

import gc

import pytest
import torch
from torch import nn

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
)


class Block(nn.Module):
    """Products, an activation, a norm and dropout.

    Args:
        width: Of rows in and out.
    """

    def __init__(self, width=64):
        super().__init__()
        self.a, self.b = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.3)

    def forward(self, x):
        """Map (rows, width) to the same."""
        return self.norm(x + self.b(self.drop(torch.tanh(self.a(x)))))


def _blocks(n_blocks=3, device="cpu"):
    torch.manual_seed(7)
    return nn.ModuleList(Block() for _ in range(n_blocks)).to(device)


def _forward(blocks, packing=None, n_rows=128, **room):
    device = next(blocks.parameters()).device
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(n_rows, 64, generator=generator).to(device) + 0.0
    torch.manual_seed(13)
    for block in blocks:
        if packing is None:
            x = block(x)
        else:
            with packing.call(**room):
                x = block(x)
    return x.square().mean()


def _gradients(blocks):
    found = [parameter.grad.cpu().clone() for parameter in blocks.parameters()]
    blocks.zero_grad()
    return found


def _equal(some, others):
    pairs = zip(some, others, strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def _settle():
    """Have torch let go of what a failed backward left in its queue."""
    torch.zeros(1, requires_grad=True).sum().backward()
    gc.collect()


def _bare(n_backwards=1, **options):
    blocks = _blocks(**options)
    loss = _forward(blocks)
    for _ in range(n_backwards):
        loss.backward(retain_graph=True)
    return _gradients(blocks)


def test_gradients_are_those_of_the_bare_model(packing):
    """Dropout included; all memory on the host is given back."""
    pack, blocks = packing(), _blocks()
    loss = _forward(blocks, pack)
    held = pack.memory.held_bytes
    loss.backward()
    del loss
    assert _equal(_bare(), _gradients(blocks))
    assert 0 < held == pack.memory.peak_bytes == sum(pack.copies.out)
    assert 0 == pack.memory.held_bytes


def test_a_storage_is_copied_once(packing):
    """What a block hands on and the next one saves goes to the host once."""
    pack = packing()
    x = torch.randn(64, 64, requires_grad=True)
    with pack.call():
        handed = torch.tanh(x * 2.0)
    with pack.call():
        out = handed * handed
    (gradient,) = torch.autograd.grad(out.sum(), x)
    handed = torch.tanh(x * 2.0)
    (expected,) = torch.autograd.grad((handed * handed).sum(), x)
    assert [x.nbytes] == pack.copies.out
    assert torch.equal(expected, gradient)


def test_all_who_read_at_once_share_what_came_back(packing):
    """A product of a tensor with itself asks twice and is served by one copy."""
    pack = packing()
    x = torch.randn(64, 64, requires_grad=True)
    with pack.call():
        double = x * 2.0
        out = double * double
    out.sum().backward()
    assert [x.nbytes] == pack.copies.out == pack.copies.back
    assert torch.equal(8.0 * x, x.grad)


def test_an_edit_in_between_is_another_storage(packing, offered):
    """What was edited since it was packed is packed again."""
    pack = packing()
    tensor = torch.randn(64, 64)
    before = tensor.clone()
    first = pack.codec.pack(offered(tensor))
    assert first is pack.codec.pack(offered(tensor))
    tensor.mul_(2.0)
    second = pack.codec.pack(offered(tensor))
    assert first is not second
    assert torch.equal(before.flatten(), first.unpack())
    assert torch.equal(2.0 * before.flatten(), second.unpack())


def test_another_storage_at_the_same_place_is_another(packing, offered):
    """A storage that has gone leaves no word behind for who lives there next."""
    pack, kept = packing(), []
    for number in range(32):
        tensor = torch.full((64, 64), float(number))
        kept.append(pack.codec.pack(offered(tensor)))
        del tensor
    assert list(range(32)) == [int(each.unpack()[0]) for each in kept]
    assert 32 == len(pack.copies.out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_precision_comes_back(packing, offered, dtype):
    """Bits, not values: not-a-number and integers are as they were."""
    pack = packing()
    n_bytes = 8 * 1024 * torch.empty(0, dtype=dtype).element_size()
    whole = torch.randint(0, 2, (n_bytes,), dtype=torch.uint8)
    if dtype is not torch.bool:
        whole = torch.randint(0, 256, (n_bytes,), dtype=torch.uint8)
    tensor = whole.view(dtype)
    back = pack.codec.pack(offered(tensor)).unpack()
    assert dtype == back.dtype
    assert torch.equal(whole, back.view(torch.uint8))
    assert tensor.untyped_storage().data_ptr() != back.untyped_storage().data_ptr()


def test_layouts_come_back(packing, offered):
    """Whatever the order in memory, shape and strides are as they were."""
    pack = packing()
    tensor = torch.randn(4, 8, 32, 32).to(memory_format=torch.channels_last)
    saved = offered(tensor)._replace(whole=tensor)
    back = pack.codec.pack(saved).unpack()
    assert (tensor.shape, tensor.stride()) == (back.shape, back.stride())
    assert torch.equal(tensor, back)


def test_what_is_not_taken(packing, offered):
    """Nothing, what is tiny, what is elsewhere and what has no bits of its own."""
    codec = packing().codec
    assert not codec.takes(offered(torch.empty(0)))
    assert not codec.takes(offered(torch.ones(8)))
    assert not codec.takes(offered(torch.ones(4096, device="meta")))
    turned = torch.randn(4096, dtype=torch.complex64).conj()
    assert not codec.takes(offered(turned)._replace(whole=turned))
    assert codec.takes(offered(torch.ones(4096)))


def test_the_budget_is_kept(packing):
    """What does not fit stays, with the same gradients, and is counted."""
    whole = packing()
    _forward(_blocks(), whole)
    budget = whole.memory.peak_bytes // 2
    pack, blocks = packing(budget), _blocks()
    _forward(blocks, pack).backward()
    assert _equal(_bare(), _gradients(blocks))
    assert 0 < pack.memory.peak_bytes <= budget
    assert pack.memory.n_refused > 0
    assert 0 == pack.memory.held_bytes


def test_what_a_full_host_refuses(packing, offered):
    """It stays where it is, and fits again when what was there has gone."""
    pack = packing(65536)
    there = pack.codec.pack(offered(torch.ones(16384)))
    assert pack.codec.pack(offered(torch.ones(8192))) is None
    assert 1 == pack.memory.n_refused
    del there
    assert pack.codec.pack(offered(torch.ones(8192))) is not None


def test_a_retained_graph_goes_backward_again(packing):
    """Each backward brings everything back anew."""
    pack, blocks = packing(), _blocks()
    loss = _forward(blocks, pack)
    for _ in range(2):
        loss.backward(retain_graph=True)
    assert _equal(_bare(n_backwards=2), _gradients(blocks))
    assert pack.memory.held_bytes == pack.memory.peak_bytes
    del loss
    assert 0 == pack.memory.held_bytes


def test_a_backward_of_a_part(packing):
    """A gradient of the last block alone, and then the rest."""
    pack, blocks = packing(), _blocks()
    loss = _forward(blocks, pack)
    first = torch.autograd.grad(loss, list(blocks[-1].parameters()), retain_graph=True)
    loss.backward()
    gradients = _gradients(blocks)
    assert _equal(_bare(), gradients)
    assert _equal(first, gradients[-len(first) :])


def test_a_gradient_of_a_gradient(packing):
    """What a second backward needs of the first is there."""

    def penalty(pack):
        blocks = _blocks()
        x = torch.full((128, 64), 0.1, requires_grad=True)
        torch.manual_seed(13)
        y = x
        for block in blocks:
            if pack is None:
                y = block(y)
            else:
                with pack.call():
                    y = block(y)
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return _gradients(blocks)

    pack = packing()
    assert _equal(penalty(None), penalty(pack))
    gc.collect()
    assert 0 == pack.memory.held_bytes


@pytest.mark.parametrize("n_copies", [0, 3, 9])
def test_a_copy_that_fails(packing, n_copies):
    """On the way out or back: an error, and nothing is left on the host."""
    pack, blocks = packing(), _blocks()
    pack.copies.fails_at = n_copies
    with pytest.raises(RuntimeError, match="the copy fails"):
        _forward(blocks, pack).backward()
    _settle()
    assert 0 == pack.memory.held_bytes


def test_a_forward_that_fails(packing):
    """What was packed before goes with the forward."""
    pack, blocks = packing(), _blocks()
    blocks[2].norm = None
    with pytest.raises(TypeError):
        _forward(blocks, pack)
    gc.collect()
    assert pack.memory.peak_bytes > pack.memory.held_bytes == 0


def test_a_backward_that_fails(packing):
    """What was not asked for yet goes with the graph."""
    pack, blocks = packing(), _blocks()

    def fail(_):
        msg = "the backward fails"
        raise RuntimeError(msg)

    blocks[1].b.bias.register_hook(fail)
    loss = _forward(blocks, pack, headroom_bytes=2**30)
    with pytest.raises(RuntimeError, match="the backward fails"):
        loss.backward()
    del loss
    _settle()
    assert 0 == pack.memory.held_bytes


def test_a_loss_that_goes_without_a_backward(packing):
    """The host's memory goes with the graph."""
    pack = packing()
    loss = _forward(_blocks(), pack)
    assert pack.memory.held_bytes > 0
    del loss
    assert 0 == pack.memory.held_bytes


def _device_bytes(sim, packing, **room):
    """Return what a step holds between forward and backward, and at its peak then."""
    pack = None if packing is None else packing(device=torch.device("sim"))
    blocks = _blocks(device="sim")
    loss = _forward(blocks, pack, n_rows=1024, **room)
    gc.collect()
    held = sim.memory_allocated()
    sim.reset_peak_memory_stats()
    loss.backward()
    return held, sim.max_memory_allocated(), _gradients(blocks), pack


@pytest.mark.sim
def test_the_device_holds_less_by_what_was_packed(sim, packing):
    """Read from the simulated device's allocator, between forward and backward."""
    kept, _, expected, _ = _device_bytes(sim, None)
    packed, _, gradients, pack = _device_bytes(sim, packing)
    assert kept - packed == pack.memory.peak_bytes
    assert _equal(expected, gradients)


@pytest.mark.sim
def test_what_is_sent_for_early_is_within_the_headroom(sim, packing):
    """The backward's peak rises by no more than it was given; without, by nothing."""
    _, on_demand, _, _ = _device_bytes(sim, packing)
    row = 1024 * 64 * 4
    for headroom in (row, 3 * row, 2**30):
        _, peak, _, pack = _device_bytes(sim, packing, headroom_bytes=headroom)
        assert on_demand < peak <= on_demand + headroom
        assert len(pack.copies.back) == len(pack.copies.out)
