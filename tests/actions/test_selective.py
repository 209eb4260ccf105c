"""Letting go what cheap operators rebuild: exact, freeing what it says, planned."""

import copy

import pytest

import mimose

ZOO = ("bert", "resnet")
REBUILDING = ("selective", "selective_more", "selective_all")
ACTIONS = ("keep", *REBUILDING, "recompute")
N_ROWS = (40, 96, 64, 48, 80, 56, 88, 72, 44, 92, 60, 76, 84, 52, 68)


@pytest.mark.parametrize("action", REBUILDING)
@pytest.mark.parametrize("name", ZOO)
def test_it_trains_like_the_bare_model(toys, freed, name, action):
    """Losses, gradients, buffers and random state, dropout on, at two shapes."""
    model = toys.zoo_model(name)
    batches = toys.zoo_batches(name, 8)
    how = {"actions": "selective", "planner": toys.everywhere(action)}
    found, session = toys.compare(model, batches, **how)
    assert [] == found
    assert {action} == {name for r in session.records for name in r.actions}
    # The toy's images shrink until tensors are as small as what tells them again.
    assert (max if name == "resnet" else min)(freed) > 0


def test_it_is_learned_and_planned(toys, meter):
    """Tried in place of keeping, then chosen by bytes: budget kept, growth foretold."""
    model = toys.chain(6, width=128)
    batches = [toys.inputs(4 * n, width=128) for n in N_ROWS * 3]
    with toys.untracked():
        bare = toys.train(copy.deepcopy(model), batches)
    budget = toys.budget_between(model, batches[:2], 0.6, meter)
    how = {"meter": meter, "actions": ACTIONS}
    with mimose.attach(model, budget, **how) as session:
        trained = toys.train(model, batches)
    records = list(session.records)
    tried = [r for r in records if "tried in place" in r.reason]
    planned = [r for r in records if r.phase == "plan" and r not in tried]
    chosen = [r for r in planned if "selective" in r.actions]
    assert [] == toys.differences(bare, trained)
    assert not any(record.is_over for record in records)
    assert 3 <= len(tried) <= 15
    assert len(chosen) >= 10
    assert max(abs(record.prediction_error) for record in planned[-15:]) < 0.01
    assert "selective" in session.report()


LARGE = {
    "bert": {"batch": 8, "length": 128},
    "vit": {"batch": 8, "height": 64, "width": 64},
    "resnet": {"batch": 4, "height": 64, "width": 64},
}


@pytest.mark.parametrize(
    ("name", "share"), [("bert", 0.75), ("vit", 0.8), ("resnet", 0.5)]
)
def test_it_frees_a_good_part_of_what_recomputing_frees(toys, name, share):
    """Between forward and backward: the more, the more is dropped."""
    held = {}
    (batch,) = toys.zoo_batches(name, 1, [LARGE[name]])
    for action in ACTIONS:
        model = toys.zoo_model(name)
        options = {"actions": ACTIONS, "planner": toys.everywhere(action)}
        with mimose.attach(model, "1TiB", **options):
            for _ in range(3):
                with toys.StorageTracker() as tracker:
                    loss = toys.forward(model, batch)
                    held[action] = tracker.live_bytes
                loss.backward()
                del loss
    most = held["keep"] - held["recompute"]
    freed = [held["keep"] - held[action] for action in REBUILDING]
    assert 0 < freed[0] < freed[1] < freed[2]
    assert share * most < freed[2] <= most
