"""Sizes of units from sizes of batches."""

from __future__ import annotations

import numpy as np
import pytest

from mimose.predictors import Rule, SizeMap, Sum, Term

RULES = {
    "equal": (lambda X: X[:, 1], Rule((Term(1),))),
    "constant": (lambda X: np.full(len(X), 512), Rule(constant=512)),
    "choices": (lambda X: 4 * X[:, 0], Rule((Term(0),), factor=4)),
    "prefix": (lambda X: X[:, 1] + 20, Rule((Term(1, after=20),))),
    "stage": (lambda X: -(-X[:, 1] // 8), Rule((Term(1, 8, before=7),))),
    "patches": (
        lambda X: (X[:, 1] // 16) * (X[:, 2] // 16) + 1,
        Rule((Term(1, 16), Term(2, 16)), constant=1),
    ),
    "all patches": (
        lambda X: X[:, 0] * (X[:, 1] // 16) * (X[:, 2] // 16),
        Rule((Term(1, 16), Term(2, 16), Term(0))),
    ),
}

RULES["images and a text"] = (
    lambda X: 49 * X[:, 0] + X[:, 1] + 2,
    Sum((0, 1), (49, 1), 2),
)


def batches(n, seed=0):
    """Return n batches of images (batch, height, width)."""
    random = np.random.default_rng(seed)
    sides = random.integers(100, 500, (n, 2))
    return np.column_stack([random.integers(1, 16, n), sides])


@pytest.mark.parametrize("name", RULES)
def test_rule(name):
    """Each kind of rule is found and holds for sizes not seen."""
    own, rule = RULES[name]
    X, unseen = batches(6), batches(50, seed=1)

    fitted = SizeMap().fit(X, own(X))

    assert rule == fitted.rule_
    assert fitted.found_
    assert fitted.exact_
    assert own(unseen).tolist() == [fitted.predict_one(row) for row in unseen.tolist()]


@pytest.mark.parametrize(("n", "expected"), [(1, False), (2, False), (3, True)])
def test_exact_takes_samples(n, expected):
    """A rule with a divisor is for sizes not seen after three values."""
    X = np.array([[1, 230], [1, 301], [1, 377]])[:n]

    assert expected is SizeMap().fit(X, -(-X[:, 1] // 16)).exact_


def test_not_found():
    """Without a rule there is what was seen, else the largest size seen."""
    X = batches(12)
    y = np.random.default_rng(9).integers(0, 1000, 12)

    fitted = SizeMap().fit(X, y)

    assert not fitted.found_
    assert not fitted.exact_
    assert fitted.rule_ is None
    assert y[3] == fitted.predict_one(X[3].tolist())
    assert y.max() == fitted.predict_one((99, 99, 99))


def test_refit():
    """Another sample can overturn a rule."""
    sizes = SizeMap().fit([[4, 128], [4, 256]], [128, 256])
    assert sizes.exact_

    sizes.fit([[4, 128], [4, 256], [4, 100]], [128, 256, 128])

    assert Rule((Term(1),)) != sizes.rule_


def test_a_sum_is_not_found_by_chance():
    """Three samples fit any sum of two columns; a fourth has to agree."""
    X = np.array([[1, 8], [2, 9], [4, 16], [5, 32]])
    y = np.array([31, 43, 90, 1_000])
    assert not SizeMap().fit(X[:3], 3 * X[:3, 0] + 2 * X[:3, 1]).found_
    assert SizeMap().fit(X, 3 * X[:, 0] + 2 * X[:, 1]).found_
    assert not SizeMap().fit(X, y).found_
