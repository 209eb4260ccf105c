"""Training on the device: equal to the CPU's, and within a budget by mimose."""

from __future__ import annotations

import pytest
import torch

import mimose

pytest.importorskip("transformers")

from mimose.bench.zoo import ZOO

pytestmark = pytest.mark.sim

_EAGER = {"attn_implementation": "eager"}
_NO_DROPOUT = {
    "bert": {
        **_EAGER,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "gpt2": {**_EAGER, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "resnet": {},
}


def _to(batch, device):
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


def _train(name, device, steps=3, dtype=None, **changes):
    """Train on the smallest batches; return losses, and parameters at the end."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = ZOO[name].build(**changes).to(device)
    # Several parameters at once, the default on accelerators, rounds in other places.
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    sizes = {size: least for size, (least, _) in ZOO[name].sizes.items()}
    losses = []
    for _ in range(steps):
        batch = _to(ZOO[name].batch(sizes, generator), device)
        with torch.autocast(device, dtype, enabled=dtype is not None):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return losses, [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("name", _NO_DROPOUT)
def test_training_is_the_cpus(name):
    """Without dropout, losses and weights are equal to the last bit."""
    losses, weights = _train(name, "cpu", **_NO_DROPOUT[name])
    on_sim, weights_on_sim = _train(name, "sim", **_NO_DROPOUT[name])

    assert losses == on_sim
    assert all(map(torch.equal, weights, weights_on_sim))


def test_training_under_autocast_repeats():
    """With dropout in bf16, two runs are equal to the last bit."""
    losses, weights = _train("bert", "sim", dtype=torch.bfloat16)
    again, weights_again = _train("bert", "sim", dtype=torch.bfloat16)
    plain, _ = _train("bert", "sim")

    assert losses == again
    assert losses != plain
    assert all(map(torch.equal, weights, weights_again))


def test_autocast_saves_memory(sim):
    """What layers keep is half as wide where it is the operand of a product."""

    def peak(dtype):
        sim.empty_cache()
        sim.reset_peak_memory_stats()
        _train("bert", "sim", steps=1, dtype=dtype)
        return sim.max_memory_allocated()

    assert peak(torch.bfloat16) < peak(None)


def _bert_steps(sim, lengths, budget_bytes=None):
    """Train with dropout; return the weights, the session and the growth of a step."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = ZOO["bert"].build().to("sim")
    optimizer = torch.optim.AdamW(model.parameters())
    session = None if budget_bytes is None else mimose.attach(model, budget_bytes)
    start = sim.memory_allocated()
    for length in lengths:
        batch = _to(ZOO["bert"].batch({"batch": 8, "length": length}, generator), "sim")
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach().cpu() for each in model.parameters()], session, start


def test_mimose_keeps_a_budget(sim):
    """24 steps, 8/10 of the reserved bytes: none over, and weights as of plain ones."""
    lengths = torch.randint(
        32, 129, (24,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    sim.reset_peak_memory_stats()
    plain, _, _ = _bert_steps(sim, lengths)
    reserved = sim.max_memory_reserved()
    sim.empty_cache()
    budget = reserved * 8 // 10
    weights, session, _ = _bert_steps(sim, lengths, budget)
    with session:
        summary = session.summary()

    assert 24 == summary.steps
    assert 0 == summary.steps_over
    assert 12 < summary.phases["plan"]
    assert summary.peak_bytes <= budget < reserved
    assert all(map(torch.equal, plain, weights))
