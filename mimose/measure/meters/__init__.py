"""Reading how much memory is held, and the highest it has been."""

from mimose.measure.meters.allocator import AllocatorMeter as AllocatorMeter
from mimose.measure.meters.base import BasicMeter as BasicMeter
from mimose.measure.meters.base import Meter as Meter
from mimose.measure.meters.base import Reading as Reading
from mimose.measure.meters.choice import make_meter as make_meter
from mimose.measure.meters.prediction import PredictionMeter as PredictionMeter
from mimose.measure.meters.process import ProcessMeter as ProcessMeter

__all__ = [
    "AllocatorMeter",
    "BasicMeter",
    "Meter",
    "PredictionMeter",
    "ProcessMeter",
    "Reading",
    "make_meter",
]
