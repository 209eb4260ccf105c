"""Predictors: how bytes and FLOPs follow from sizes, learned from few samples."""

from ._shapes import ShapeRegressor
from .alternatives import EstimatorPredictor, QuadraticScalarRegressor
from .base import Predictor
from .envelope import EnvelopeRegressor
from .fragmentation import FragmentationRatio
from .limit import LearnedLimit
from .margin import GrowthBound
from .polynomial import PolynomialRegressor
from .rates import fit_rates
from .registry import PREDICTORS, make_predictor
from .sizes import Rule, SizeMap, Sum, Term
from .trust import EXTRAPOLATION, NOISY_EXTRAPOLATION, Trust, best_fit
from .varying import VaryingFit

__all__ = [
    "EXTRAPOLATION",
    "NOISY_EXTRAPOLATION",
    "PREDICTORS",
    "EnvelopeRegressor",
    "EstimatorPredictor",
    "FragmentationRatio",
    "GrowthBound",
    "LearnedLimit",
    "PolynomialRegressor",
    "Predictor",
    "QuadraticScalarRegressor",
    "Rule",
    "ShapeRegressor",
    "SizeMap",
    "Sum",
    "Term",
    "Trust",
    "VaryingFit",
    "best_fit",
    "fit_rates",
    "make_predictor",
]
