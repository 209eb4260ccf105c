"""Reading how much memory is held, and the highest it has been."""

from mimose.memory.meters.allocator import AllocatorMeter as AllocatorMeter
from mimose.memory.meters.base import BasicMeter as BasicMeter
from mimose.memory.meters.base import Meter as Meter
from mimose.memory.meters.base import Reading as Reading
from mimose.memory.meters.choice import make_meter as make_meter
from mimose.memory.meters.prediction import PredictionMeter as PredictionMeter
from mimose.memory.meters.process import ProcessMeter as ProcessMeter

__all__ = [
    "AllocatorMeter",
    "BasicMeter",
    "Meter",
    "PredictionMeter",
    "ProcessMeter",
    "Reading",
    "make_meter",
]
