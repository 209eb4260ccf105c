"""PyTorch's AutoSAC as a strategy; its time model needs CUDA and is replaced here."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("pulp")
pytest.importorskip("pwlf")

from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from mimose.bench.child import RunFailedError
from mimose.bench.grid.autosac import _Decided, auto_sac, why_no_auto_sac
from mimose.bench.grid.strategies import Setup

pytestmark = pytest.mark.filterwarnings("ignore:.*PuLP 4.0:DeprecationWarning")

_LONGEST = 200


@pytest.fixture
def time_by_bytes(monkeypatch):
    """Every operator takes as long as it has bytes to write."""
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator

    def estimate(func, args, kwargs):
        out = func(*args, **kwargs or {})
        tensors = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        return out, 1e-6 * sum(t.numel() * t.element_size() for t in tensors)

    monkeypatch.setattr(RuntimeEstimator, "_roofline_estimate", estimate)


def _loss(toys):
    def loss(model, sizes):
        (batch,) = toys.text_batches([sizes["length"]])
        return model(**batch).loss

    return loss


def _setup(toys, model, meter, headroom):
    return Setup(
        model=model,
        device=torch.device("cpu"),
        meter=meter,
        headroom_bytes=headroom,
        sizes=[{"length": _LONGEST}],
        longest={"length": _LONGEST},
        loss=_loss(toys),
        try_step=lambda _: None,
        shared=Path(),
    )


def _step(toys, model, length):
    """Return loss, gradients and FLOPs of a step."""
    torch.manual_seed(0)
    (batch,) = toys.text_batches([length])
    with FlopCounterMode(display=False) as counter:
        loss = model(**batch).loss
        loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return loss.item(), gradients, counter.get_total_flops()


def _growth(toys, model, meter):
    """Return what a step on the longest batch grows by."""
    _step(toys, model, _LONGEST)
    start = meter.settled_bytes(0)
    meter.reset_peak()
    _step(toys, model, _LONGEST)
    return meter.peak_bytes() - start


@pytest.mark.usefixtures("time_by_bytes")
def test_it_redoes_operators_within_a_budget(toys, meter):
    """Less memory for more FLOPs, at other lengths too; the numbers stay the same."""
    model = toys.zoo_model("bert")
    lengths = (_LONGEST, 120)
    plain = [_step(toys, model, length) for length in lengths]
    kept = _growth(toys, model, meter)
    applied = auto_sac(_setup(toys, model, meter, int(0.7 * kept)))
    try:
        growth = _growth(toys, model, meter)
        steps = [_step(toys, model, length) for length in lengths]
    finally:
        applied.close()
    for (loss, gradients, flops), (same, those, fewer) in zip(
        steps, plain, strict=True
    ):
        assert loss == same
        assert all(map(torch.equal, gradients, those))
        assert flops > fewer
    assert growth < 0.9 * kept
    assert _step(toys, model, _LONGEST)[2] == plain[0][2]


def test_a_model_it_cannot_follow_is_named(toys, meter):
    """Here for want of CUDA."""
    if torch.cuda.is_available():
        pytest.skip("its time model runs here")
    with pytest.raises(
        RunFailedError, match=r"cannot follow BertFor.*CUDA capabilities"
    ):
        auto_sac(_setup(toys, toys.zoo_model("bert"), meter, 2**40))


def test_other_operators_than_estimated_are_an_error():
    """A choice by position is worth nothing for them."""
    aten = torch.ops.aten
    decided = _Decided(["addmm", "gelu"], [1, 0])
    forward = SimpleNamespace(is_recompute=False)
    assert decided(forward, aten.addmm.default) is not None
    assert decided(forward, aten.detach.default) is not None
    with pytest.raises(RuntimeError, match="estimated gelu as operator 1"):
        decided(forward, aten.relu.default)


def test_where_it_cannot_run():
    """A row says why."""
    assert "needs CUDA" in why_no_auto_sac("cpu")
    assert why_no_auto_sac("cuda") == ""
