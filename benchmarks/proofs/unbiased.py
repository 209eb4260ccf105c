"""How far off are gradients made of packed tensors, and are they right on average?

All that a call saves is packed by one codec, behind the bits that are exact: nothing is
rebuilt, no plan chooses. Gradients are set against those of the bare call. Rounding
draws, so its gradients are averaged over 1, 4, 16 and 64 calls: where they are right on
average, the error falls with the square root of their number. That is so where a
gradient is linear in what was rounded, as in all cases but the network of several
layers, whose curves leave a rest that stays.

    python -m benchmarks.proofs unbiased
    python -m benchmarks.proofs unbiased --models linear --draws 16
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.proofs.common import Answer, Bar, Settings, count, rows_of
from benchmarks.proofs.models import names_of
from benchmarks.proofs.packed_call import packed_call
from mimose.bench.rows import Row
from mimose.run.actions.packing.base import Codec
from mimose.run.actions.packing.bits import Bits
from mimose.run.actions.packing.pooling import Pool
from mimose.run.actions.packing.quantizing import Quantize

QUESTION = "Are gradients made of packed tensors right on average, and how far off?"
OPTIONS = (count("--draws", 64, "averaged over at most"),)

_CODECS: Mapping[str, Callable[[int], Sequence[Codec]]] = {
    "bits": lambda _: (),
    "quantize": lambda seed: (Quantize(8, seed),),
    "quantize4": lambda seed: (Quantize(4, seed),),
    "pool": lambda _: (Pool(2),),
    "pool4": lambda _: (Pool(4),),
}
_WIDTH, _ROWS, _PIXELS = 128, 4, 32
_SLOPE, _SLOPE_WITHIN = -0.5, 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class UnbiasedRow(Row):
    """The gradients of one case, averaged over some calls."""

    model: str
    codec: str
    saved_bytes: int
    packed_bytes: int
    draws: int
    weight_error: float
    """Of all weights' gradients together: the difference's norm by the gradient's."""
    input_error: float
    """Of the input's."""


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Compare, for every case and codec."""
    answer = Answer()
    for name in names_of(_CASES, settings.models):
        task = {"draws": options.draws}
        rows = rows_of(UnbiasedRow, "unbiased", settings, model=name, **task)
        for codec in _CODECS:
            own = [row for row in rows if row.codec == codec]
            answer.add(f"{name}, {codec}", own, _line(own), judge(own))
    return answer


def _line(rows: Sequence[UnbiasedRow]) -> Mapping[str, object]:
    first, last = rows[0], rows[-1]
    return {
        "times smaller": first.saved_bytes / first.packed_bytes,
        "weights": f"{first.weight_error:.2%}",
        "input": f"{first.input_error:.2%}",
        "weights, most draws": f"{last.weight_error:.2%}",
        "slope": _slope(rows),
    }


def _slope(rows: Sequence[UnbiasedRow]) -> float | None:
    """Return how errors fall with draws, on logarithms; None where none fall."""
    if len(rows) < 2 or not all(row.weight_error for row in rows):
        return None
    draws, errors = zip(*((row.draws, row.weight_error) for row in rows), strict=True)
    return float(np.polyfit(np.log(draws), np.log(errors), 1)[0])


def judge(rows: Sequence[UnbiasedRow]) -> Iterator[Bar]:
    """Judge a case under one codec: its rows, the fewest draws first."""
    first = rows[0]
    is_linear = first.model != "network"
    if first.codec == "bits":
        yield Bar("error", max(first.weight_error, first.input_error), 0.0)
    if first.codec.startswith("pool"):
        yield Bar("error of the input's gradient", first.input_error, 0.0)
    if first.codec.startswith("quantize") and is_linear:
        slope = _slope(rows)
        off = None if slope is None else abs(slope - _SLOPE)
        yield Bar(f"slope's distance from {_SLOPE}", off, _SLOPE_WITHIN)


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Compare one case's gradients, codec by codec."""
    torch.manual_seed(task["seed"])
    model, x = _CASES[task["model"]]()
    x.requires_grad_()
    exact = _gradients(model, x, model(x))
    for name, make in _CODECS.items():
        codecs = (Bits(), *make(task["seed"]))
        draws = task["draws"] if name.startswith("quantize") else 1
        for found, told in _averaged(model, x, codecs, draws):
            yield {
                **{"model": task["model"], "codec": name, **told},
                "input_error": _error(exact[:1], found[:1]),
                "weight_error": _error(exact[1:], found[1:]),
            }


def _gradients(
    model: nn.Module, x: torch.Tensor, output: torch.Tensor
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    direction = torch.randn(output.shape, generator=generator).sign().to(output)
    found = torch.autograd.grad(output, (x, *model.parameters()), direction)
    return [gradient.double() for gradient in found]


def _averaged(
    model: nn.Module, x: torch.Tensor, codecs: Sequence[Codec], draws: int
) -> Iterator[tuple[list[torch.Tensor], dict[str, int]]]:
    """Yield gradients averaged over 1, 4, 16, ... calls, and what those held."""
    own = (*model.parameters(), *model.buffers())
    total: list[torch.Tensor] = []
    following = 1
    for number in range(1, draws + 1):
        call = packed_call(model, x, codecs, own)
        found = _gradients(model, x, call.output)
        total = [a + b for a, b in zip(total, found, strict=True)] if total else found
        if number == following:
            following *= 4
            told = {"saved_bytes": call.saved_bytes, "packed_bytes": call.device_bytes}
            yield [each / number for each in total], {**told, "draws": number}


def _error(exact: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float:
    one, other = (torch.cat([g.flatten() for g in each]) for each in (exact, found))
    return float((one - other).norm() / one.norm())


def _linear() -> tuple[nn.Module, torch.Tensor]:
    """Return a product with a weight, of a sequence that hardly changes."""
    model = nn.Linear(_WIDTH, _WIDTH)
    return model, torch.randn(_ROWS, _WIDTH, _WIDTH).cumsum(1).div(_WIDTH**0.5)


def _smooth_images(channels: int) -> torch.Tensor:
    coarse = torch.randn(_ROWS, channels, _PIXELS // 4, _PIXELS // 4)
    size = (_PIXELS, _PIXELS)
    return functional.interpolate(coarse, size=size, mode="bicubic")


def _convolution() -> tuple[nn.Module, torch.Tensor]:
    return nn.Conv2d(16, 16, 3, padding=1), _smooth_images(16)


def _block(given: int, made: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(given, made, 3, padding=1, bias=False)
    return convolution, nn.BatchNorm2d(made), nn.ReLU(inplace=True)


def _network() -> tuple[nn.Module, torch.Tensor]:
    """Return convolutions, norms and ReLUs, on smooth images."""
    last = nn.Conv2d(32, 10, 1), nn.AdaptiveAvgPool2d(1)
    first = *_block(3, 32), nn.MaxPool2d(3, 2, 1)
    layers = *first, *_block(32, 32), *_block(32, 32)
    return nn.Sequential(*layers, *last), _smooth_images(3)


_CASES: Mapping[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "linear": _linear,
    "convolution": _convolution,
    "network": _network,
}
"""All gradients but the network's are linear in what is packed."""
