"""The published system, rebuilt."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("transformers")

from mimose.bench.grid.paper import PAPER, PaperMimose
from mimose.bench.grid.strategies import Setup

LENGTHS = [12, 30, 18, 40, 25, 14, 36, 22, 33, 16, 11, 39, 20]


def _setup(model, meter, headroom):
    return Setup(
        model=model,
        device=torch.device("cpu"),
        meter=meter,
        headroom_bytes=headroom,
        sizes=[{"length": length} for length in LENGTHS],
        longest={"length": max(LENGTHS)},
        loss=lambda model, _: model,
        try_step=lambda _: None,
        shared=Path(),
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
    generous = PaperMimose(_setup(model, meter, 2**40))
    _train(toys, model, generous)
    generous.close()
    most = max(growth for _, growth in generous._whole)
    applied = PAPER.apply(_setup(model, meter, int(0.6 * most)))
    losses, facts = _train(toys, model, applied)
    applied.close()
    assert losses == plain
    assert [f.phase for f in facts] == ["collect"] * 10 + ["plan"] * 3
    short, longest, _ = (f.plan for f in facts[10:])
    assert short.count("r") < longest.count("r")
    assert toys.leftovers(model) == []


def test_forwards_run_twice_while_it_measures(toys, meter):
    """Once to be measured, once under the checkpoint, and again in backward."""
    model = toys.zoo_model("bert")
    applied = PaperMimose(_setup(model, meter, 2**40))
    counts = {}
    for phase in ("collect", "plan"):
        if phase == "plan":
            _train(toys, model, applied)
        applied.phase_of(phase)
        applied.before_step({"length": 20})
        with FlopCounterMode(display=False) as counter:
            model(**toys.text_batches([20])[0]).loss.backward()
        counts[phase] = counter.get_total_flops()
    applied.close()
    assert 1.5 < counts["collect"] / counts["plan"] < 1.7  # 5 forwards instead of 3


def test_plans_are_made_once_for_lengths_rounded_up(toys, meter):
    """To a multiple of five, and never again."""
    model = toys.zoo_model("bert")
    applied = PaperMimose(_setup(model, meter, 2**40))
    _train(toys, model, applied)
    applied.before_step({"length": 20})
    applied.facts()
    applied.before_step({"length": 16})
    assert applied.facts().cache_hit
    applied.before_step({"length": 26})
    assert not applied.facts().cache_hit
    applied.close()
