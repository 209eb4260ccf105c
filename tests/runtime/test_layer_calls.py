"""Where the calls of units stand in a step, and where they stand outside of one."""

import torch

import mimose


def test_each_call_of_a_unit_is_an_event(toys, meter):
    """ALBERT's one layer makes as many events as it has calls, kept or not by each."""
    model = toys.zoo_model("albert")
    planner = toys.FixedActions(1, 0, 1)
    batches = toys.zoo_batches("albert", 5)[::2]
    found, session = toys.compare(model, batches * 2, planner=planner, meter=meter)
    assert [] == found
    assert ("recompute", "keep", "recompute") == session.records[-1].actions


def test_a_unit_called_outside_the_root_runs_plainly(toys):
    """Between steps a unit's own forward runs, and nothing is counted."""
    model = toys.chain(3)
    x = toys.inputs().requires_grad_()
    with mimose.attach(model, "1TiB", planner="full") as session:
        with toys.StorageTracker() as tracker:
            output = model.blocks[0](x)
            assert tracker.live_bytes > tracker.bytes_made(output)
        assert 0 == len(session.records)


def test_a_recomputed_step_holds_less(toys):
    """Under `full` only outputs are alive after the forward; under `none` all is."""
    held = {}
    for planner in ("full", "none"):
        model = toys.chain(6)
        with (
            mimose.attach(model, "1TiB", planner=planner),
            toys.StorageTracker() as tracker,
        ):
            loss = model(toys.inputs(256))
            held[planner] = tracker.live_bytes
        loss.backward()
    assert held["full"] < 0.5 * held["none"]


def test_a_cache_that_is_asked_for_is_made(toys):
    """Who passes `use_cache=True` in training means it, and nothing fails."""
    model = toys.zoo_model("gpt2")
    ids = torch.arange(12).reshape(2, 6)
    with mimose.attach(model, "1TiB", planner="none"):
        output = model(ids, labels=ids, use_cache=True)
        assert output.past_key_values is not None
        output.loss.backward()


def test_frozen_layers_are_no_part_of_plans(toys, meter):
    """A call that makes no gradients saves nothing, and is run as it is."""
    model = toys.chain(4)
    model.stem.requires_grad_(False)
    for block in model.blocks[:2]:
        block.requires_grad_(False)
    batches = [toys.inputs(n) for n in (8, 24)] * 5
    found, session = toys.compare(model, batches, meter=meter)
    assert [] == found
    assert {("blocks.2#0", "blocks.3#0")} == {r.events for r in session.records}
