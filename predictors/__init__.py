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
from .trust import NOISY_STRETCH, STRETCH, Trust, best_fit
from .varying import Regressor, VaryingFit

__all__ = [
    "NOISY_STRETCH",
    "PREDICTORS",
    "STRETCH",
    "Calibration",
    "EnvelopeRegressor",
    "EstimatorPredictor",
    "FragmentationRatio",
    "LearnedLimit",
    "Margin",
    "PolynomialRegressor",
    "Predictor",
    "QuadraticScalarRegressor",
    "Regressor",
    "Rule",
    "SizeMap",
    "Term",
    "Trust",
    "VaryingFit",
    "best_fit",
    "make_predictor",
]
