"""Answers of an accelerator are told late, and read at once."""

import copy

import pytest
import torch
from torch import nn

import mimose
from mimose.exact.late_answers import LateAnswers

ZOO = ("bert", "gpt2", "t5", "vit", "albert", "resnet")
DEVICE = "sim:0"


def test_a_cpu_answers_at_once():
    """Nothing is left to be read."""
    told = []
    answers = LateAnswers()
    answers.ask([torch.tensor(True), torch.tensor(False)], told.append)
    assert [[True, False]] == told
    answers.read()
    assert 1 == len(told)


@pytest.mark.sim
def test_one_wait_reads_all_that_was_asked(sim):
    """From both devices, and with flags of the CPU among them."""
    waits, told = torch.ops.sim.waits, []
    flags = [torch.zeros(2, device=d) for d in (DEVICE, "sim:1", "cpu", DEVICE)]
    flags = [flag.sum() == number for number, flag in enumerate(flags)]
    answers = LateAnswers()
    before = waits()
    for flag in flags:
        answers.ask([flag, flags[0]], told.append)
    assert [] == told
    answers.read()
    assert 1 == waits() - before
    assert [[True, True], [False, True], [False, True], [False, True]] == told
    answers.read()
    assert 1 == waits() - before


def _zoo_model(toys, name):
    if name in ("vit", "resnet"):
        image = torch.zeros(1, 1, 2, 2, device=DEVICE)
        try:
            torch.conv2d(image, image)
        except NotImplementedError:
            pytest.skip("the simulated accelerator has no convolutions")
    return toys.zoo_model(name).to(DEVICE)


def _zoo_batches(toys, name):
    """Make twenty batches; none of them makes a cache, with a session or without."""
    cacheless = {"use_cache": False} if name in ("gpt2", "t5") else {}
    return [
        {**cacheless, **{k: _moved(v) for k, v in batch.items()}}
        for batch in toys.zoo_batches(name, 2) * 10
    ]


def _moved(value):
    return value.to(DEVICE) if isinstance(value, torch.Tensor) else value


def _waits(toys, model, batches):
    """Count each step's host waits, from the forward to the end of backward."""
    counts = []
    for batch in batches:
        before = torch.ops.sim.waits()
        toys.forward(model, batch).backward()
        counts.append(torch.ops.sim.waits() - before)
        model.zero_grad()
    return counts


@pytest.mark.sim
@pytest.mark.parametrize("planner", ["auto", "full"])
@pytest.mark.parametrize("name", ZOO)
def test_host_waits_of_a_step(toys, sim, name, planner):
    """At most one more than the bare model's while measuring; then none."""
    batches = _zoo_batches(toys, name)
    bare = _waits(toys, _zoo_model(toys, name), batches)
    model = _zoo_model(toys, name)
    planner = toys.RandomPlanner() if planner == "auto" else planner
    with mimose.attach(model, "1TiB", planner=planner) as session:
        counts = _waits(toys, model, batches)
    more = [one - other for one, other in zip(counts, bare, strict=True)]
    assert 1 == more[0]  # first recomputations are compared
    assert max(more) <= 1
    assert [0] * 10 == more[10:]
    assert "plan" == session.records[-1].phase


class _Hidden(nn.Module):
    """Changes a buffer in a way that leaves no trace in its version."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("seen", torch.zeros(width))
        self.register_buffer("constant", torch.ones(width))

    def forward(self, x):
        """Read the buffer, and change it."""
        y = torch.tanh(self.linear(x) - self.seen) * self.constant
        self.seen.data.add_(y.detach().mean(0))
        return y


@pytest.mark.sim
@pytest.mark.parametrize("planner", ["full", "every-2"])
def test_hidden_changes_of_buffers_are_found(toys, sim, planner):
    """They are put back from the first step on; other buffers are not saved."""
    model = toys.chain(4, make=_Hidden)
    batches = [toys.inputs(n).to(DEVICE) for n in (8, 12)] * 3
    twin = copy.deepcopy(model).to(DEVICE)
    bare = toys.train(twin, batches, optimizer=_sgd(twin))
    model.to(DEVICE)
    with mimose.attach(model, "1TiB", planner=planner) as session:
        trained = toys.train(model, batches, optimizer=_sgd(model))
        names = [
            {slot.key[1] for slot in unit.slots if isinstance(slot.key, tuple)}
            for unit in session._engine.units
        ]
    assert [] == toys.differences(bare, trained)
    assert [{"seen"}] * 4 == names
    assert 0 == session.summary().retries


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2)


@pytest.mark.sim
def test_a_forward_without_a_backward_is_read_before_the_next(toys, sim):
    """What its first calls changed is known when the next step begins."""
    model = toys.chain(2, make=_Hidden).to(DEVICE)
    with mimose.attach(model, "1TiB", planner="full") as session:
        model(toys.inputs().to(DEVICE))
        model(toys.inputs().to(DEVICE)).backward()
        slots = [slot.key[1] for slot in session._engine.units[0].slots]
    assert ["seen"] == slots
