"""Predictors: how bytes and FLOPs follow from sizes, learned from few samples."""

from ._shapes import ShapeRegressor
from .alternatives import EstimatorPredictor, QuadraticScalarRegressor
from .base import Predictor
from .envelope import EnvelopeRegressor
from .fragmentation import FragmentationAllowance
from .limit import LearnedLimit
from .lines import Series, fit_series
from .margin import GrowthBound
from .noise import LEAST_ROUNDS, Readings, fit_model, noise_ceiling, ratio_interval
from .polynomial import PolynomialRegressor
from .rates import fit_rates
from .registry import PREDICTORS, make_predictor
from .residuals import Residuals
from .sizes import Rule, SizeMap, Sum, Term
from .throughput import Best, MethodModel, Verdict, compare, p_point, p_score
from .trust import EXTRAPOLATION, NOISY_EXTRAPOLATION, Trust, best_fit
from .varying import VaryingFit

__all__ = [
    "EXTRAPOLATION",
    "LEAST_ROUNDS",
    "NOISY_EXTRAPOLATION",
    "PREDICTORS",
    "Best",
    "EnvelopeRegressor",
    "EstimatorPredictor",
    "FragmentationAllowance",
    "GrowthBound",
    "LearnedLimit",
    "MethodModel",
    "PolynomialRegressor",
    "Predictor",
    "QuadraticScalarRegressor",
    "Readings",
    "Residuals",
    "Rule",
    "Series",
    "ShapeRegressor",
    "SizeMap",
    "Sum",
    "Term",
    "Trust",
    "VaryingFit",
    "Verdict",
    "best_fit",
    "compare",
    "fit_model",
    "fit_rates",
    "fit_series",
    "make_predictor",
    "noise_ceiling",
    "p_point",
    "p_score",
    "ratio_interval",
]
