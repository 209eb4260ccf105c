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
_LONG = (192, 256, 224, 210)


class _Loop:
    """Trains a small BERT with dropout; keeps the losses."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.model = ZOO["bert"].build().to("sim")
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.generator = torch.Generator().manual_seed(seed)
        self.losses = []

    def closure(self, length):
        batch = ZOO["bert"].batch({"batch": 8, "length": length}, self.generator)
        batch = {name: tensor.to("sim") for name, tensor in batch.items()}

        def run():
            loss = self.model(**batch).loss
            loss.backward()
            return loss

        return run

    def step(self, length, session=None):
        run = self.closure(length)
        loss = run() if session is None else session.step(run)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def weights(self):
        return [parameter.detach().cpu() for parameter in self.model.parameters()]


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


def test_predictions_are_exact():
    """Of requested bytes, once learned: within half a percent at unseen lengths."""
    loop, session = _warmed()
    for length in (41, 53, 66, 70, 38):
        loop.step(length)
        assert abs(session.records[-1].prediction_error) <= 5e-3
    session.detach()


def test_a_fraction_is_of_what_is_free_and_held(sim):
    """What other processes hold of the card is out of reach."""
    sim.set_total_memory(2**30)
    loop = _Loop()
    session = mimose.attach(loop.model, 0.5)
    assert 2**29 == session.budget
    session.detach()


def test_out_of_memory_teaches(sim):
    """The limit falls in mid-run: one failure, plans that fit then, equal losses."""
    loop, session = _warmed(2**40)
    torch.accelerator.empty_cache()
    sim.set_limit(_stats("reserved_bytes.all.current") + 56 * MIB)
    failed = []
    for length in _LONG:
        before = _stats("num_ooms")
        loop.step(length, session)
        failed.append(_stats("num_ooms") - before)
    lowered = session.records[-1].reserved_peak_bytes
    sim.set_limit(None)
    plain = _Loop()
    for length in (*_LENGTHS, *_LONG):
        plain.step(length)
    assert 1 == sum(failed)
    assert lowered <= session.budget
    assert plain.losses == loop.losses
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
