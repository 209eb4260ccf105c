"""Meta's torch_remat, where it is installed."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mimose.bench.grid import remat


class _SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(4, 4)


class _Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = _SelfAttention()
        self.dense = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = _Attention()
        self.up = nn.Linear(4, 8)
        self.act = nn.GELU()


def test_what_is_saved_of_a_layer():
    """The innermost attention as a whole, and the linear layers outside of it."""
    found = dict(remat.saved_regions(_Layer()))
    assert list(found) == ["attention.inner", "attention.dense", "up"]


def test_it_is_told_that_it_is_missing(monkeypatch):
    """In the row that there is of it then."""
    monkeypatch.setattr(remat.importlib.util, "find_spec", lambda _: None)
    assert remat.why_no_remat("cpu") == "torch_remat is not installed"


@pytest.mark.parametrize("name", ["qa-bert", "tr-t5", "lm-gpt2"])
def test_it_is_exact(name):
    """With dropout, and layers that return more than tensors."""
    pytest.importorskip("transformers")
    pytest.importorskip("torch_remat")
    from mimose.bench.grid.workloads import WORKLOADS

    workload = WORKLOADS[name]
    torch.manual_seed(0)
    model = workload.build("tiny")
    sizes = {each: 12 for each in workload.sizes}
    batch = workload.batch(sizes, "tiny", torch.Generator().manual_seed(0))

    def step():
        torch.manual_seed(1)
        loss = model(**batch).loss
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return loss, gradients

    bare = step()
    setup = SimpleNamespace(model=model, device=torch.device("cpu"))
    applied = remat.torch_remat(setup)
    patched = step()
    applied.close()
    for loss, gradients in (patched, step()):
        assert torch.equal(bare[0], loss)
        assert len(bare[1]) == len(gradients)
        assert all(map(torch.equal, bare[1], gradients))
