"""Marks at the boundaries, what follows from them, and held bytes to the byte."""

import torch

from mimose.measure.samples import analyse
from mimose.measure.storage import StorageTracker
from mimose.measure.trace import Mark
from mimose.planners.actions import EXACT_MENU
from mimose.types import Measured

KEEP, RECOMPUTE = EXACT_MENU.names


def _call(index, action=RECOMPUTE, held=60.0, output=10.0):
    return Measured(
        name=f"layer.{index}#0",
        layer=index,
        number=0,
        family=0,
        sizes=(2,),
        action=action,
        held_bytes={KEEP: held, RECOMPUTE: output},
        flops=7,
    )


def _written(*lines):
    return [Mark(kind, call, live, peak) for kind, call, live, peak in lines]


STEP = (
    ("start", -1, 100, 100),
    ("enter", 0, 105, 130),
    ("exit", 0, 115, 175),
    ("root_exit", -1, 120, 140),
    ("backward", -1, 104, 155),
    ("gradient", 0, 122, 150),
    ("recompute", 0, 125, 126),
    ("recomputed", 0, 185, 195),
    ("end", -1, 90, 210),
)


def test_samples_of_a_written_step():
    """Each number of a step with one call follows from the marks around it."""
    sample = analyse(_written(*STEP), [_call(0)], EXACT_MENU)
    (call,) = sample.calls
    assert (5, 30.0) == (sample.gaps[0].retained_bytes, sample.gaps[0].transient_bytes)
    assert {RECOMPUTE: 70.0, KEEP: 70.0} == call.forward_transient_bytes
    assert (5, 25.0) == (sample.head.retained_bytes, sample.head.transient_bytes)
    assert (2, 35.0) == (sample.loss.retained_bytes, sample.loss.transient_bytes)
    assert 30 == sample.loss.backward_bytes
    assert {RECOMPUTE: 210 - 122 - (60 - 10)} == call.backward_transient_bytes
    assert {RECOMPUTE: 90 - 122 + 10} == call.backward_retained_bytes
    assert {RECOMPUTE: 7.0} == call.cost
    assert sample.is_ordered


def test_gradients_out_of_order_are_noticed():
    """A model whose gradients come in another order cannot be laid out."""
    marks = _written(
        ("start", -1, 0, 0),
        ("enter", 0, 0, 0),
        ("exit", 0, 0, 0),
        ("enter", 1, 0, 0),
        ("exit", 1, 0, 0),
        ("root_exit", -1, 0, 0),
        ("gradient", 0, 0, 0),
        ("gradient", 1, 0, 0),
        ("end", -1, 0, 0),
    )
    assert not analyse(marks, [_call(0), _call(1)], EXACT_MENU).is_ordered


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
