"""Random state of accelerators: copied where a layer draws, and put back exactly."""

import copy
import types
import zlib

import pytest
import torch
from torch import nn

import mimose
from mimose.exact import random_state
from mimose.exact.random_state import DeviceRandom, RandomState, refuse_unsaveable
from mimose.run.actions.checkpointing import recompute

ZOO = ("bert", "gpt2", "t5", "vit", "albert", "resnet")
WITHOUT_DROPOUT = {
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "t5": {"dropout_rate": 0.0},
    "vit": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "albert": {
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "classifier_dropout_prob": 0.0,
    },
    "resnet": {},
}
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


def _zoo_model(toys, name, **changes):
    if name in ("vit", "resnet"):
        image = torch.zeros(1, 1, 2, 2, device=DEVICE)
        try:
            torch.conv2d(image, image)
        except NotImplementedError:
            pytest.skip("the simulated accelerator has no convolutions")
    return toys.zoo_model(name, **changes)


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
@pytest.mark.parametrize("name", ZOO)
def test_dropout_is_exact(toys, generators, name):
    """Losses, gradients and random state are the bare model's on the device."""
    model = _zoo_model(toys, name)
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
@pytest.mark.parametrize("name", ZOO)
def test_nothing_is_copied_where_places_are_told(toys, places, copies, name):
    """With dropout or without, no step copies the device's random state."""
    for changes in ({}, WITHOUT_DROPOUT[name]):
        model = _zoo_model(toys, name, **changes)
        batches = _to_device(toys.zoo_batches(name, 2)) * 3
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
@pytest.mark.parametrize("planner", ["full", "every-2"])
def test_a_layer_that_begins_to_draw_is_exact(toys, generators, planner):
    """Its third forward is recomputed with the numbers that it drew."""
    model = toys.chain(4, make=_LateDropout)
    batches = [toys.inputs(n).to(DEVICE) for n in (8, 12)] * 3
    found, session, _ = _compare(toys, model, batches, planner=planner)
    assert [] == found
    assert 0 == session.summary().retries
    assert {} == session.summary().kept_units


@pytest.mark.sim
def test_copies_without_places(toys, generators, copies):
    """One for the call and one for its recomputation, whatever the layer is given."""
    model = toys.chain(4)
    batches = [toys.inputs().to(DEVICE)] * 4
    _, session, counts = _compare(toys, model, batches, copies, planner="every-2")
    n_recomputed = session.records[-1].n_recomputed
    assert n_recomputed == 2
    expected = 1 + 2 * n_recomputed if generators == "copies" else 0  # 1: as it begins
    assert expected == counts[-1]


def _on_two_devices(x, y):
    """Draw on both, in a way that gradients depend on."""
    y = torch.dropout(y.tanh(), 0.5, train=True)
    return torch.dropout(x.tanh() + y.to(x.device), 0.5, train=True)


@pytest.mark.sim
def test_tensors_on_two_devices(generators, copies):
    """Each device's state is saved once a call and once a recomputation."""
    for device in (DEVICE, "sim:1"):
        refuse_unsaveable(torch.device(device))
    n_before = len(copies)
    expected = _drawn_on_two_devices(_on_two_devices)
    assert n_before == len(copies)
    actual = _drawn_on_two_devices(lambda *given: recompute(_on_two_devices, given, {}))
    assert (2 * 2 if generators == "copies" else 0) == len(copies) - n_before
    assert all(map(torch.equal, expected, actual))


def _drawn_on_two_devices(call):
    """Return output, gradients, and what is drawn afterwards."""
    torch.manual_seed(3)
    x = torch.ones(8, device=DEVICE, requires_grad=True)
    y = torch.ones(8, device="sim:1", requires_grad=True)
    output = call(x, y)
    output.sum().backward()
    drawn = [torch.rand(3, device=device) for device in (DEVICE, "sim:1")]
    return [output.detach(), x.grad, y.grad, *drawn]


@pytest.mark.sim
def test_stubs_are_copied(generators):
    """A generator whose offset does not move is not asked for it."""
    assert (generators == "copies") == DeviceRandom(torch.device(DEVICE)).is_copied


@pytest.mark.sim
def test_trying_out_leaves_the_state_as_it_was(generators):
    """Attaching draws, and puts the state back."""
    before = torch.sim.get_rng_state(0)
    DeviceRandom(torch.device(DEVICE))
    assert torch.equal(before, torch.sim.get_rng_state(0))


@pytest.mark.sim
def test_another_seed_is_put_back(sim, monkeypatch):
    """A state that was saved before the seed was set is there again."""
    monkeypatch.setattr(random_state, "_known", {})
    random = DeviceRandom(torch.device(DEVICE))
    torch.rand(3, device=DEVICE)
    before = random.save()
    drawn = torch.rand(5, device=DEVICE).cpu()
    torch.sim.manual_seed(99)
    random.put(before)
    assert torch.equal(drawn, torch.rand(5, device=DEVICE).cpu())


@pytest.mark.sim
def test_a_random_state_covers_the_cpu_and_devices(generators):
    """After `restore` both draw the same numbers again."""
    state = RandomState([torch.device(DEVICE), torch.device("sim:1")])
    drawn = [torch.rand(4, device=d).cpu() for d in ("cpu", DEVICE, "sim:1")]
    state.restore()
    again = [torch.rand(4, device=d).cpu() for d in ("cpu", DEVICE, "sim:1")]
    assert all(map(torch.equal, drawn, again))


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
        (_lacking, "no attribute 'set_rng_state'"),
        (_raising, "not on this backend"),
        (_forgetting, "it draws other numbers"),
    ],
)
def test_a_backend_without_random_state_is_refused(
    toys, sim, monkeypatch, backend, why
):
    """Attaching says why, and what to do; nothing is left on the model."""
    lame = backend(torch.sim)
    monkeypatch.setattr(torch, "get_device_module", lambda *_: lame)
    model = toys.chain(2).to(DEVICE)
    with pytest.raises(mimose.MimoseError, match=why) as caught:
        mimose.attach(model, "1GiB")
    assert "Train on another device" in str(caught.value)
    assert [] == toys.leftovers(model)


def test_a_cpu_is_never_refused():
    """It has no random state but torch's own."""
    refuse_unsaveable(torch.device("cpu"))
    assert () == random_state.accelerators([torch.zeros(1), None, 3])
