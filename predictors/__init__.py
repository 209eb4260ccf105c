"""Predictors: how bytes and FLOPs follow from sizes, learned from few samples."""

from .fragmentation import FragmentationAllowance
from .limit import LearnedLimit
from .lines import Series, fit_series
from .margin import GrowthBound
from .noise import LEAST_ROUNDS, Readings, fit_model, noise_ceiling, ratio_interval
from .regression import REACH, Estimator, Fit, LeastSquares, check_estimator
from .residuals import Residuals
from .sizes import Rule, SizeMap, Term
from .throughput import Best, MethodModel, Verdict, compare, p_point, p_score

__all__ = [
    "LEAST_ROUNDS",
    "REACH",
    "Best",
    "Estimator",
    "Fit",
    "FragmentationAllowance",
    "GrowthBound",
    "LearnedLimit",
    "LeastSquares",
    "MethodModel",
    "Readings",
    "Residuals",
    "Rule",
    "Series",
    "SizeMap",
    "Term",
    "Verdict",
    "check_estimator",
    "compare",
    "fit_model",
    "fit_series",
    "noise_ceiling",
    "p_point",
    "p_score",
    "ratio_interval",
]
