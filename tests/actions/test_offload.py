"""Offloading layers of real models, on the simulated accelerator."""

import copy
import gc

import pytest
import torch

import mimose
from mimose.actions.host import Host

pytestmark = pytest.mark.sim

BOTH = ("offload", "offload_input")
ZOO = ("bert", "t5", "resnet")
LARGER = {"resnet": [{"batch": 2, "height": size, "width": 96} for size in (96, 128)]}
LENGTHS = (256, 512, 384, 320, 448, 288, 480, 416, 272, 496, 352, 432, 464, 304, 400)


def _adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def _menu(action):
    return ("keep", action, "recompute")


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("action", BOTH)
def test_it_trains_like_the_bare_model(toys, name, action):
    """Losses, gradients, buffers and random state, dropout on, at several shapes."""
    model = toys.zoo_model(name).to("sim")
    batches = toys.moved(toys.zoo_batches(name, 4, LARGER.get(name)), "sim")
    options = {"actions": _menu(action), "planner": toys.everywhere(action)}
    options |= {"budget": "1GiB", "host_budget": "1GiB"}
    found, session = toys.compare(model, batches, **options)
    assert [] == found
    assert {action} == {action for r in session.records for action in r.actions}
    assert session.summary().host.peak_bytes > 0
    assert not session.summary().kept_units


class _HeldBetween:
    """Reads what the device holds after each forward."""

    def __init__(self, sim, model):
        self.found, self._sim = [], sim
        model.register_forward_hook(self._note)

    def _note(self, *_):
        gc.collect()
        self.found.append(self._sim.memory_allocated())


def _steps(sim, toys, action, **options):
    """Run two steps of a chain under an action; return what the last one held."""
    model = toys.chain(4, width=128).to("sim")
    actions = ("keep", "selective", *BOTH, "recompute")
    options = {"actions": actions, **options}
    with mimose.attach(
        model, "1GiB", planner=toys.everywhere(action), **options
    ) as session:
        held = _HeldBetween(sim, model)
        for _ in range(2):
            model(toys.inputs(512, width=128).to("sim")).backward()
        at_peak = session.records[-1].observed_peak_bytes
    return held.found[-1], at_peak, session.summary().host


ROW = 512 * 128 * 4
# Of a block: what tanh returned, and dropout's mask; or its input.
SENT = {"offload": 2 * ROW + ROW // 4, "offload_input": ROW}


@pytest.mark.parametrize(
    ("action", "other"), [("offload", "keep"), ("offload_input", "recompute")]
)
def test_the_device_holds_less(sim, toys, action, other):
    """Between forward and backward by what is on the host, read from the allocator."""
    kept, kept_peak, _ = _steps(sim, toys, other)
    left, peak, memory = _steps(sim, toys, action)
    assert kept - left == memory.peak_bytes == 4 * SENT[action]
    assert peak < kept_peak


@pytest.mark.parametrize("action", BOTH)
def test_a_small_budget_of_the_host(sim, toys, action):
    """What does not fit stays on the device; the gradients are the same."""
    row = 512 * 128 * 4
    model = toys.chain(4, width=128).to("sim")
    batches = [toys.inputs(512, width=128).to("sim")] * 2
    options = {"actions": _menu(action), "planner": toys.everywhere(action)}
    options |= {"budget": "1GiB", "host_budget": 2 * row}
    found, session = toys.compare(model, batches, **options)
    host = session.summary().host
    assert [] == found
    assert 0 < host.peak_bytes <= 2 * row == host.budget_bytes
    assert host.n_refused > 0
    line = f"of 0.5 MiB held; {host.n_refused} tensors did not fit and stayed"
    assert line in " ".join(session.report().split())


def _weights(model, batches):
    """Train, holding nothing of a step, and return the weights."""
    optimizer = _adam(model)
    for batch in batches:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def _highest(sim, model, batches, planner):
    """Return the most that a session's steps have held."""
    gc.collect()
    sim.empty_cache()
    model = copy.deepcopy(model)
    with mimose.attach(model, "8GiB", planner=planner) as session:
        torch.manual_seed(5)
        weights = _weights(model, batches)
        return max(r.observed_peak_bytes for r in session.records), weights


@pytest.mark.parametrize("action", BOTH)
def test_it_is_learned_and_planned(sim, toys, action):
    """Plans keep the host's budget, and the device's peak comes as predicted.

    Its own is but a few segments here, too small for a wall.
    """
    sim.empty_cache()
    sim.set_expandable_segments(True)
    model = toys.chain(5, width=128).to("sim")
    lengths = (*LENGTHS, *LENGTHS[:6])
    batches = [toys.inputs(4 * n, width=128).to("sim") for n in lengths]
    row = 4 * 512 * 128 * 4
    highest, bare = _highest(sim, model, batches, "none")
    lowest, _ = _highest(sim, model, batches[:4], "full")
    gc.collect()
    sim.empty_cache()
    how = {"actions": _menu(action), "host_budget": 12 * row}
    # At other prices layers as narrow as these are recomputed.
    how |= {"wall": False, "byte_flops": 0.5}
    torch.manual_seed(5)
    with mimose.attach(model, (3 * highest + lowest) // 4, **how) as session:
        weights = _weights(model, batches)
    records = list(session.records)
    planned = [r for r in records if r.phase == "plan" and "tried" not in r.reason]
    assert all(map(torch.equal, bare, weights))
    assert [r for r in planned if action in r.actions]
    assert 0 == session.summary().host.n_refused
    assert max(abs(record.prediction_error) for record in planned[-5:]) < 0.01


def _fail(*_):
    msg = "told to fail"
    raise OSError(msg)


def _forward(model, x, patch):
    patch.setattr(model.blocks[2].dropout, "forward", _fail)
    model(x)


def _backward(model, x, patch):
    patch.setattr(Host, "to_device", _fail)
    model(x).backward()


def _copy_out(model, x, patch):
    patch.setattr(Host, "to_host", _fail)
    model(x)


@pytest.mark.parametrize("action", BOTH)
@pytest.mark.parametrize("end", [_forward, _backward, _copy_out])
def test_the_next_step_finds_its_room(toys, sim, monkeypatch, action, end):
    """Steps that end early leave nothing on a host that has room for one step alone."""
    model = toys.chain(3, width=128).to("sim")
    x = toys.inputs(512, width=128).to("sim")
    options = {"actions": _menu(action), "planner": toys.everywhere(action)}
    budget = 3 * SENT[action]
    with mimose.attach(model, "1GiB", host_budget=budget, **options) as session:
        for _ in range(2):
            model(x).backward()
        with monkeypatch.context() as patch, pytest.raises(OSError, match="told"):
            end(model, x, patch)
        torch.zeros(1, requires_grad=True).sum().backward()  # empties torch's queue
        gc.collect()
        model.zero_grad()
        model(x).backward()
        host = session.summary().host
    assert (host.peak_bytes, host.n_refused) == (budget, 0)


class _Layer(torch.nn.Module):
    """Does something to what it has saved.

    Args:
        edit: Does it.
    """

    def __init__(self, edit):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((64, 64), 0.1))
        self.edit = edit

    def forward(self, x):
        """Save the hidden tensor once before it, and once behind."""
        hidden = torch.tanh(x @ self.weight)
        made = hidden * self.weight.sum()
        self.edit(hidden)
        return made + hidden @ self.weight


def _layers(edit):
    torch.manual_seed(4)
    layers = [_Layer(edit) for _ in range(2)]
    return torch.nn.Sequential(torch.nn.Linear(64, 64), *layers)


def _attached(toys, model, action="offload"):
    options = {"actions": _menu(action), "planner": toys.everywhere(action)}
    return mimose.attach(model, "1GiB", layers=_Layer, **options)


def test_an_edit_in_place_is_an_error(toys, sim):
    """As it is without hooks: a gradient of other values would be wrong."""
    model = _layers(lambda hidden: hidden.add_(1)).to("sim")
    x = torch.randn(64, 64).to("sim")
    with _attached(toys, model):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="edited in place"):
                model(x).sum().backward()


def test_an_edit_that_nobody_counts(toys, sim, caplog):
    """A layer that edits through ``.data`` between two saves is found out."""
    model = _layers(lambda hidden: hidden.data.add_(1)).to("sim")
    x = torch.randn(64, 64).to("sim")
    with _attached(toys, model):
        model(x).sum().backward()
        model.zero_grad()
        model(x).sum().backward()
    assert "edits saved tensors through .data" in caplog.text
