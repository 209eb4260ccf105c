"""Layers whose recomputation cannot be right cost one step, whatever their number."""

import pytest
import torch

import mimose


@pytest.mark.parametrize("is_repeated", [False, True])
def test_the_whole_family_is_kept_after_one_step(toys, is_repeated):
    """A plain loop loses it; `session.step` gives what bare training gives."""

    def forward(model):
        toys.Grows.seen.clear()
        loss = model(torch.ones(2, 8)).sum()
        toys.Grows.seen.append(0)
        return loss

    model = toys.chain(3, 8, make=lambda width: toys.Grows(width, 0.0))
    bare = toys.copy.deepcopy(model)
    forward(bare).backward()
    with mimose.attach(model, budget="1TiB", planner="full") as session:
        if is_repeated:
            session.step(lambda: forward(model).backward())
        else:
            with pytest.raises(mimose.RecomputationError, match=r"2 .*session\.step"):
                forward(model).backward()
            model.zero_grad()
            forward(model).backward()
    for mine, plain in zip(model.parameters(), bare.parameters(), strict=True):
        assert torch.equal(mine.grad, plain.grad)
