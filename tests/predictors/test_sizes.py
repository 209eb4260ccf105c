"""Sizes of layers from sizes of batches."""

from __future__ import annotations

import numpy as np
import pytest

from mimose.predictors import SizeMap

RULES = {
    "equal": lambda X: X[:, 1],
    "constant": lambda X: np.full(len(X), 512),
    "choices": lambda X: 4 * X[:, 0],
    "prefix": lambda X: X[:, 1] + 20,
    "stage": lambda X: -(-X[:, 1] // 8),
    "convolution": lambda X: (X[:, 1] - 3) // 2 + 1,
    "rows": lambda X: X[:, 0] * X[:, 1],
    "patches": lambda X: (X[:, 1] // 16) * (X[:, 2] // 16) + 1,
    "all patches": lambda X: X[:, 0] * (X[:, 1] // 16) * (X[:, 2] // 16),
    "images and a text": lambda X: 49 * X[:, 0] + X[:, 1] + 2,
}


def batches(n, seed=0):
    """Return n batches of images (batch, height, width)."""
    random = np.random.default_rng(seed)
    sides = random.integers(100, 500, (n, 2))
    return np.column_stack([random.integers(1, 16, n), sides])


@pytest.mark.parametrize("name", RULES)
def test_rule(name):
    """Each kind of rule is found and holds for sizes not seen."""
    own = RULES[name]
    X, unseen = batches(6), batches(50, seed=1)
    fitted = SizeMap().fit(X, own(X))
    assert fitted.rule_ is not None
    assert own(unseen).tolist() == [fitted.predict_one(row) for row in unseen.tolist()]


def test_a_sum_is_not_found_by_chance():
    """Three samples fit any sum of two columns; a fourth has to agree."""
    X = np.array([[1, 8], [2, 9], [4, 16], [5, 32]])
    y = np.array([31, 43, 90, 1_000])
    assert SizeMap().fit(X[:3], 3 * X[:3, 0] + 2 * X[:3, 1]).rule_ is None
    assert SizeMap().fit(X, 3 * X[:, 0] + 2 * X[:, 1]).rule_ is not None
    assert SizeMap().fit(X, y).rule_ is None
