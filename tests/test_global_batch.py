"""A global batch over ranks: each sample once, and the gradients of the whole."""

from __future__ import annotations

import itertools
import types

import numpy as np
import pytest
import torch
from torch import nn
from toys import Residual

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

import mimose
from mimose.forecast import Forecast

LONGEST = 400


def _shape(drawn):
    n, *rest = drawn
    return {"x.0": n, "x.1": sum(rest[len(rest) // 2 :])}


class _Session:
    """Forecasts as a device does that holds some elements: a time for each, and one."""

    budget = 1000

    def __init__(self, most):
        self.most = most
        self.collation = types.SimpleNamespace(
            most=(10**6, 10**9),
            n_steps=100,
            drew=lambda drawn: None,
            end_turn=lambda: None,
            shape=_shape,
        )
        own = types.SimpleNamespace(warns=False)
        self._engine = types.SimpleNamespace(ranks=None, budget=own)

    def _raise_if_detached(self):
        return nn.Identity()

    def summary(self):
        return types.SimpleNamespace(first_times=None)

    def forecast(self, shape, budget=None, *, accumulating=True):
        elements = shape.get("x.0", 1) * shape.get("x.1", 1)
        seconds = 0.1 + 1e-3 * elements + 1e-6 * elements * shape.get("x.1", 1)
        fits = elements <= self.most
        peak = 1000.0 * elements / self.most
        return Forecast(shape, 1000, 0.0, fits, None, peak, None, seconds)


def _check(plan, lengths, session, counts):
    """Make sure of what every plan keeps; return the seconds of its ranks."""
    columns = np.array(lengths).reshape(len(lengths), -1)
    pairs = [
        (rows, weight)
        for own, weights in zip(plan.indices, plan.weights, strict=True)
        for rows, weight in zip(own, weights, strict=True)
    ]
    assert all(plan.indices)
    once = sorted(itertools.chain(*(rows for rows, weight in pairs if weight)))
    assert np.flatnonzero(counts).tolist() == once
    n_ranks = len(plan.indices)
    assert sum(weight for _, weight in pairs) == pytest.approx(n_ranks)
    for rows, weight in pairs:
        own = counts[rows].sum() / counts.sum() * n_ranks
        assert weight == 0.0 or weight == pytest.approx(own)
        assert len(rows) * columns[rows].max(0).sum() <= session.most
    return [
        sum(
            session.forecast(
                {"x.0": len(rows), "x.1": columns[rows].max(0).sum()}
            ).seconds
            for rows in own
        )
        for own in plan.indices
    ]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, LONGEST), st.integers(1, LONGEST)),
        min_size=9,
        max_size=90,
    ),
    st.integers(1, 9),
    st.integers(1, 2),
    st.integers(2 * LONGEST, 20 * LONGEST),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_each_sample_comes_once_and_each_part_fits(
    lengths, n_ranks, n_names, most, equal, draw
):
    """Of one length or two; where nothing counts is left out; weights add up."""
    own = [each[:n_names] for each in lengths]
    counts = np.array([draw.randint(0, 3) for _ in own]) + (np.arange(len(own)) < 9)
    names = dict(zip("ab", map(list, zip(*own, strict=True)), strict=False))
    session = _Session(most)

    plan = mimose.balance(names, session, n_ranks, equal=equal, counts=counts)

    _check(plan, own, session, counts)
    assert not equal or len({len(parts) for parts in plan.indices}) == 1


def test_ranks_end_together():
    """512 samples of texts on 4 ranks: the slowest takes at most 1.05 of the mean."""
    draw = np.random.default_rng(0)
    lengths = np.exp(draw.normal(4.0, 1.0, 512)).clip(1, 800).astype(int).tolist()
    session = _Session(6000)

    plan = mimose.balance(lengths, session, 4)

    seconds = _check(plan, lengths, session, np.ones(512))
    assert max(seconds) <= 1.05 * np.mean(seconds)
    assert plan.seconds == pytest.approx(seconds, rel=0.02)


class _Model(nn.Module):
    """A mean over samples, or over their tokens."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(Residual(8, 8) for _ in range(3))

    def forward(self, ids, lengths, by_tokens):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        counts = (torch.arange(ids.shape[1]) < lengths[:, None])[..., None]
        if by_tokens:
            return (x.square() * counts).sum() / lengths.sum()
        return (x * counts).sum(1).square().mean()


@pytest.mark.parametrize("by_tokens", [False, True])
def test_gradients_are_those_of_the_global_batch(toys, by_tokens):
    """512 samples on 4 ranks: while nothing is known, as batches grow, and then."""
    draw = torch.Generator().manual_seed(0)
    model, n_rows = _Model().double(), []
    with mimose.attach(
        model, "1TiB", layers=Residual, meter=toys.BlindMeter()
    ) as session:
        for _ in range(4):
            lengths = torch.randint(1, 40, (512,), generator=draw)
            ids = torch.randint(64, (512, 40), generator=draw)
            counts = lengths.tolist() if by_tokens else None
            plan = mimose.balance(lengths.tolist(), session, 4, counts=counts)
            for rank in range(4):
                for rows, weight in plan.of_rank(rank):
                    longest = int(lengths[rows].max())
                    loss = model(ids[rows, :longest], lengths[rows], by_tokens)
                    (weight / 4 * loss).backward()
            found = [p.grad for p in model.parameters()]
            model.zero_grad()
            n_rows.append(max(len(rows) for own in plan.indices for rows in own))
            whole = torch.autograd.grad(
                _call(model, ids, lengths, by_tokens), list(model.parameters())
            )
            for own, other in zip(found, whole, strict=True):
                assert (own - other).abs().max() <= 1e-10 * other.abs().max()
    assert n_rows[0] == 2
    assert n_rows[-1] >= 8


def _call(model, ids, lengths, by_tokens):
    """Run a copy, which has no session."""
    return torch.func.functional_call(
        _Model().double(), dict(model.named_parameters()), (ids, lengths, by_tokens)
    )


def test_what_cannot_be_balanced_says_why():
    """Fewer samples than ranks, counts of another number, a sample that is too long."""
    session = _Session(100)
    with pytest.raises(ValueError, match="2 samples are too few for 3 ranks"):
        mimose.balance([4, 5], session, 3)
    with pytest.raises(ValueError, match="counts must be 2 numbers of at least 0"):
        mimose.balance([4, 5], session, 1, counts=[1, -1])
    with pytest.raises(ValueError, match="one length of each name"):
        mimose.balance({"a": [4, 5], "b": [4]}, session, 1)
    with pytest.raises(mimose.InfeasibleBudgetError, match="length 101 does not fit"):
        mimose.balance([4, 101], session, 1)
