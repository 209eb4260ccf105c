"""What moving a byte costs, in FLOPs of products: by device and by their precision.

A plan adds FLOPs of products, and bytes that other operators move. A card that computes
160 FLOPs in half precision while it moves a byte computes 14 in single precision. So
with one price for both, plans of one of them would be wrong.

Nothing but the device's name, the flags of torch and the arguments of `attach` decides,
so equal runs make equal plans.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

HALF, TF32, SINGLE = "half", "TF32", "single"
"""Precisions of products: two bytes an element; float32 that is rounded to TF32; all
other."""


@dataclass(frozen=True, slots=True)
class Prices:
    """FLOPs that take as long as moving a byte from or to memory."""

    half: float
    tf32: float
    single: float
    source: str
    """What they are from, for the report."""

    def of(self, precision: str) -> float:
        """Return the price in products of a precision; of half if it is not known."""
        return {TF32: self.tf32, SINGLE: self.single}.get(precision, self.half)


_CARDS = {
    "H200": (170.0, 85.0, 12.5),
    "H100": (160.0, 80.0, 14.0),
    "A100": (117.0, 50.0, 8.6),
    "4090": (128.0, 64.0, 54.0),
    "A10": (148.0, 74.0, 37.0),
    # From here on, three quarters of what the data sheet says.
    "B200": (210.0, 105.0, 7.0),
    "GH200": (155.0, 77.0, 10.5),
    "V100": (104.0, 13.0, 13.0),
    "T4": (152.0, 19.0, 19.0),
    "L4": (303.0, 151.0, 76.0),
    "L40S": (314.0, 157.0, 79.0),
    "A40": (161.0, 81.0, 40.0),
    "A30": (133.0, 66.0, 8.3),
    "A6000": (151.0, 76.0, 38.0),
    "3090": (57.0, 28.0, 28.0),
    "5090": (88.0, 44.0, 44.0),
}
"""By a word of the device's name. The first five are rates that training was seen to
reach (``mimose/sim/hollow.py`` has the sources). The others are dense peaks in
NVIDIA's data sheets, divided by the bandwidth: such as 121 TFLOP/s and 0.3 TB/s of an
L4. V100 and T4 have no TF32."""
_CPU = 10.0
"""On one core `selective` took 24% of a BERT layer's time, its recomputation 41%."""
_OTHER = (150.0, 60.0, 20.0)
"""For cards that are not listed: about the middle of those that are."""


def prices_of(device_type: str, name: str, byte_flops: float | None = None) -> Prices:
    """Return the prices of a device.

    Args:
        device_type: Such as ``"cuda"``.
        name: The device's own name.
        byte_flops: One price for all precisions, which the user has fixed.
    """
    if byte_flops is not None:
        return Prices(byte_flops, byte_flops, byte_flops, "fixed by byte_flops")
    if device_type == "cpu":
        return Prices(_CPU, _CPU, _CPU, "of a CPU")
    for word in re.split(r"[^A-Z0-9]+", name.upper()):
        if word in _CARDS:
            return Prices(*_CARDS[word], f"of {name}")
    return Prices(*_OTHER, f"of no card in particular, as {name!r} is not listed")
