"""Training on the device: equal to the CPU's, and within a budget by mimose."""

from __future__ import annotations

import pytest
import torch
from toys import moved

pytest.importorskip("transformers")

from mimose.bench.zoo import ZOO

pytestmark = pytest.mark.sim

_EAGER = {"attn_implementation": "eager"}
_NO_DROPOUT = {
    "bert": {**_EAGER, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "resnet": {},
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
        batch = moved(ZOO[name].batch(sizes, generator), device)
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
