"""A session from attach to detach: what it touches, what it tells, what it leaves."""

import copy
import gc
import inspect
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from toys import Chain

import mimose
from mimose.model.patch import Patch

ZOO = ("bert", "resnet")


def _state(model):
    """Return all that has to be as before: names, keys and what is on each module."""
    return (
        [name for name, _ in model.named_modules()],
        list(model.state_dict()),
        [sorted(vars(module)) for module in model.modules()],
        [type(module) for module in model.modules()],
    )


class _Failing(nn.Module):
    """A block that fails in forward or backward when it is told to."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.fails_in = ""

    def forward(self, x):
        if self.fails_in == "forward":
            msg = "told to fail in forward"
            raise ArithmeticError(msg)
        y = torch.tanh(self.linear(x))
        if self.fails_in == "backward":
            y.register_hook(self._fail)
        return x + y

    def _fail(self, _):
        msg = "told to fail in backward"
        raise ArithmeticError(msg)


def test_a_detach_that_is_broken_off(toys, monkeypatch):
    """A second one finishes it: nothing is left, and the model is let go."""
    remove, n_left = Patch.remove, [0]

    def break_off(patch):
        n_left[0] -= 1
        if n_left[0] == 0:
            raise KeyboardInterrupt
        remove(patch)

    monkeypatch.setattr(Patch, "remove", break_off)
    for n_left[0] in (1, 2, 3):
        model = toys.chain(2)
        session = mimose.attach(model, "1TiB", refine=False)
        with pytest.raises(KeyboardInterrupt):
            session.detach()
        session.detach()
        assert [] == toys.leftovers(model)
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize("name", ZOO)
def test_nothing_is_left_after_use(toys, name):
    """Names, keys, attributes, classes and hooks are as before, and the signature."""
    model = toys.zoo_model(name)
    before, signature = _state(model), inspect.signature(model.forward)
    assert [] == toys.leftovers(model)
    with mimose.attach(model, "1TiB"):
        assert before[:2] == _state(model)[:2]
        assert signature == inspect.signature(model.forward)
        toys.train(model, toys.zoo_batches(name, 2))
    assert before == _state(model)
    assert [] == toys.leftovers(model)


@pytest.mark.parametrize("planner", ["auto", "full"])
@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_the_step_after_an_exception_is_exact(toys, fails_in, planner):
    """A caught exception is the user's own, and leaves nothing behind to notice."""
    model = toys.chain(3, make=_Failing)
    twin, before = copy.deepcopy(model), _state(model)
    with mimose.attach(model, "1TiB", planner=planner) as session:
        model(toys.inputs()).backward()
        model.blocks[1].fails_in = fails_in
        with pytest.raises(ArithmeticError, match=f"told to fail in {fails_in}"):
            model(toys.inputs()).backward()
        model.blocks[1].fails_in = ""
        model.zero_grad()
        actual = toys.train(model, [toys.inputs()] * 2)
    assert [] == toys.differences(toys.train(twin, [toys.inputs()] * 2), actual)
    assert (before, []) == (_state(model), toys.leftovers(model))
    failed = session.records[1]
    assert failed.observed_peak_bytes is None
    words = {"forward": "ArithmeticError", "backward": "did not run to its end"}
    assert words[fails_in] in failed.reason
    later = list(session.records)[2:]
    assert 2 == len(later)
    assert None not in [record.observed_peak_bytes for record in later]
    assert "several forwards" not in "".join(record.reason for record in later)


def test_detaching_twice_is_harmless(toys):
    """The second detach finds nothing to do, also where another session came."""
    model = toys.chain(2)
    first = mimose.attach(model, "1TiB")
    first.detach()
    second = mimose.attach(model, "1TiB")
    first.detach()
    with pytest.raises(mimose.AlreadyAttachedError):
        mimose.attach(model, "1TiB")
    second.detach()
    assert [] == toys.leftovers(model)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_a_copy_is_a_plain_model(toys, copied):
    """A copy of an attached model trains like the bare one and is not planned."""
    model = toys.zoo_model("bert")
    batches = toys.zoo_batches("bert", 2)
    expected = toys.train(copy.deepcopy(model), batches)
    with mimose.attach(model, "1TiB", planner="full") as session:
        actual = toys.train(copied(model), batches)
    assert [] == toys.differences(expected, actual)
    assert 0 == len(session.records)


# ---------------------------------------------------------------------- not training


def test_evaluation_passes_straight_through(toys):
    """Eval mode and no_grad are neither planned nor counted, and change nothing."""
    model = toys.zoo_model("bert")
    (batch,) = toys.zoo_batches("bert", 1)
    torch.manual_seed(0)
    with torch.no_grad():
        expected = [model(**batch).logits, model.eval()(**batch).logits]
    model.train()
    with mimose.attach(model, "1TiB", planner="full") as session:
        torch.manual_seed(0)
        with torch.no_grad():
            actual = [model(**batch).logits, model.eval()(**batch).logits]
        graded = model(**batch).logits
        graded.sum().backward()
    assert all(map(torch.equal, expected, actual))
    assert torch.equal(expected[1], graded)
    assert 0 == len(session.records)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_no_cache_in_training_and_the_configuration_is_untouched(toys, name):
    """A training call makes no keys and values; what would be saved is as before."""
    model = toys.zoo_model(name)
    (batch,) = toys.zoo_batches(name, 1)
    before = model.config.to_json_string()
    assert model(**batch).past_key_values is not None
    for planner in ("none", "full"):
        with mimose.attach(model, "1TiB", planner=planner):
            assert model(**batch).past_key_values is None
            assert before == model.config.to_json_string()
            assert model.eval()(**batch).past_key_values is not None
            model.train()
    assert model(**batch).past_key_values is not None


# ---------------------------------------------------------------------- patterns


def _loss(model, seed=5, rows=8):
    return model(torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed)))


def _compared(toys, model, run, **options):
    """Run a pattern bare and planned; return the differences and the records."""
    twin = copy.deepcopy(model)
    torch.manual_seed(1)
    run(twin)
    expected = toys.note(twin, torch.zeros(()))
    torch.manual_seed(1)
    with mimose.attach(model, "1TiB", **options) as session:
        run(model)
        actual = toys.note(model, torch.zeros(()))
    return toys.differences([expected], [actual]), list(session.records)


PLANNERS = pytest.mark.parametrize("planner", ["auto", "full"])


@PLANNERS
def test_no_backward(toys, planner):
    """A forward whose graph is dropped closes without a peak; the next is a step."""

    def run(model):
        _loss(model, 1)
        _loss(model, 2).backward()

    found, records = _compared(toys, toys.chain(3), run, planner=planner)
    assert [] == found
    assert "no backward followed" in records[0].reason
    assert "backward" not in records[1].reason
    assert records[0].observed_peak_bytes is None
    assert records[1].observed_peak_bytes is not None
    assert 0 == records[0].recomputed_flops


class _WithInner(Chain):
    """Returns a loss and keeps an inner tensor for an auxiliary one."""

    inner = None

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            self.inner = x if block is self.blocks[1] else self.inner
        return x.square().mean()


@PLANNERS
def test_an_auxiliary_loss_alone(toys, planner):
    """A backward that avoids the outputs is exact; its peak is not observed."""

    def run(model):
        for seed in (1, 2):
            loss = model(toys.inputs(seed=seed))
            model.inner.abs().mean().backward()
            model.inner = None
            del loss

    found, records = _compared(toys, _WithInner(4), run, planner=planner)
    assert [] == found
    assert [None, None] == [record.observed_peak_bytes for record in records]
    if planner == "auto":
        assert all("through the outputs" in record.reason for record in records)


def test_a_detach_within_a_forward_that_fails(toys):
    """The user's error stays what it is."""
    model = toys.chain(3)
    session = mimose.attach(model, "1TiB")

    def fail(*_):
        session.detach()
        raise ValueError

    hook = model.blocks[1].register_forward_hook(fail)
    with pytest.raises(ValueError):
        model(toys.inputs())
    hook.remove()
    model(toys.inputs()).backward()
    assert [] == list(session.records)


def test_a_backward_after_detach(toys):
    """Detaching between forward and backward leaves the gradients right."""
    model = toys.chain(3)
    torch.manual_seed(1)
    model(toys.inputs()).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(1)
    session = mimose.attach(model, "1TiB")
    loss = model(toys.inputs())
    session.detach()
    loss.backward()
    assert all(map(torch.equal, expected, [p.grad for p in model.parameters()]))
    assert "detached" in session.records[0].reason


def test_a_session_that_is_forgotten_goes_with_its_model(toys):
    """Hooks that torch has for all optimizers hold neither."""
    model = toys.chain(3)
    mimose.attach(model, "1TiB", refine=False)
    alive = weakref.ref(model)
    toys.train(model, [toys.inputs(n) for n in (8, 9, 10)])
    del model
    gc.collect()
    assert alive() is None
    assert toys.leftovers(toys.chain(1)) == []


@pytest.mark.parametrize("actions", ["auto", "all"])
def test_a_detached_session_lets_the_model_go(toys, actions):
    """What it tells stays the same; what takes a model is refused in plain words."""
    model = toys.chain(3)
    loader = DataLoader([toys.inputs(n) for n in (8, 9, 10) * 4], batch_size=None)
    session = mimose.attach(model, "1TiB", actions=actions, refine=False)
    watched = session.watch(loader), session.watch(iter(list(loader)))
    toys.train(model, watched[0])
    shape = {"x.0": 9}
    session.explain(shape), session.forecast(shape)
    session.detach()
    told = session.report(), session.summary(), session.state_dict(), session.peak_bytes
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    session.detach()
    assert told == (
        session.report(),
        session.summary(),
        session.state_dict(),
        session.peak_bytes,
    )
    assert 12 == len(session.records)
    assert "keep" in session.explain(shape)
    assert 3 == len(session.planning_problem(shape).calls)
    assert session.watch(loader) is loader
    assert [12, 12] == [len(list(batches)) for batches in watched]
    for refused in (
        lambda: session.step(lambda: None),
        lambda: session.expect([shape]),
        lambda: session.forecast(shape),
        lambda: session.load_state_dict(told[2]),
    ):
        with pytest.raises(mimose.MimoseError, match="the session was detached"):
            refused()


# ---------------------------------------------------------------------- phases, text


def test_report_and_explain_are_text_for_people(toys, meter):
    """The report names the budget; the explanation names every call."""
    model = toys.chain(4)
    batches = [toys.inputs(n) for n in (8, 24) * 4]
    _, session = toys.compare(model, batches, budget="1GiB", meter=meter)
    assert "1.00 GiB" in session.report()
    text = session.explain({"x.0": 24})
    assert [] == [f"blocks.{i}#0" for i in range(4) if f"blocks.{i}#0" not in text]
    with pytest.raises(mimose.MimoseError, match=r"there is no size 'length'"):
        session.explain({"length": 24})
