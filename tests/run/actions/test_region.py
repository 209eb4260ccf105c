"""A call in a region of our own equals a plain call, whatever its backward does."""

import copy
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import mimose
from mimose.exact.attributes import HeldObjects
from mimose.exact.handed import Knowledge
from mimose.exact.late_answers import LateAnswers
from mimose.exceptions import ChangedWeightsError, RecomputationError
from mimose.run.actions import checkpointing, region
from mimose.run.actions.region import Inputs, Region
from mimose.run.findings import Findings
from mimose.run.unit import Unit

WIDTH = 8


class _Unit(Unit):
    """A unit that takes note of why it is kept."""

    def __init__(self, module):
        findings, answers = Findings((), None), LateAnswers()
        known = Knowledge(), answers, HeldObjects()
        super().__init__(0, "the layer", module, findings, *known)
        self.kept = []
        self.guard.watch(())

    def keep_alike(self, why):
        """Take note that it is kept."""
        self.kept.append(why)


def _regional(module):
    """Return a function that calls a module in a region."""
    unit = _Unit(module)

    def call(*args, **kwargs):
        inputs = Inputs.of(args, kwargs)
        assert inputs is not None
        return Region(unit, inputs).run(args, kwargs)

    call.unit = unit
    return call


class _Layer(nn.Module):
    """Draws, saves views and numbers, and takes tensors in every way it is served."""

    def __init__(self, inner=None):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.inner = inner

    def forward(self, x, pair=None, *, scale=1.0, shift=None):
        """Map (rows, WIDTH) to the same."""
        y = self.dropout(torch.tanh(self.up(x)))
        if self.inner is not None:
            y = self.inner(self.up, y, x)
        y = self.down(y) * scale
        if pair is not None:
            y = y * pair[0] + (2.0 if pair[0] is pair[1] else 1.0) * pair[1]
        return x + (y if shift is None else y + shift).sigmoid()


def _layer(inner=None):
    torch.manual_seed(0)
    return _Layer(inner)


def _x(rows=5, seed=7):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator, requires_grad=True)


def _both(work, inner=None):
    """Return what work gives of a plain layer, and of one in a region."""
    results = []
    for wrap in (lambda module: module, _regional):
        module = _layer(inner)
        torch.manual_seed(1)
        found = work(wrap(module), module)
        grads = [p.grad for p in module.parameters()]
        results.append([*found, *grads, torch.get_rng_state()])
    return results


def _assert_equal(results):
    for one, other in zip(*results, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize(
    "call",
    [
        lambda f, x, y, z: f(x),
        lambda f, x, y, z: f(x * 1, scale=0.5, shift=y),
        lambda f, x, y, z: f(x=x * 2, pair=(y * 1, z)),
        lambda f, x, y, z: f(x, (z, z)),
    ],
)
def test_arguments_of_every_kind_that_is_served(call):
    """Leaves and others, by name, in tuples and twice: all get their gradients."""

    def work(f, _):
        tensors = _x(seed=1), _x(seed=2), _x(seed=3)
        call(f, *tensors).square().sum().backward()
        return [tensor.grad for tensor in tensors]

    _assert_equal(_both(work))


@pytest.mark.parametrize(
    "value", [[torch.ones(2)], {"a": torch.ones(2)}, object(), nn.Linear(1, 1)]
)
def test_other_arguments_are_not_served(value):
    """What the callee may change, or whose parts nobody knows, is `checkpoint`'s."""
    assert Inputs.of((value,), {}) is None
    assert Inputs.of((), {"value": (1, value)}) is None


def test_inference_tensors_are_not_served():
    """Nobody counts their changes."""
    with torch.inference_mode():
        value = torch.ones(2)
    assert Inputs.of((value,), {}) is None


def test_retained_partial_and_double_backwards():
    """Each runs the forward again with the same numbers, and is exact."""

    def work(f, module):
        x = _x()
        loss = f(f(x)).square().sum()
        (some,) = torch.autograd.grad(loss, [module.down.weight], retain_graph=True)
        (grad,) = torch.autograd.grad(loss, [x], create_graph=True)
        (loss + grad.square().sum()).backward(retain_graph=True)
        loss.backward()
        return [some, grad.detach(), x.grad]

    _assert_equal(_both(work))


def test_backward_inside_the_forward():
    """A gradient that the layer takes of itself is that of the bare layer."""

    def inner(up, y, x):
        (grad,) = torch.autograd.grad(up(x).sin().sum(), x, retain_graph=False)
        return y * (1 + grad.detach().sum(1, keepdim=True))

    def work(f, _):
        x = _x()
        f(x).sum().backward()
        return [x.grad]

    _assert_equal(_both(work, inner))


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_region_of_the_users_inside(is_reentrant):
    """`checkpoint` inside of the layer is run again within it."""

    def inner(up, y, x):
        def part(z):
            return torch.dropout(up(z).cos(), 0.2, train=True)

        return y * checkpoint(part, x, use_reentrant=is_reentrant)

    def work(f, _):
        x = _x()
        f(f(x)).sum().backward()
        return [x.grad]

    _assert_equal(_both(work, inner))


@pytest.mark.parametrize("backward_is_inside", [False, True])
@pytest.mark.parametrize("forward_is_inside", [False, True])
def test_autocast_is_that_of_the_forward(forward_is_inside, backward_is_inside):
    """On or off, wherever the backward is called."""

    def work(f, _):
        x = _x()
        with torch.autocast("cpu", torch.bfloat16, enabled=forward_is_inside):
            loss = f(f(x)).float().square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=backward_is_inside):
            loss.backward()
        return [x.grad]

    _assert_equal(_both(work))


def test_modes_are_those_of_the_forward():
    """A layer put into evaluation since draws again what it drew."""

    def work(f, module):
        x = _x()
        loss = f(x).sum()
        module.eval()
        loss.backward(retain_graph=True)
        assert not module.dropout.training
        loss.backward()
        return [x.grad]

    _assert_equal(_both(work))


def test_backwards_in_two_threads():
    """Two graphs of one layer go backward at once."""

    def work(f, _):
        inputs = [_x(seed=seed) for seed in range(4)]
        losses = [f(f(x)).square().sum() for x in inputs]
        threads = [
            threading.Thread(target=torch.autograd.grad, args=(loss, [x], None, True))
            for loss, x in zip(losses, inputs, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sum(losses).backward()
        return [x.grad for x in inputs]

    _assert_equal(_both(work))


def test_nothing_is_held_but_inputs_and_outputs(toys):
    """And what was recomputed goes with the backward that asked for it."""
    module, x = toys.Block(), torch.randn(6, 16)
    call = _regional(module)
    with toys.StorageTracker() as tracker:
        output = call(x)
        assert tracker.bytes_made(output) == tracker.live_bytes
        output.sum().backward(retain_graph=True)
        module.zero_grad()
        assert tracker.bytes_made(output) == tracker.live_bytes


def test_a_graph_that_is_let_go_lets_its_inputs_go():
    """No ring holds what a call was given, with a backward or without."""
    call = _regional(_layer())
    for has_backward in (False, True):
        x = _x() * 1
        output, gone = call(x), weakref.ref(x.untyped_storage())
        del x
        if has_backward:
            output.sum().backward()
        del output
        assert gone() is None


def test_the_recomputation_stops_early(toys):
    """A last product whose result nobody saved is not run again."""
    module, x = toys.Block(rate=0.0), torch.randn(6, 16)
    found = []
    for call in (
        _regional(module),
        lambda x: checkpointing.recompute(module.forward, (x,), {}),
    ):
        call(x).sum().backward()  # the first one runs whole
        output = call(x)
        with FlopCounterMode(display=False) as counter:
            output.sum().backward()
        found.append(counter.get_total_flops())
    assert found[0] == found[1]


def test_a_saved_tensor_can_be_looked_at_outside_of_a_backward():
    """Each look runs the forward again, and leaves nothing behind."""
    call, x = _regional(nn.Tanh()), _x()
    output = call(x)
    assert torch.equal(x.tanh(), output.grad_fn._saved_result)
    assert torch.equal(x.tanh(), output.grad_fn._saved_result)


def test_changed_weights_are_refused():
    """Recomputed with them it would give other gradients."""
    module = _layer()
    output = _regional(module)(_x())
    with torch.no_grad():
        module.up.weight.mul_(2)
    with pytest.raises(ChangedWeightsError, match="the layer"):
        output.sum().backward()


def test_an_edited_input_is_refused():
    """It is not what the forward read; the layer is kept from then on."""
    call, x = _regional(_layer()), _x() * 1
    output = call(x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RecomputationError, match="its input was edited in place"):
        output.sum().backward()
    assert len(call.unit.kept) == 1


@pytest.mark.parametrize("first", [1, 3])
def test_other_saved_tensors_are_refused(first):
    """Fewer of them, or more."""
    widths = iter([first, 2])

    def inner(up, y, x):
        n = next(widths)
        return y if n == 1 else y.repeat(n, 1).exp()[: len(y)].tanh()

    call = _regional(_layer(inner))
    output = call(_x())
    with pytest.raises(RecomputationError, match="other tensors"):
        output.sum().backward()


def test_planned_steps_run_in_regions(toys, monkeypatch):
    """Once all is known `checkpoint` is not called any more, and steps are exact."""
    batches = [toys.inputs(rows) for rows in (8, 6) * 6]
    bare = toys.train(toys.chain(4), batches)
    called = []
    for owner, name in ((region.Region, "run"), (checkpointing, "checkpoint")):
        monkeypatch.setattr(owner, name, _noting(getattr(owner, name), called))
    model = toys.chain(4)
    options = {"planner": toys.FixedActions(1, 0, 1, 1), "meter": toys.BlindMeter()}
    with mimose.attach(model, "1TiB", **options) as session:
        steps = toys.train(model, batches)
    assert "recompute" == session.records[-1].actions[0]
    assert ["Region.run"] * 6 == called[-6:]
    assert [] == toys.differences(bare, steps)


def _noting(run, called):
    def noting(*given, **named):
        called.append(run.__qualname__)
        return run(*given, **named)

    return noting


@pytest.mark.parametrize("rows", [16, 24])
def test_weights_that_learn_again_before_the_backward(toys, rows):
    """A critic frozen for its generator's step alone, square shapes or not."""
    model = toys.chain(3)
    bare = copy.deepcopy(model)

    def train(critic):
        found = []
        for step in range(6):
            torch.manual_seed(step)
            x = torch.randn(rows, 16).requires_grad_()
            critic.requires_grad_(step % 2 == 0)
            loss = critic(x).square().mean()
            critic.requires_grad_(True)
            loss.backward()
            grads = [p.grad for p in critic.parameters()]
            found.append([x.grad, *(None if g is None else g.clone() for g in grads)])
            critic.zero_grad()
        return found

    expected = train(bare)
    with mimose.attach(model, "1TiB", planner="full"):
        actual = train(model)
    for one, other in zip(expected, actual, strict=True):
        _assert_equal((one, other))
