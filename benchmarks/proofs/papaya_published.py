"""What PAPAYA measured: peaks and times of a step by batch size, under six methods.

Liu et al., "An Evaluation of Memory Optimization Methods for Training Neural Networks",
https://github.com/LiuXiaoxuanPKU/papaya: a V100 of 16 GB. Lines are least squares over
all of its points. Of some series its points are here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mimose.predictors import MethodModel, Series

MIB = 2.0**20
MB = 1e6
DEVICE = 16_000
"""Of the device, in the unit of a model's rows."""
USABLE = 0.8
"""The share of it that the rule takes as free of fragmentation."""
PLAIN = "plain"
_MILLI = 1e-3


class Measured(NamedTuple):
    """One model under one method."""

    model: str
    method: str
    fitted: MethodModel
    """Lines over all points."""
    memory_bytes: float
    """What the rule takes the device to have."""
    most_batch: int
    """The largest that was trained."""
    most_throughput: float
    """The most samples a second that were measured, at any batch."""


class Points(NamedTuple):
    """One series of readings."""

    model: str
    method: str
    is_memory: bool
    batches: NDArray[np.float64]
    """(n_points,) samples."""
    values: NDArray[np.float64]
    """(n_points,) bytes, or seconds."""


# Columns: bytes a sample and fixed, milliseconds a sample and fixed, the largest batch,
# the most samples a second.
_ROWS: Mapping[str, tuple[float, str]] = {
    "BERT-L": (
        MIB,
        """
        plain              208.82   5262   4.052    78.6   44  163.9
        ckpt                21.25   5283   7.145    48.3  400  139.1
        quant L1            44.58   5499   7.929   174.2  176  109.2
        quant L1 + ckpt      8.55   5296  11.378     5.6  784   90.0
        4-bit + swap         8.18   5333  15.944   216.4  592   61.3
        swap + ckpt          6.36   5382  51.515   233.4  520   19.3
        """,
    ),
    "Swin-L": (
        MB,
        """
        plain              281.26   4674   7.284   210.1   32   70.7
        ckpt                61.80   5174  11.428   164.0  108   76.9
        quant L1            55.34   4935  10.054   243.5   92   75.9
        4-bit + swap        31.91   4890  19.846   216.2  196   47.8
        swap                32.10   5153  57.439   208.8  184   17.1
        """,
    ),
    "GPT3-S": (
        MB,
        """
        plain              660.59   2250   8.950    40.1   19   88.9
        ckpt               317.86   2305  12.722    45.4   37   71.2
        quant L1           410.73   2293  17.145    70.0   30   50.8
        4-bit + swap       332.90   2255  35.664    88.2   32   26.2
        """,
    ),
    "ResNet-50": (
        MIB,
        """
        plain               82.57    322   2.540    17.7  168  378.9
        quant L1            21.88    443   3.538    18.7  480  282.4
        4-bit + swap        16.33    363   5.359    25.4  688  185.7
        swap                14.36    300  25.515     8.0  400   39.9
        DTR                 74.13    587   7.082     4.2  200  142.5
        """,
    ),
    "WRN-50-2": (
        MIB,
        """
        plain              107.71    981   4.712    24.3  120  204.0
        quant L1            30.99    919   6.004    23.9  368  166.1
        4-bit + swap        15.88   1300   8.432     6.7  656  120.7
        swap                15.69    908  34.216    59.7  128   29.2
        DTR                 55.42   2685  14.607  -104.8  200   82.5
        """,
    ),
}

_SERIES: tuple[tuple[str, str, float, str], ...] = (
    (
        "BERT-L",
        "plain",
        MIB,
        "4:6030.8 12:7677.7 20:9629.6 28:11176.8 36:12761.6 44:14364.8",
    ),
    (
        "BERT-L",
        "plain",
        _MILLI,
        "4:114.7 12:115.5 20:146.8 28:184.3 36:225.1 44:268.4",
    ),
    (
        "GPT3-S",
        "plain",
        _MILLI,
        "1:61.0 2:62.8 3:67.3 4:73.4 5:81.2 6:89.6 7:99.0 8:106.9 9:116.2 10:128.2 "
        "12:148.7 14:164.7 16:184.4 18:204.1 19:213.7",
    ),
    (
        "GPT3-S",
        "plain",
        MB,
        "1:2905.5 2:3569.3 4:4887.9 8:7528.5 12:10166.6 16:12807.0 19:14810.6",
    ),
    (
        "Swin-L",
        "ckpt",
        MB,
        "4:4482.7 8:4488.8 12:4491.5 16:4500.5 20:4495.1 24:4513.5 28:4563.0 "
        "32:4698.6 36:4843.6 40:4988.0 60:5673.3 80:6374.6 120:7765.3 160:9156.1 "
        "200:10531.9 240:11919.6 264:12759.0",
    ),
    (
        "GPT3-S",
        "ckpt",
        MB,
        "1:2993.4 2:3005.9 3:3207.7 4:3526.0 5:3846.9 8:4807.7 12:6089.4 16:7368.8 "
        "24:9929.4 32:12491.6 37:14091.7",
    ),
    (
        "BERT-L",
        "ckpt",
        MIB,
        "4:5306.5 12:5456.9 20:6068.3 28:6187.5 36:6302.2 44:6429.6 52:6109.1 "
        "60:6227.3 64:6715.7 96:6837.1 128:7971.5 160:8683.7 192:9395.8 224:9685.8 "
        "256:10820.2 288:11533.8 320:12246.0 352:12533.7 384:13669.3",
    ),
    (
        "BERT-L",
        "quant L1",
        MIB,
        "4:5191.0 12:6475.7 20:6812.7 28:6641.9 36:7493.3 44:6960.8 52:7670.0 "
        "60:7996.2 64:8556.7 96:9549.8 128:11304.1 160:12714.5",
    ),
    (
        "WRN-50-2",
        "DTR",
        MIB,
        "4:991.9 12:1821.2 20:2669.4 28:3503.0 36:4341.1 44:5179.9 52:6035.7 "
        "60:6887.5 64:7339.9 96:10772.4 128:14232.4 160:14353.3 192:10094.5 "
        "200:10103.0",
    ),
)
"""Values in a unit of bytes, or in milliseconds. Swin-L's are of another mixed
precision than its lines."""


def _measured(model: str, unit: float, line: str) -> Measured:
    words = line.split()
    memory, fixed, cost, fixed_cost = (float(word) for word in words[-6:-2])
    method = " ".join(words[:-6])
    fitted = MethodModel(
        method,
        memory=Series.line(unit * memory, unit * fixed),
        seconds=Series.line(_MILLI * cost, _MILLI * fixed_cost),
    )
    return Measured(
        model,
        method,
        fitted,
        memory_bytes=USABLE * DEVICE * unit,
        most_batch=int(words[-2]),
        most_throughput=float(words[-1]),
    )


ROWS: tuple[Measured, ...] = tuple(
    _measured(model, unit, line)
    for model, (unit, lines) in _ROWS.items()
    for line in lines.strip().splitlines()
)
"""By model, the plain one first."""


def _points(model: str, method: str, unit: float, text: str) -> Points:
    pairs = (pair.split(":") for pair in text.split())
    points = np.array([(float(batch), float(value)) for batch, value in pairs])
    return Points(model, method, unit != _MILLI, points[:, 0], unit * points[:, 1])


SERIES: tuple[Points, ...] = tuple(_points(*each) for each in _SERIES)
"""All series of which there are points."""


def pairs() -> list[tuple[Measured, Measured]]:
    """Return every method, after the plain row of its model."""
    plain = {row.model: row for row in ROWS if row.method == PLAIN}
    return [(plain[row.model], row) for row in ROWS if row.method != PLAIN]
