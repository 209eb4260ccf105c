"""Where the calls of layers stand in a step, and where they stand outside of one."""

import torch

import mimose


def test_each_call_of_a_layer_is_an_event(toys, meter):
    """Each call of ALBERT's one layer is measured, kept or not by each."""
    model = toys.zoo_model("albert")
    planner = toys.FixedActions(1, 0, 1)
    batches = toys.zoo_batches("albert", 5)[::2]
    found, session = toys.compare(model, batches * 2, planner=planner, meter=meter)
    assert [] == found
    assert ("recompute", "keep", "recompute") == session.records[-1].actions


def test_a_layer_called_outside_the_root_runs_plainly(toys):
    """Between steps a layer's own forward runs, and nothing is counted."""
    model = toys.chain(3)
    x = toys.inputs().requires_grad_()
    with mimose.attach(model, "1TiB", planner="full") as session:
        with toys.StorageTracker() as tracker:
            output = model.blocks[0](x)
            assert tracker.live_bytes > tracker.bytes_made(output)
        assert 0 == len(session.records)


def test_a_cache_that_is_asked_for_is_made(toys):
    """Who passes `use_cache=True` in training means it, and nothing fails."""
    model = toys.zoo_model("gpt2")
    ids = torch.arange(12).reshape(2, 6)
    with mimose.attach(model, "1TiB", planner="none"):
        output = model(ids, labels=ids, use_cache=True)
        assert output.past_key_values is not None
        output.loss.backward()
