"""Predictors: how bytes and FLOPs follow from sizes, learned from few samples."""

from .alternatives import EstimatorPredictor, QuadraticScalarRegressor
from .base import Predictor
from .envelope import EnvelopeRegressor
from .fragmentation import FragmentationRatio
from .growth_bound import GrowthBound
from .limit import LearnedLimit
from .polynomial import PolynomialRegressor
from .registry import PREDICTORS, make_predictor
from .sizes import Rule, SizeMap, Term

__all__ = [
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
    "SizeMap",
    "Term",
    "make_predictor",
]
