"""Predictors: how bytes and FLOPs follow from sizes, learned from few samples."""

from .alternatives import EstimatorPredictor, QuadraticScalarRegressor
from .base import Predictor
from .calibration import Calibration
from .envelope import EnvelopeRegressor
from .fragmentation import FragmentationRatio
from .limit import LearnedLimit
from .margin import Margin
from .polynomial import PolynomialRegressor
from .registry import PREDICTORS, make_predictor
from .sizes import Rule, SizeMap, Term

__all__ = [
    "PREDICTORS",
    "Calibration",
    "EnvelopeRegressor",
    "EstimatorPredictor",
    "FragmentationRatio",
    "LearnedLimit",
    "Margin",
    "PolynomialRegressor",
    "Predictor",
    "QuadraticScalarRegressor",
    "Rule",
    "SizeMap",
    "Term",
    "make_predictor",
]
