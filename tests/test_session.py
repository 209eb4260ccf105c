"""A session from attach to detach: what it touches, what it tells, what it leaves."""

import copy
import gc
import inspect
import itertools
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import mimose

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


def _is_broken_off(session, n_lines):
    """Detach, with Ctrl-C after so many lines of the undoing, if it has as many."""
    n_left = n_lines

    def trace(frame, event, _):
        nonlocal n_left
        code = frame.f_code
        is_ours = code.co_filename.endswith(("runtime/engine.py", "inputs/patch.py"))
        if not is_ours or code.co_name not in ("remove", "end", "_run_all"):
            return None
        n_left -= event == "line"
        if n_left < 0:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        session.detach()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_detach_that_is_broken_off(toys):
    """A second one finishes it: nothing is left, and the model is let go."""
    for n_lines in itertools.count(0, 3):
        model = toys.chain(2)
        session = mimose.attach(model, "1TiB", refine=False)
        if not _is_broken_off(session, n_lines):
            break
        session.detach()
        assert [] == toys.leftovers(model)
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None
    assert n_lines > 20


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


def test_deepcopy_gives_a_plain_model(toys):
    """A copy of an attached model trains like the bare one and is not planned."""
    model = toys.zoo_model("bert")
    batches = toys.zoo_batches("bert", 2)
    expected = toys.train(copy.deepcopy(model), batches)
    with mimose.attach(model, "1TiB", planner="full") as session:
        actual = toys.train(copy.deepcopy(model), batches)
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


def test_generate_is_untouched(toys):
    """GPT-2 generates as before, with its cache, and no step is recorded."""
    model = toys.zoo_model("gpt2")
    ids = torch.tensor([[5, 6, 7]])
    options = {
        "max_new_tokens": 8,
        "do_sample": False,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(ids),
    }
    expected = model.eval().generate(ids, **options)
    with mimose.attach(model, "1TiB") as session:
        assert torch.equal(expected, model.generate(ids, **options))
        assert model(ids).past_key_values is not None
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


class _WithInner(nn.Module):
    """Returns a loss and keeps an inner tensor for an auxiliary one."""

    def __init__(self, chain):
        super().__init__()
        self.chain = chain

    def forward(self, x):
        x = self.chain.stem(x)
        for block in self.chain.blocks:
            x = block(x)
            self.inner = x if block is self.chain.blocks[1] else self.inner
        return x.square().mean()

    inner = None


def _with_inner(toys):
    return _WithInner(toys.chain(4))


@PLANNERS
def test_an_auxiliary_loss_alone(toys, planner):
    """A backward that avoids the outputs is exact; its peak is not observed."""

    def run(model):
        for seed in (1, 2):
            loss = model(toys.inputs(seed=seed))
            model.inner.abs().mean().backward()
            model.inner = None
            del loss

    found, records = _compared(toys, _with_inner(toys), run, planner=planner)
    assert [] == found
    assert [None, None] == [record.observed_peak_bytes for record in records]
    if planner == "auto":
        assert all("through the outputs" in record.reason for record in records)


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


def test_records_tell_of_a_planned_step(toys, meter):
    """Every field of a planned step's record has its value."""
    model = toys.zoo_model("bert")
    batches = toys.text_batches([20, 33, 20, 33, 20, 33, 20])
    budget = toys.budget_between(model, batches[:2], 0.6, meter)
    _, session = toys.compare(model, batches, budget=budget, meter=meter)
    assert list(range(7)) == [record.step for record in session.records]
    record = session.records[-1]
    assert "plan" == record.phase
    assert 20 == record.shape["input_ids.1"]
    assert 3 == len(record.actions)
    assert budget == record.budget_bytes
    assert 0 < record.start_bytes < record.observed_peak_bytes <= budget
    assert record.observed_growth_bytes == pytest.approx(
        record.predicted_growth_bytes, rel=0.01
    )
    assert 0 < record.plan_seconds < record.seconds
    assert 3 == len(set(record.events))
    assert ("", 0) == (record.reason, record.retries)


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


def test_a_budget_of_the_process_is_kept(toys):
    """On the physical meter too, planned steps stay under a budget that needs plans."""
    pytest.importorskip("resource")
    model = toys.chain(6, width=64)
    batches = [toys.inputs(4_096, 64)] * 3
    with mimose.attach(model, "1TiB", planner="full", meter="process") as session:
        toys.train(model, batches)
    least = session.records[-1].observed_growth_bytes
    with mimose.attach(model, "1TiB", planner="none", meter="process") as session:
        toys.train(model, batches)
    most = session.records[-1].observed_growth_bytes
    start = session.records[-1].start_bytes
    assert most > 1.5 * least
    budget = int(start + (least + most) / 2)
    with mimose.attach(model, budget, meter="process") as session:
        toys.train(model, batches * 4)
    planned = [record for record in session.records if record.phase == "plan"]
    assert len(planned) >= 4
    assert {"keep", "recompute"} == set(planned[-1].actions)
    slack = 4 * 2**20
    assert max(r.observed_peak_bytes for r in planned) <= budget + slack
