"""Planning problems that are filled from what was learned, and the plans they give."""

import logging

import numpy as np
import pytest
import torch
from torch import nn
from toys import Chain

import mimose
from mimose.planners import peak_bytes
from mimose.planners.actions import EXACT_MENU

KEEP, RECOMPUTE = EXACT_MENU.names


def _trained(toys, meter, model, batches, **options):
    """Train under a session and hand it out, still attached."""
    session = mimose.attach(model, "1TiB", meter=meter, **options)
    toys.train(model, batches)
    return session


def test_the_problem_of_a_measured_shape(toys, meter):
    """Held bytes, costs and names of a chain are those that can be counted by hand."""
    model = toys.chain(3)
    with _trained(toys, meter, model, [toys.inputs(64)] * 3) as session:
        problem = session.planning_problem()
    assert ("blocks.0#0", "blocks.1#0", "blocks.2#0") == problem.calls
    assert (KEEP, RECOMPUTE) == problem.actions
    n_rows, width, floats = 64, 16, 4
    output = n_rows * width * floats
    # tanh's result, dropout's mask, and the output; recomputed: the output
    kept = 2 * output + output + output
    assert [[kept, output]] * 3 == problem.held_bytes.tolist()
    product = 2 * n_rows * width * 2 * width
    assert [[0.0, 2.0 * product + 10.0 * (kept - output)]] * 3 == problem.cost.tolist()
    assert problem.allowed.all()
    assert 2**40 == problem.budget_bytes


def test_the_problem_of_a_shape_never_seen(toys, meter):
    """What was learned at some shapes gives the exact held bytes of another."""
    model = toys.zoo_model("bert")
    batches = toys.text_batches([20, 33, 9, 26, 14, 38, 30, 12])
    with _trained(toys, meter, model, batches) as session:
        predicted = session.planning_problem({"attention_mask.1": 29})
    other = toys.zoo_model("bert")
    with _trained(toys, meter, other, toys.text_batches([29, 29])) as session:
        measured = session.planning_problem()
    np.testing.assert_allclose(
        predicted.held_bytes, measured.held_bytes, rtol=1e-9, atol=0
    )


@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet"])
def test_the_timeline_tells_the_peak_of_any_plan(toys, meter, name):
    """From steps that recompute all, the growth under mixed plans is told to 2%."""
    model = toys.zoo_model(name)
    (batch,) = toys.zoo_batches(name, 1)
    n_calls = 6 if name == "resnet" else 4 if name == "t5" else 3
    rng = np.random.default_rng(4)
    for _ in range(2):
        choice = rng.permutation([0, 1, *rng.integers(0, 2, n_calls - 2)])
        planner = toys.FixedActions(*choice.tolist())
        with toys.untracked():
            twin = toys.copy.deepcopy(model)
        with _trained(toys, meter, twin, [batch] * 5, planner=planner) as session:
            last = session.records[-1]
            problem = session.planning_problem(start_bytes=0)
        assert "plan" == last.phase
        predicted = float(peak_bytes(problem, choice.astype(np.intp)))
        assert last.observed_growth_bytes == pytest.approx(predicted, rel=0.02)


class _Rectified(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x):
        return torch.relu(x + self.down(torch.relu(self.up(x))))


class _Scores(nn.Module):
    """Layers that save their outputs, under logits as large as all of them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(_Rectified() for _ in range(4))
        self.head = nn.Linear(64, 2000)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_a_few_shapes_by_turns(meter):
    """No fit is ever trusted, but each shape tells of itself.

    The scores live until the next ones take their name, as in most loops.
    """
    torch.manual_seed(3)
    model = _Scores()
    with mimose.attach(model, "1TiB", meter=meter) as session:
        for n in (32, 512, 128) * 6:
            scores = model(torch.randn(n, 64))
            nn.functional.cross_entropy(
                scores, torch.zeros(n, dtype=torch.long)
            ).backward()
            model.zero_grad(set_to_none=True)
    planned = [record for record in session.records if "keep" in record.actions]
    assert len(planned) >= 6
    for record in planned[-6:]:
        expected = pytest.approx(record.observed_growth_bytes, rel=1e-3)
        assert expected == record.predicted_peak_bytes - record.start_bytes


def test_full_and_partial_masks_by_turns(toys, meter):
    """Two contexts of one structure by turns take fewer steps than each by itself."""
    model = toys.zoo_model("bert")
    batches = toys.text_batches([24, 8, 32, 16, 28, 12, 22, 30, 18, 10, 26, 20] * 2)
    for i, batch in enumerate(batches):
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
        if i % 2:
            batch["attention_mask"][0, -1] = 0
    found, session = toys.compare(model, batches, meter=meter)
    assert [] == found
    phases = [record.phase for record in session.records]
    assert phases.count("collect") < 2 * 7
    assert "plan" == phases[-1]


class _Hiding(Chain):
    """Gives its layers as many rows as a mask lets through."""

    def forward(self, x, chosen):
        return super().forward(x[chosen])


def test_rows_chosen_by_a_mask(toys, meter, caplog):
    """Sizes that the data decide are measured ever again, and one warning says so."""
    model = _Hiding(2)
    generator = torch.Generator().manual_seed(0)
    batches = []
    for n in [40, 60, 50] * 24:
        chosen = torch.rand(n, generator=generator) < 0.5
        chosen[:2] = torch.tensor([True, False])
        batches.append((toys.inputs(n), chosen))
    with caplog.at_level(logging.WARNING, logger="mimose"):
        found, session = toys.compare(model, batches, meter=meter)
    assert [] == found
    assert session.records[-1].reason
    texts = [record.getMessage() for record in caplog.records]
    told = [text for text in texts if "steps all recomputed everything" in text]
    assert 1 == len(told)
    assert session.records[-1].reason in told[0]
