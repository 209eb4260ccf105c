"""What needs an accelerator: its meter, exactness there, and its budget kept."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

_STEPS = 60
_SIZES = {"batch": 16}


def _device():
    return torch.accelerator.current_accelerator()


def _train(model, optimizer, sizes, generator):
    """Train one step on the accelerator; return the loss."""
    from mimose.zoo import ZOO

    batch = ZOO["bert"].batch(sizes, generator)
    batch = {name: tensor.to(_device()) for name, tensor in batch.items()}
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _model(**changes):
    from mimose.zoo import ZOO

    torch.manual_seed(0)
    model = ZOO["bert"].build(**changes).to(_device())
    return model, torch.optim.AdamW(model.parameters())


def test_meter_reads_an_allocation_back():
    """Allocated bytes rise by a tensor's, fall when it is freed, and the peak stays."""
    from mimose.meters import AllocatorMeter

    meter = AllocatorMeter(_device())
    before = meter.live_bytes()
    meter.reset_peak()
    tensor = torch.empty(2**24, device=_device())
    assert before + 2**26 == meter.live_bytes()
    del tensor
    assert before == meter.live_bytes()
    assert before + 2**26 == meter.peak_bytes()
    meter.reset_peak()
    assert before == meter.peak_bytes()


def _weights_after(budget):
    """Train five steps with dropout on; return the weights."""
    import mimose

    model, optimizer = _model()
    generator = torch.Generator().manual_seed(0)
    session = None if budget is None else mimose.attach(model, budget, planner="full")
    for length in (32, 48, 64, 32, 80):
        _train(model, optimizer, {**_SIZES, "length": length}, generator)
    if session is not None:
        session.detach()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_recomputation_is_exact():
    """Weights after five steps equal the bare model's, where two bare runs agree."""
    bare = _weights_after(None)
    if not all(map(torch.equal, bare, _weights_after(None))):
        pytest.skip("two runs of the bare model differ on this device")
    assert all(map(torch.equal, bare, _weights_after("8GiB")))


def test_random_state_is_saved_without_a_copy():
    """A place that was saved leads back, past another seed, to the same numbers."""
    from mimose.random_state import DeviceRandom

    random = DeviceRandom(torch.device(_device().type, 0))
    if _device().type == "cuda":
        assert not random.is_copied
    torch.rand(3, device=_device())
    state = random.save()
    drawn = torch.rand(5, device=_device())
    torch.manual_seed(99)
    random.put(state)
    assert torch.equal(drawn, torch.rand(5, device=_device()))


def test_budget_is_kept():
    """Sixty steps of mixed lengths stay within half of what the longest would need."""
    import mimose

    model, optimizer = _model(hidden_size=256, intermediate_size=1024)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        _train(model, optimizer, {**_SIZES, "length": 512}, generator)
    start = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    _train(model, optimizer, {**_SIZES, "length": 512}, generator)
    growth = torch.accelerator.max_memory_allocated() - start
    budget = start + growth // 2
    with mimose.attach(model, budget) as session:
        for _ in range(_STEPS):
            length = int(torch.randint(32, 513, (), generator=generator))
            _train(model, optimizer, {**_SIZES, "length": length}, generator)
    assert 0 == session.summary().steps_over
    assert session.summary().phases["plan"] >= _STEPS // 2
    assert session.peak_bytes <= budget


def test_autosac_saves_memory(tmp_path):
    """With its own time model, which needs a device: losses are plain training's."""
    pytest.importorskip("pulp")
    pytest.importorskip("pwlf")
    from mimose.bench.grid.trainer import Task, Trainer

    lengths = (64, 256, 160)
    task = {
        "workload": "tc-bert", "scale": "tiny", "seed": 0, "dtype": "float32",
        "sizes": [{"length": length} for length in lengths], "longest": None,
        "device": str(_device()), "threads": 2, "shared": str(tmp_path),
    }  # fmt: skip
    plain = Trainer(Task(strategy="none", headroom_bytes=None, **task))
    growth = plain.probe()["growth_bytes"]
    losses = [plain.step(i)["loss"] for i in range(len(lengths))]
    plain.close()
    planned = Trainer(Task(strategy="autosac", headroom_bytes=growth * 3 // 4, **task))
    rows = [planned.step(i) for i in range(len(lengths))]
    planned.close()
    assert [row["loss"] for row in rows] == losses
    most = max(row["peak_bytes"] - row["start_bytes"] for row in rows)
    assert most < 0.9 * growth
