"""The parts of replaying: seals and noise as bits."""

import pytest
import torch
from torch.nn import functional

import mimose
from benchmarks.proofs.single_layers import alone
from mimose.bench.grid.strategies import Everywhere
from mimose.exceptions import RecomputationError
from mimose.planners.actions import FINE_MENU
from mimose.run.actions.replay import noise, rebuild
from mimose.run.actions.replay.seal import is_broken, seal

FINER = FINE_MENU.names[1:-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("shape", [(8, 33), (1024,), (3, 7, 31)])
def test_noise_goes_as_bits_and_comes_back(dtype, shape):
    """An eighth of a byte an element, whatever the number of elements."""
    drawn = functional.dropout(torch.ones(shape), 0.3).to(dtype)
    packed = noise.pack(drawn)
    assert noise.held_bytes(packed) == -(-drawn.numel() // 8)
    assert torch.equal(noise.unpack(packed), drawn)
    assert noise.unpack(packed).dtype == dtype


@pytest.mark.parametrize("other", [-0.0, 2.5, float("nan"), float("inf")])
def test_what_has_a_third_number_is_no_noise(other):
    """Not even minus zero, whose products have another sign."""
    drawn = functional.dropout(torch.ones(1024), 0.3)
    drawn[-1] = other
    assert noise.pack(drawn) is drawn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("shape", [(0,), (1,), (33,), (64, 64), (5, 7, 9)])
def test_a_seal_is_that_of_the_same_bits(dtype, shape):
    """Of any precision and size."""
    whole = (torch.randn(shape) * 4).to(dtype)
    for _ in range(3):
        assert not is_broken(seal(whole), whole.clone())


@pytest.mark.parametrize("n_rows", [4, 33, 1024])
def test_a_seal_shows_any_element_that_differs(n_rows):
    """One of them; a column of all rows; another order; a sign of zero."""
    whole = torch.randn(n_rows, 64)
    whole[0, 0] = float("nan")
    sealed = seal(whole)
    for row, column in ((0, 1), (n_rows - 1, 63), (n_rows // 2, 17)):
        other = whole.clone()
        other[row, column] *= 1.000001
        assert is_broken(sealed, other)
    column = whole.clone()
    column[:, 5] = -column[:, 5]
    assert is_broken(sealed, column)
    assert is_broken(sealed, whole.t().contiguous().view(n_rows, 64))
    assert is_broken(seal(torch.zeros(8)), -torch.zeros(8))


def test_elements_of_a_seal_lie_in_many_columns():
    """Whatever the width: their step divides no row."""
    for width in (64, 768, 1024, 4096):
        sealed = seal(torch.zeros(64, width))
        n_words = width // 2
        at = {(sealed.start + i * sealed.step) % n_words for i in range(64)}
        assert len(at) > 16, width


def test_what_is_rebuilt_otherwise_is_an_error_before_any_gradient(monkeypatch):
    """Something that shows in no graph: the seal of what was let go is broken."""
    monkeypatch.setattr(rebuild.Rebuild, "_run", _wrong(rebuild.Rebuild._run))
    model, x = alone("bert", 2)
    options = {"actions": FINE_MENU.names, "planner": Everywhere("lean")}
    with mimose.attach(model, "1TiB", units=["layers.0"], **options) as session:
        for _ in range(2):
            model(x).backward()  # compared in full: what differs is not let go
        _WRONG[0] = True
        with pytest.raises(RecomputationError, match="rebuilt to something else"):
            model(x).backward()
        _WRONG[0] = False
        model(x).backward()
    assert ("lean",) == session.records[0].actions


_WRONG = [False]


def _wrong(run):
    def changed(self, step, told):
        made = run(self, step, told)
        if _WRONG[0] and isinstance(made, torch.Tensor):
            made = made * 1.5
        return made

    return changed
