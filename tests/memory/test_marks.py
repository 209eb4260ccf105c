"""Marks at the boundaries, what follows from them, and held bytes to the byte."""

import copy

import pytest
import torch
from torch import nn

import mimose
from mimose.memory.marks import Mark, StorageTracker, analyse
from mimose.planners.actions import EXACT_MENU
from mimose.types import Measured

KEEP, RECOMPUTE = EXACT_MENU.names

ZOO = ("t5", "albert", "resnet")


def _marks(trace):
    return [(mark.kind, mark.call) for mark in trace.marks]


def _expected_marks(n_calls):
    """Forward in order, backward in reverse, each recomputed after its gradient."""
    forward = [(kind, i) for i in range(n_calls) for kind in ("enter", "exit")]
    backward = [
        (kind, i)
        for i in reversed(range(n_calls))
        for kind in ("gradient", "recompute", "recomputed")
    ]
    begins = [("root_exit", -1), ("backward", -1)]
    return [("start", -1), *forward, *begins, *backward, ("end", -1)]


class _Passing(nn.Module):
    """Passes a second tensor through as it is."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, carried):
        return x + torch.tanh(self.linear(x)), carried


class _PassingChain(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(_Passing(16) for _ in range(3))

    def forward(self, x):
        x, carried = self.stem(x), self.stem(x).tanh()
        for block in self.blocks:
            x, carried = block(x, carried)
        return x.square().mean() + carried.mean()


def test_an_input_passed_through_is_no_output(toys, meter, monkeypatch):
    """The gradient of a tensor that a block only hands on does not announce it."""
    traces = toys.traces_of(monkeypatch)
    model = _PassingChain()
    with mimose.attach(model, "1TiB", meter=meter):
        model(toys.inputs()).backward()
    assert _expected_marks(3) == _marks(traces[0])


@pytest.mark.parametrize("name", ZOO)
def test_boundaries_of_the_zoo(toys, meter, monkeypatch, name):
    """In T5 too, whose encoder output every decoder layer reads, the order holds."""
    traces = toys.traces_of(monkeypatch)
    model = toys.zoo_model(name)
    with mimose.attach(model, "1TiB", meter=meter):
        toys.train(model, toys.zoo_batches(name, 1))
    trace = traces[0]
    assert _expected_marks(len(trace.calls)) == _marks(trace)
    if name == "t5":
        assert [
            "encoder.block.0#0",
            "encoder.block.1#0",
            "decoder.block.0#0",
            "decoder.block.1#0",
        ] == [call.name for call in trace.calls]
    if name == "albert":
        layer = "albert.encoder.albert_layer_groups.0"
        assert [f"{layer}#{i}" for i in range(3)] == [e.name for e in trace.calls]


@pytest.mark.parametrize("name", ZOO)
def test_the_recomputation_holds_what_keeping_does(toys, monkeypatch, name):
    """Held bytes, outputs and working peak of each call are those of a bare run."""
    model = toys.zoo_model(name)
    (batch,) = toys.zoo_batches(name, 1)
    if name == "t5":  # a kept layer holds no keys and values
        batch["use_cache"] = False
    expected = _bare_measurements(copy.deepcopy(model), batch, toys)
    traces = toys.traces_of(monkeypatch)
    with toys.counting() as meter, mimose.attach(model, "1TiB", meter=meter):
        toys.train(model, [batch])
    (trace,) = traces
    sample = analyse(trace.marks, trace.calls, EXACT_MENU)
    actual = [
        (
            call.held_bytes[KEEP],
            call.held_bytes[RECOMPUTE],
            measured.forward_transient_bytes[KEEP],
        )
        for call, measured in zip(trace.calls, sample.calls, strict=True)
    ]
    small = 512  # buffers that are put back count, too
    assert actual == [pytest.approx(each, abs=small) for each in expected]
    assert all(held > output > 0 for held, output, _ in actual)


def _bare_measurements(model, batch, toys):
    """Run the layers under a tracker of their own, as they run without a session."""
    measured = []

    def tracked(forward):
        def run(*args, **kwargs):
            with StorageTracker() as tracker:
                output = forward(*args, **kwargs)
                measured.append(
                    (
                        tracker.live_bytes,
                        tracker.bytes_made(output),
                        tracker.peak_bytes,
                    )
                )
            return output

        return run

    for _, layer in mimose.inputs.layers.find_layers(model):
        layer.forward = tracked(layer.forward)
    toys.train(model, [batch])
    return measured


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


def test_flops_of_products_and_convolutions():
    """FLOPs are those of `torch.utils.flop_counter`: two for a multiply and add."""
    with StorageTracker() as tracker:
        _ = torch.randn(3, 4) @ torch.randn(4, 5)
        assert 2 * 3 * 4 * 5 == tracker.flops
        _ = torch.nn.functional.conv2d(torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3))
        assert 120 + 2 * 9 * (3 * 2 * 3 * 3) == tracker.flops
