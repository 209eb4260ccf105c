"""The meter for a device."""

from __future__ import annotations

import logging

import torch

from mimose.exceptions import BudgetError
from mimose.memory.meters.allocator import AllocatorMeter
from mimose.memory.meters.base import BASIC, BasicMeter, BorrowedMeter, Meter
from mimose.memory.meters.prediction import PredictionMeter
from mimose.memory.meters.process import ProcessMeter

_log = logging.getLogger(__name__)


def make_meter(meter: Meter | BasicMeter | str | None, device: torch.device) -> Meter:
    """Return the meter for a device.

    Args:
        meter: A `Meter`, which is returned as it is; another object with the methods
            of `BasicMeter`; ``"allocator"``, ``"process"`` or ``"prediction"``; or
            None to choose by the device.
        device: Where the model's parameters are.

    Raises:
        BudgetError: The name is unknown.
    """
    if isinstance(meter, Meter):
        return meter
    if meter is not None and not isinstance(meter, str):
        own = [callable(getattr(meter, name, None)) for name in BASIC]
        if isinstance(meter, type) or not all(own):
            msg = f"meter {meter!r} is no object with the methods {', '.join(BASIC)}"
            raise BudgetError(msg)
        return BorrowedMeter(meter)
    if meter == "allocator":
        if device.type == "cpu":
            msg = "meter 'allocator' reads an accelerator; the model is on the CPU"
            raise BudgetError(msg)
        return AllocatorMeter(device)
    if meter == "process":
        return ProcessMeter()
    if meter == "prediction":
        return PredictionMeter(device)
    if meter is not None:
        msg = (
            f"meter {meter!r} is unknown: use 'allocator', 'process', 'prediction', an "
            f"object with the methods {', '.join(BASIC)}, or None"
        )
        raise BudgetError(msg)
    return _default_meter(device)


def _default_meter(device: torch.device) -> Meter:
    if device.type not in ("cpu", "mps"):
        return AllocatorMeter(device)
    if device.type == "cpu":
        try:
            return ProcessMeter()
        except (OSError, ValueError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
    else:
        reason = "its allocator keeps no peak"
    _log.warning(
        "mimose: the memory peak of %s cannot be read here (%s); plans are made by "
        "prediction alone and no step is checked against the budget",
        device,
        reason,
    )
    return PredictionMeter(device)
