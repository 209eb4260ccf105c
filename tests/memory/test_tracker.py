"""The tracker counts what operators make, and nothing else."""

import torch

from mimose.memory.tracker import StorageTracker


def test_new_storages_count_until_they_are_freed():
    """Live bytes go up and down again; the peak stays."""
    with StorageTracker() as tracker:
        x = torch.zeros(1000)
        y = x + 1
        assert 8000 == tracker.live_bytes
        del x
        assert 4000 == tracker.live_bytes
        del y
    assert 0 == tracker.live_bytes
    assert 8000 == tracker.peak_bytes


def test_views_and_aliases_do_not_count():
    """A view, a detached alias or a reshape holds nothing of its own."""
    x = torch.zeros(10, 10)
    with StorageTracker() as tracker:
        kept = [x[2:5], x.detach(), x.reshape(100), x.t(), x.unbind(0)]
    assert (0, 0) == (tracker.live_bytes, tracker.peak_bytes)
    assert 5 == len(kept)


def test_bytes_made_counts_each_storage_once():
    """Of a tree, only storages made under the tracker count, shared ones once."""
    x = torch.zeros(10)
    with StorageTracker() as tracker:
        y = x + 1
        assert y.nbytes == tracker.bytes_made({"in": x, "out": (y, y[2:])})


def test_what_autograd_saves_counts():
    """A saved activation is alive as long as its graph is."""
    x = torch.randn(50, requires_grad=True)
    with StorageTracker() as tracker:
        y = x.exp().sum()
        assert 200 + 4 == tracker.live_bytes
        y.backward()
        assert 200 + 4 == tracker.live_bytes - x.grad.nbytes + 200
    assert y.grad_fn is not None


def test_flops_of_products_and_convolutions():
    """FLOPs are those of `torch.utils.flop_counter`: two for a multiply and add."""
    with StorageTracker() as tracker:
        _ = torch.randn(3, 4) @ torch.randn(4, 5)
        assert 2 * 3 * 4 * 5 == tracker.flops
        _ = torch.nn.functional.conv2d(torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3))
        assert 120 + 2 * 9 * (3 * 2 * 3 * 3) == tracker.flops
