"""Predictors learn from few samples how bytes and FLOPs depend on sizes."""

from .margin import FragmentationAllowance, LearnedLimit, SafetyMargin
from .rates import fit_rates
from .regression import REACH, Estimator, Fit, LeastSquares, check_estimator
from .sizes import Rule, SizeMap, Term
from .throughput import Series, fit_series

__all__ = [
    "REACH",
    "Estimator",
    "Fit",
    "FragmentationAllowance",
    "LearnedLimit",
    "LeastSquares",
    "Rule",
    "SafetyMargin",
    "Series",
    "SizeMap",
    "Term",
    "check_estimator",
    "fit_rates",
    "fit_series",
]
