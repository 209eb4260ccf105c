"""Predictors learn from few samples how bytes and FLOPs depend on sizes."""

from .margin import FragmentationAllowance, LearnedLimit, SafetyMargin
from .regression import REACH, Estimator, Fit, LeastSquares, check_estimator
from .sizes import Rule, SizeMap, Term
from .throughput import (
    Best,
    MethodModel,
    Series,
    Verdict,
    compare,
    fit_rates,
    fit_series,
    p_point,
    p_score,
)

__all__ = [
    "REACH",
    "Best",
    "Estimator",
    "Fit",
    "FragmentationAllowance",
    "LearnedLimit",
    "LeastSquares",
    "MethodModel",
    "Rule",
    "SafetyMargin",
    "Series",
    "SizeMap",
    "Term",
    "Verdict",
    "check_estimator",
    "compare",
    "fit_rates",
    "fit_series",
    "p_point",
    "p_score",
]
