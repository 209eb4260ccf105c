"""Predictors: how bytes and FLOPs follow from sizes, learned from few samples."""

from .fragmentation import FragmentationAllowance
from .limit import LearnedLimit
from .margin import GrowthBound
from .regression import REACH, Estimator, Fit, LeastSquares, check_estimator
from .sizes import Rule, SizeMap, Term
from .throughput import (
    Best,
    MethodModel,
    Series,
    Verdict,
    compare,
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
    "GrowthBound",
    "LearnedLimit",
    "LeastSquares",
    "MethodModel",
    "Rule",
    "Series",
    "SizeMap",
    "Term",
    "Verdict",
    "check_estimator",
    "compare",
    "fit_series",
    "p_point",
    "p_score",
]
