"""Sessions on an accelerator: the simulated one, whose readings are exact."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import mimose  # noqa: E402 (behind importorskip)
from mimose.bench.zoo import ZOO  # noqa: E402

pytestmark = pytest.mark.sim

MIB = 2**20
_LENGTHS = (32, 40, 48, 56, 64, 72, 44, 60, 52, 68, 36, 71)


class _Loop:
    """Trains a small BERT with dropout."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.model = ZOO["bert"].build().to("sim")
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.generator = torch.Generator().manual_seed(seed)

    def closure(self, length):
        batch = ZOO["bert"].batch({"batch": 8, "length": length}, self.generator)
        batch = {name: tensor.to("sim") for name, tensor in batch.items()}

        return lambda: self.model(**batch).loss.backward()

    def step(self, length):
        self.closure(length)()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _stats(name):
    return torch.accelerator.memory_stats(0)[name]


def _warmed(budget="1GiB", **options):
    """Return a loop and its session, which plans already."""
    loop = _Loop()
    session = mimose.attach(loop.model, budget, **options)
    for length in _LENGTHS:
        loop.step(length)
    return loop, session


def test_the_budget_is_about_reserved_bytes():
    """Each record says both; the peak of the session is what was reserved."""
    _, session = _warmed()
    record = session.records[-1]
    assert "plan" == record.phase
    assert record.observed_peak_bytes <= record.reserved_peak_bytes
    assert record.reserved_peak_bytes == record.highest_bytes
    assert session.peak_bytes == _stats("reserved_bytes.all.peak") or (
        session.peak_bytes >= _stats("reserved_bytes.all.current")
    )
    session.detach()


def test_out_of_memory_in_a_plain_loops_backward_teaches(sim):
    """Nobody tells of it but the allocator's own counter."""
    loop, session = _warmed(2**40)
    torch.accelerator.empty_cache()
    before = session.explain({"input_ids.1": 72})
    sim.set_limit(_stats("reserved_bytes.all.current") + 4 * MIB)
    run = loop.closure(128)
    with pytest.raises(torch.OutOfMemoryError):
        run()
    loop.optimizer.zero_grad()
    sim.set_limit(None)
    loop.step(72)
    assert session.records[-1].actions.count("recompute") > 0
    assert before
    session.detach()
