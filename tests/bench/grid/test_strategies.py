"""Ways to train: exact, told beforehand, and the published system rebuilt."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from torch.utils.flop_counter import FlopCounterMode

from mimose.bench.grid.strategies import STRATEGIES, PaperMimose, Setup
from mimose.bench.grid.worker import Task, Worker
from mimose.bench.grid.workloads import WORKLOADS
from mimose.bench.step_meter import budget_meter

MIB = 2**20
WORKLOAD = WORKLOADS["qa-bert"]
LENGTHS = [12, 30, 18, 40, 25, 14, 36, 22, 33, 16, 11, 39, 20]


class _Trained:
    """A tiny model, the setup for a strategy, and what a step of it gives."""

    def __init__(self, folder, lengths=(16, 24, 32), device="cpu"):
        torch.manual_seed(0)
        self.model = WORKLOAD.build("tiny").to(device)
        self.n_tried = 0
        self.sizes = [{"length": length} for length in lengths]
        self.setup = Setup(
            model=self.model,
            device=torch.device(device),
            meter=budget_meter(torch.device(device)),
            headroom_bytes=2**40,
            sizes=self.sizes,
            longest=self.sizes[-1],
            try_step=self.try_step,
            shared=folder,
        )

    def try_step(self, sizes):
        self.n_tried += 1
        generator = torch.Generator().manual_seed(0)
        batch = WORKLOAD.batch(sizes, "tiny", generator)
        batch = {name: tensor.to(self.setup.device) for name, tensor in batch.items()}
        loss = self.model(**batch).loss
        loss.backward()
        gradients = {n: p.grad for n, p in self.model.named_parameters()}
        self.model.zero_grad()
        return loss.detach(), gradients

    def step(self):
        """Return loss and gradients of the longest batch, and what it computes."""
        torch.manual_seed(1)
        with FlopCounterMode(display=False) as counter:
            loss, gradients = self.try_step(self.sizes[-1])
        return loss, gradients, counter.get_total_flops()


def _assert_equal(one, other):
    assert torch.equal(one[0], other[0])
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        assert gradient is other[1][name] or torch.equal(gradient, other[1][name]), name


def test_recomputing_is_exact_and_the_model_is_given_back(tmp_path):
    """A session and transformers recompute as much; every second layer half of it."""
    trained = _Trained(tmp_path)
    bare = trained.step()
    redone = {}
    for name in ("full", "every-2", "hf-full", "hf-every-2"):
        applied = STRATEGIES[name].apply(trained.setup)
        found = trained.step()
        _assert_equal(bare, found)
        redone[name] = found[2] - bare[2]
        applied.close()
        assert not any("forward" in vars(module) for module in trained.model.modules())
        _assert_equal(bare, trained.step())
    assert 0 < redone["full"] == redone["hf-full"]
    assert redone["every-2"] == redone["hf-every-2"] == redone["full"] // 2


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


def _paper(model, meter, headroom):
    return PaperMimose(
        Setup(
            model=model,
            device=torch.device("cpu"),
            meter=meter,
            headroom_bytes=headroom,
            sizes=[{"length": length} for length in LENGTHS],
            longest={"length": max(LENGTHS)},
            try_step=lambda _: None,
            shared=Path(),
        )
    )


def _train(toys, model, applied=None):
    """Train on each length; return the losses, and each step's phase and plan."""
    torch.manual_seed(0)
    losses, facts = [], []
    for length, batch in zip(LENGTHS, toys.text_batches(LENGTHS), strict=True):
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
        applied = _paper(model, meter, headroom)
        losses, facts = _train(toys, model, applied)
        applied.close()
        assert losses == plain
        assert [f.phase for f in facts] == ["collect"] * 10 + ["plan"] * 3
        counts.append([f.plan.count("r") for f in facts[10:]])
    assert all(short <= longest for short, longest, _ in counts)
    assert any(short < longest for short, longest, _ in counts)
    assert toys.leftovers(model) == []
