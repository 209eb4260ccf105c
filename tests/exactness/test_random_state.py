"""Random state of accelerators: copied where a layer draws, and put back exactly."""

import copy
import types
import zlib

import pytest
import torch
from torch import nn

import mimose
from mimose.exactness import random_state

WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DEVICE = "sim:0"


class _Generator:
    """Tells its place and goes there, as CUDA's generators do."""

    def __init__(self, index, get, put):
        self._index, self._get, self._put = index, get, put
        self._states = {}

    def initial_seed(self):
        """Return what never changes here."""
        return 0

    def manual_seed(self, seed):
        """Do nothing: the seed does not change."""

    def get_offset(self):
        """Return another number for each state."""
        state = self._get(self._index)
        offset = zlib.crc32(state.numpy().tobytes())
        self._states[offset] = state
        return offset

    def set_offset(self, offset):
        """Go back to where it was."""
        self._put(self._states[offset], self._index)


class _Stub(_Generator):
    """Has an offset that says nothing, as some backends do."""

    def get_offset(self):
        """Return zero, whatever is drawn."""
        return 0

    def set_offset(self, offset):
        """Stay there."""


@pytest.fixture(params=["places", "copies"])
def generators(request, sim, monkeypatch):
    """Let the device's generators tell their places, or not."""
    _install(monkeypatch, _Generator if request.param == "places" else _Stub)
    return request.param


@pytest.fixture
def places(sim, monkeypatch):
    """Let the device's generators tell their places."""
    _install(monkeypatch, _Generator)


def _install(monkeypatch, kind):
    functions = torch.sim.get_rng_state, torch.sim.set_rng_state
    made = tuple(kind(i, *functions) for i in range(torch.sim.device_count()))
    monkeypatch.setattr(torch.sim, "default_generators", made, raising=False)
    monkeypatch.setattr(random_state, "_known", {})


@pytest.fixture
def copies(sim, monkeypatch):
    """Count the copies of an accelerator's random state."""
    made = []
    original = torch.sim.get_rng_state

    def counted(device=None):
        made.append(device)
        return original(device)

    monkeypatch.setattr(torch.sim, "get_rng_state", counted)
    return made


def _to_device(batches):
    return [{k: _moved(v) for k, v in batch.items()} for batch in batches]


def _moved(value):
    return value.to(DEVICE) if isinstance(value, torch.Tensor) else value


def _train(toys, model, batches, copies=None):
    """Train; return what each step left, the device's random state, and copies."""
    torch.manual_seed(23)  # the devices' as well
    noted, states, counts = [], [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for batch in batches:
        n_before = len(copies or ())
        loss = toys.forward(model, batch)
        loss.backward()
        counts.append(len(copies or ()) - n_before)
        noted.append(toys.note(model, loss))
        states.append(torch.sim.get_rng_state(0).clone())
        optimizer.step()
        optimizer.zero_grad()
    return noted, states, counts


def _compare(toys, model, batches, copies=None, **options):
    """Train a copy bare and the model under a session; return what differs, more."""
    twin = copy.deepcopy(model).to(DEVICE)
    model.to(DEVICE)
    expected, drawn, _ = _train(toys, twin, batches)
    with mimose.attach(model, "1TiB", **options) as session:
        actual, states, counts = _train(toys, model, batches, copies)
    found = toys.differences(expected, actual)
    found += [
        f"step {i}: random state of the device"
        for i, (one, other) in enumerate(zip(drawn, states, strict=True))
        if not torch.equal(one, other)
    ]
    return found, session, counts


@pytest.mark.sim
@pytest.mark.parametrize("name", ["bert", "t5", "vit"])
def test_dropout_is_exact(toys, generators, name):
    """Losses, gradients and random state are the bare model's on the device."""
    model = toys.zoo_model(name)
    batches = _to_device(toys.zoo_batches(name, 8))
    planner = toys.RandomPlanner()
    found, session, _ = _compare(
        toys, model, batches, planner=planner, meter="prediction"
    )
    assert [] == found
    actions = {a for r in session.records if r.phase == "plan" for a in r.actions}
    assert {"keep", "recompute"} == actions
    assert 0 == session.summary().retries


@pytest.mark.sim
def test_nothing_is_copied_where_places_are_told(toys, places, copies):
    """With dropout or without, no step copies the device's random state."""
    for changes in ({}, WITHOUT_DROPOUT):
        model = toys.zoo_model("bert", **changes)
        batches = _to_device(toys.zoo_batches("bert", 2)) * 3
        found, session, counts = _compare(
            toys, model, batches, copies, planner="every-2"
        )
        assert [] == found
        assert session.records[-1].n_recomputed > 0
        assert [0] * 6 == counts


class _LateDropout(nn.Module):
    """A layer that begins to draw in its third call."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        """Draw in a way that gradients depend on, once it has been called often."""
        self.calls += 1
        y = torch.tanh(self.linear(x))
        return torch.dropout(y, 0.5, train=True) if self.calls > 2 else y


@pytest.mark.sim
def test_a_layer_that_begins_to_draw_is_exact(toys, generators):
    """Its third forward is recomputed with the numbers that it drew."""
    model = toys.chain(4, make=_LateDropout)
    batches = [toys.inputs(n).to(DEVICE) for n in (8, 12)] * 3
    found, session, _ = _compare(toys, model, batches, planner="full")
    assert [] == found
    assert 0 == session.summary().retries
    assert {} == session.summary().kept_units


def _lacking(module):
    return types.SimpleNamespace(get_rng_state=module.get_rng_state)


def _raising(module):
    def refuse(*_):
        msg = "not on this backend"
        raise NotImplementedError(msg)

    return types.SimpleNamespace(
        get_rng_state=refuse, set_rng_state=module.set_rng_state
    )


def _forgetting(module):
    return types.SimpleNamespace(
        get_rng_state=module.get_rng_state, set_rng_state=lambda *_: None
    )


@pytest.mark.sim
@pytest.mark.parametrize(
    ("backend", "why"),
    [
        (_lacking, "set_rng_state"),
        (_raising, "not on this backend"),
        (_forgetting, "other numbers"),
    ],
)
def test_a_backend_without_random_state_is_refused(
    toys, sim, monkeypatch, backend, why
):
    """Attaching says why, and what to do; nothing is left on the model."""
    lame = backend(torch.sim)
    monkeypatch.setattr(torch, "get_device_module", lambda *_: lame)
    model = toys.chain(2).to(DEVICE)
    with pytest.raises(mimose.MimoseError, match=why):
        mimose.attach(model, "1GiB")
    assert [] == toys.leftovers(model)
