"""Ways to train: exact, told beforehand, and the published system rebuilt."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from torch.utils.flop_counter import FlopCounterMode

from mimose.bench.grid.strategies import STRATEGIES, PaperMimose, Setup
from mimose.bench.grid.worker import Task, Worker
from mimose.bench.step_meter import budget_meter

MIB = 2**20
CPU = torch.device("cpu")
LENGTHS = [12, 30, 18, 40, 25, 14, 36, 22, 33, 16, 11, 39, 20]


def _setup(model, meter=None, headroom=2**40):
    return Setup(
        model=model,
        device=CPU,
        meter=meter or budget_meter(CPU),
        headroom_bytes=headroom,
        sizes=[{"length": length} for length in LENGTHS],
        longest={"length": max(LENGTHS)},
        try_step=lambda _: None,
        shared=Path(),
    )


def test_recomputing_is_exact_and_the_model_is_given_back(toys):
    """A session and transformers recompute as much; every second layer half of it."""
    model = toys.zoo_model("bert", num_hidden_layers=4)
    (batch,) = toys.text_batches([32])

    def step():
        torch.manual_seed(1)
        with FlopCounterMode(display=False) as counter:
            loss = model(**batch).loss
            loss.backward()
        noted = toys.note(model, loss)
        model.zero_grad()
        return [noted], counter.get_total_flops()

    bare, flops = step()
    redone = {}
    for name in ("full", "every-2", "hf-full", "hf-every-2"):
        applied = STRATEGIES[name].apply(_setup(model))
        found, more = step()
        assert [] == toys.differences(bare, found)
        redone[name] = more - flops
        applied.close()
        assert not any("forward" in vars(module) for module in model.modules())
        assert [] == toys.differences(bare, step()[0])
    assert 0 < redone["full"] == redone["hf-full"]
    assert redone["every-2"] == redone["hf-every-2"] == redone["full"] // 2


def test_an_estimator_of_scikit_learn_makes_plans(toys, meter):
    """It fits each quantity, plans within the budget, and gradients stay exact."""
    lengths = 2 * LENGTHS
    plain, _ = _train(toys, toys.zoo_model("bert"), lengths=lengths)
    model = toys.zoo_model("bert")
    applied = STRATEGIES["mimose-sklearn"].apply(_setup(model, meter, 2**22))
    losses, facts = _train(toys, model, applied, lengths)
    applied.close()
    assert losses == plain
    assert "plan" in {fact.phase for fact in facts}


@pytest.mark.sim
def test_a_process_trains_on_the_simulated_accelerator(sim, tmp_path):
    """Reserved bytes are read, and stay within the headroom that it was given."""
    sizes = [{"length": n} for n in (40, 90, 60, 120, 80, 100, 70, 110)]
    task = Task(
        **{"workload": "tc-bert", "strategy": "mimose", "scale": "tiny"},
        **{"sizes": sizes, "longest": None, "headroom_bytes": 200 * MIB, "seed": 0},
        **{"device": "sim", "dtype": "float32", "threads": 1, "shared": str(tmp_path)},
    )
    worker = Worker(task)
    steps = [worker.step(index) for index in range(len(sizes))]
    worker.close()
    assert "plan" in {step["phase"] for step in steps}
    for step in steps:
        assert step["reserved_bytes"] % (2 * MIB) == 0
        assert 0 < step["reserved_bytes"] <= step["base_bytes"] + 200 * MIB


# ------------------------------------------------------------- the published system


def _train(toys, model, applied=None, lengths=LENGTHS):
    """Train on each length; return the losses, and each step's phase and plan."""
    torch.manual_seed(0)
    losses, facts = [], []
    for length, batch in zip(lengths, toys.text_batches(lengths), strict=True):
        if applied is not None:
            applied.before_step({"length": length})
        loss = model(**batch).loss
        loss.backward()
        model.zero_grad()
        losses.append(loss.item())
        if applied is not None:
            facts.append(applied.facts())
    return losses, facts


def test_it_measures_ten_steps_and_then_plans_by_length(toys, meter):
    """Short batches keep what the longest recompute; losses are plain training's."""
    plain, _ = _train(toys, toys.zoo_model("bert"))
    model = toys.zoo_model("bert")
    counts = []
    for headroom in (2**20, 2**22, 2**24):
        applied = PaperMimose(_setup(model, meter, headroom))
        losses, facts = _train(toys, model, applied)
        applied.close()
        assert losses == plain
        assert [f.phase for f in facts] == ["collect"] * 10 + ["plan"] * 3
        counts.append([f.plan.count("r") for f in facts[10:]])
    assert all(short <= longest for short, longest, _ in counts)
    assert any(short < longest for short, longest, _ in counts)
    assert toys.leftovers(model) == []
