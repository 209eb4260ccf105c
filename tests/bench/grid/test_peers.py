"""What other libraries offer."""

from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

from mimose.bench.grid import peers
from mimose.bench.grid.peers import PEERS

(COMPILE,) = (peer for peer in PEERS if peer.name == "compile-budget")


@pytest.fixture
def compiled(monkeypatch):
    """Every compilation as (ratio, is it for all sizes); growths by formula."""
    made = []

    class _FakeCompiled:
        """Grows by a formula; compiled for all sizes by a little more."""

        growth = staticmethod(lambda ratio: int(100 * ratio))
        more = 0

        def __init__(self, setup, ratio, *, is_dynamic=True):
            self.ratio, self.is_dynamic, self.is_closed = ratio, is_dynamic, False
            assert all(each.is_closed for each in made)
            made.append(self)

        def growth_bytes(self):
            return self.growth(self.ratio) + self.more * self.is_dynamic

        def close(self):
            self.is_closed = True

    monkeypatch.setattr(peers, "_CompiledWithin", _FakeCompiled)
    return SimpleNamespace(made=made, kind=_FakeCompiled)


def _apply(folder, headroom):
    return COMPILE.apply(SimpleNamespace(shared=folder, headroom_bytes=headroom))


def test_the_largest_ratio_that_fits(tmp_path, compiled):
    """Tried from 1 down; what runs is compiled for all sizes."""
    applied = _apply(tmp_path, 80)
    assert (applied.ratio, applied.is_dynamic) == (0.75, True)
    assert [each.ratio for each in compiled.made] == [1.0, 0.875, 0.75, 0.75]


def test_where_less_is_more(tmp_path, compiled):
    """Recomputing everything at once may need more than a middle ratio."""
    compiled.kind.growth = staticmethod(lambda ratio: abs(ratio - 0.5) * 100)
    assert _apply(tmp_path, 20).ratio == 0.625


def test_where_none_fits(tmp_path, compiled):
    """The one that needs least is taken: it is over by least."""
    compiled.kind.growth = staticmethod(lambda ratio: 50 + abs(ratio - 0.25) * 100)
    assert _apply(tmp_path, 20).ratio == 0.25


def test_what_runs_is_measured_too(tmp_path, compiled):
    """Where it needs more than the trial said, the next ratio is taken."""
    compiled.kind.more = 10
    assert _apply(tmp_path, 90).ratio == 0.75  # 0.875 grows by 97


def test_another_budget_tries_nothing_again(tmp_path, compiled):
    """One budget's trials are there for the next."""
    _apply(tmp_path, 40)
    n = len(compiled.made)
    compiled.made[-1].close()
    assert _apply(tmp_path, 65).ratio == 0.625
    assert len(compiled.made) == n + 1


def test_a_trial_that_fails_is_the_failure(tmp_path, compiled):
    """And leaves nobody waiting."""
    compiled.kind.growth = staticmethod(lambda ratio: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _apply(tmp_path, 40)
    compiled.made[-1].close()
    compiled.kind.growth = staticmethod(lambda ratio: 1)
    assert _apply(tmp_path, 40).ratio == 1.0
