"""How each method's line looks: colour, dash and mark together, so no colour alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mimose.report.page.looks import INK


class Look(NamedTuple):
    """Of a line and its dots."""

    colour: str
    """Of Okabe and Ito's palette."""
    dash: str = ""
    symbol: str = "circle"
    line: float = 2.0


LOOKS: Mapping[str, Look] = {
    "none": Look(INK, line=3.5),
    "mimose": Look("#0072B2", symbol="diamond", line=3.5),
    "mimose-fine": Look("#0072B2", "9 4", "diamond"),
    "full": Look("#D55E00", symbol="square"),
    "every-2": Look("#D55E00", "9 4", "square"),
    "lean": Look("#009E73", symbol="triangle"),
    "pool": Look("#E69F00", "2 3", "cross"),
    "quantize": Look("#CC79A7", "2 3", "cross"),
    "offload": Look("#CC79A7", "9 4", "triangle"),
    "accumulate": Look("#56B4E9", "10 3 2 3", "ring"),
    "sdpa": Look("#56B4E9", symbol="diamond"),
}
"""By method; lines of lossy ones are dotted."""
