"""What a user can get wrong, and what is said to it."""

import logging
import re

import pytest
import torch
from torch import nn
from toys import Chain

import mimose


def test_an_impossible_budget(toys, meter):
    """Two steps at most, then an error with the numbers and what holds them."""
    model = toys.zoo_model("bert")
    batches = toys.text_batches([34] * 4)
    budget = int(0.9 * toys.budget_between(model, batches[:2], 0.0, meter))
    with (
        pytest.raises(mimose.InfeasibleBudgetError) as caught,
        mimose.attach(model, budget, meter=meter) as session,
    ):
        toys.train(model, batches)
    assert 1 <= len(session.records) <= 2
    error = caught.value
    assert budget == error.budget_bytes
    assert budget < error.least_peak_bytes
    assert {"parameters", "optimizer state"} & set(error.holders)
    assert error.least_peak_bytes == pytest.approx(
        sum(error.holders.values()), rel=0.05
    )
    assert f"{budget / 2**20:.1f} MiB" in str(error)
    assert [] == toys.leftovers(model)


def test_a_budget_below_what_is_held_already(toys, tmp_path):
    """It is refused at attach, with what holds it, and nothing is left behind."""
    model = toys.chain(3)
    with pytest.raises(mimose.InfeasibleBudgetError) as caught:
        mimose.attach(model, "20MiB", record_to=tmp_path / "run.jsonl")
    assert [] == list(tmp_path.iterdir())
    assert 20 * 2**20 == caught.value.budget_bytes
    assert caught.value.least_peak_bytes > 100 * 2**20
    assert [] == toys.leftovers(model)


def test_an_impossible_budget_with_a_warning(toys, meter, caplog):
    """`on_infeasible="warn"` trains on exactly, with the least plan and a warning."""
    model = toys.zoo_model("bert")
    batches = toys.zoo_batches("bert", 8)
    budget = int(0.9 * toys.budget_between(model, batches[:2], 0.0, meter))
    with caplog.at_level(logging.WARNING, logger="mimose"):
        found, session = toys.compare(
            model, batches, budget=budget, meter=meter, on_infeasible="warn"
        )
    assert [] == found
    assert 8 == len(session.records)
    assert 0 < session.summary().steps_over
    assert all("recompute" in record.actions for record in session.records)
    told = [r for r in caplog.records if "goes on with the least plan" in r.message]
    assert 1 == len(told)
    assert re.search(r"was recomputed: such a step needs a budget of", caplog.text)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("actions", ("keep", "forget")),
        ("actions", "lean"),
        ("budget", "plenty"),
        ("planner", "clever"),
        ("predictor", "oracle"),
        ("cache_size", 0),
        ("wall", "no"),
        ("refine", 2),
        ("record_to", "."),
    ],
)
def test_arguments_that_mean_nothing(toys, argument, value):
    """Every choice that does not exist is a ValueError that echoes the value."""
    model = toys.chain(2)
    echoed = value if isinstance(value, str) else repr(value)
    with pytest.raises(ValueError) as caught:
        mimose.attach(model, **{"budget": "1TiB", argument: value})
    assert echoed in str(caught.value)
    assert [] == toys.leftovers(model)


@pytest.mark.parametrize("ask", ["explain", "forecast", "planning_problem"])
def test_a_shape_that_is_none(toys, ask):
    """A number in place of names and sizes is an error with an example."""
    model = toys.chain(2)
    with mimose.attach(model, "3GiB") as session:
        toys.train(model, [toys.inputs(8)])
        with pytest.raises(TypeError, match="input_ids"):
            getattr(session, ask)(5)


@pytest.mark.parametrize(
    ("argument", "said"),
    [("round_to", "no longer"), ("palnner", "'palnner'.*'planner'.*budget, layers, ")],
)
def test_arguments_that_are_not_there(toys, argument, said):
    """What went, and what is misspelt, is an error in words."""
    model = toys.chain(2)
    with pytest.raises(TypeError, match=said):
        mimose.attach(model, "1TiB", **{argument: 8})
    assert [] == toys.leftovers(model)


def test_a_model_without_layers():
    """Nothing to plan for is an error that says what to pass."""
    with pytest.raises(mimose.NoUnitsError, match=r"attach\(layers="):
        mimose.attach(nn.Linear(2, 2), "1TiB")


class _Weightless(Chain):
    """Makes its own input."""

    def forward(self, n_rows=4):
        return super().forward(torch.ones(n_rows, 16))


def test_inputs_without_tensors(toys):
    """There is no shape to plan for: everything is recomputed, exactly, and said so."""
    model = _Weightless(3)
    found, session = toys.compare(model, [()] * 3)
    assert [] == found
    assert {"fallback"} == {record.phase for record in session.records}
    assert {"recompute"} == {a for record in session.records for a in record.actions}
    assert all("no tensors" in record.reason for record in session.records)


def test_a_second_attach(toys):
    """A model, what contains it and what it contains have one session together."""
    model = toys.chain(2)
    whole = nn.Sequential(model)
    with mimose.attach(model, "3GiB"):
        for other in (model, whole, model.blocks):
            with pytest.raises(mimose.AlreadyAttachedError, match=r"session.*detach"):
                mimose.attach(other, "1TiB", layers=toys.Block)
    mimose.attach(model, "1TiB").detach()
    assert [] == toys.leftovers(model)


def _checkpointing(model, what):
    """Call a method whose name has changed with transformers' versions."""
    names = (f"{word}_checkpointing_{what}" for word in ("activation", "gradient"))
    next(getattr(model, name) for name in names if hasattr(model, name))()


def test_the_models_own_checkpointing_before(toys):
    """A model that checkpoints by itself is refused, with the way out."""
    model = toys.zoo_model("bert")
    _checkpointing(model, "enable")
    with pytest.raises(mimose.CheckpointingConflictError, match="switched on"):
        mimose.attach(model, "1TiB")
    _checkpointing(model, "disable")
    mimose.attach(model, "1TiB").detach()


def test_the_models_own_checkpointing_after(toys):
    """Switched on under a session, it is refused at the next new shape."""
    model = toys.zoo_model("bert")
    with mimose.attach(model, "1TiB"):
        _checkpointing(model, "enable")
        with pytest.raises(mimose.CheckpointingConflictError, match="switched on"):
            toys.train(model, toys.zoo_batches("bert", 1))


def _refuse(*_, **__):
    msg = "not here"
    raise OSError(msg)


@pytest.mark.parametrize("how", ["named", "found out"])
def test_a_peak_that_cannot_be_read(toys, monkeypatch, caplog, how):
    """Planning goes on by prediction; no peak is observed, no margin learned."""
    model = toys.chain(4)
    batches = [toys.inputs(n) for n in (16, 64, 32, 48, 24, 40) * 3]
    if how == "found out":
        monkeypatch.setattr("mimose.memory.meters.os.open", _refuse)
    with caplog.at_level(logging.WARNING, logger="mimose"):
        found, session = toys.compare(
            model, batches, meter="prediction" if how == "named" else None
        )
    assert [] == found
    assert [None] * 18 == [record.observed_peak_bytes for record in session.records]
    assert (how == "found out") == ("cannot be read here" in caplog.text)
    assert "plan" == session.records[-1].phase
    assert session.records[-1].predicted_peak_bytes is not None


@pytest.mark.parametrize("is_first", [True, False])
def test_inputs_on_another_device(toys, is_first):
    """The error names the input and both devices, also at a shape seen before."""
    model = toys.chain(2)
    x = toys.inputs()
    with mimose.attach(model, "1TiB") as session:
        if not is_first:
            model(x).backward()
        n_steps = len(session.records)
        with pytest.raises(mimose.MimoseError, match=r"on cpu, but .* on meta"):
            model(x.to("meta"))
        model(x).backward()
    assert n_steps + 1 == len(session.records)
