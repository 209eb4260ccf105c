"""How far off are gradients made of packed tensors, and are they right on average?

All that a call saves is packed by one codec, behind the bits that are exact: nothing is
rebuilt, no plan chooses. Gradients are set against those of the bare call. Rounding
draws, so its gradients are averaged over 1, 4, 16 and 64 calls: where they are right on
average, the error falls with the square root of their number. That is so where a
gradient is linear in what was rounded; a layer's curves leave a rest that stays.

    python -m benchmarks.proofs unbiased
    python -m benchmarks.proofs unbiased --models resnet --draws 16
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.proofs.common import Answer, Bar, Settings, count, rows_of
from benchmarks.proofs.models import names_of
from benchmarks.proofs.numbers import percent
from benchmarks.proofs.packed_call import packed_call
from benchmarks.proofs.single_layers import alone
from mimose.bench.rows import Row
from mimose.run.actions.packing.base import Codec
from mimose.run.actions.packing.bits import Bits
from mimose.run.actions.packing.pooling import Pool
from mimose.run.actions.packing.quantizing import Quantize

QUESTION = "Are gradients made of packed tensors right on average, and how far off?"
OPTIONS = (count("--draws", 64, "averaged over at most"),)

_BITS = "bits"
_CODECS: Mapping[str, Callable[[int], Sequence[Codec]]] = {
    _BITS: lambda _: (),
    "quantize": lambda seed: (Quantize(8, seed),),
    "quantize4": lambda seed: (Quantize(4, seed),),
    "pool": lambda _: (Pool(2),),
    "pool4": lambda _: (Pool(4),),
}
_LAYERS = ("bert", "gpt2", "llama", "resnet")
_WIDTH, _ROWS, _PIXELS = 128, 4, 32
_SLOPE, _SLOPE_WITHIN = -0.5, 0.05
_SMALLER_BAR = 3.7
"""In 8 bits, of a tensor of 32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnbiasedRow(Row):
    """The gradients of one case, averaged over some calls."""

    model: str
    precision: str
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
        for key in dict.fromkeys((row.precision, row.codec) for row in rows):
            own = [row for row in rows if (row.precision, row.codec) == key]
            answer.add(", ".join((name, *key)), own, _line(own), _judge(own))
    return answer


def _line(rows: Sequence[UnbiasedRow]) -> Mapping[str, object]:
    first, last = rows[0], rows[-1]
    return {
        "times smaller": first.saved_bytes / first.packed_bytes,
        "weights": percent(first.weight_error, 2),
        "input": percent(first.input_error, 2),
        "weights, most draws": percent(last.weight_error, 2),
        "slope": _slope(rows),
    }


def _slope(rows: Sequence[UnbiasedRow]) -> float | None:
    """Return how errors fall with draws, on logarithms; None where none fall."""
    if len(rows) < 2 or not all(row.weight_error for row in rows):
        return None
    draws, errors = zip(*((row.draws, row.weight_error) for row in rows), strict=True)
    return float(np.polyfit(np.log(draws), np.log(errors), 1)[0])


def _judge(rows: Sequence[UnbiasedRow]) -> Iterator[Bar]:
    first = rows[0]
    if first.codec == _BITS:
        worst = max(first.weight_error, first.input_error)
        yield Bar("error", worst, 0.0)
    if first.codec.startswith("pool"):
        yield Bar("error of the input's gradient", first.input_error, 0.0)
    if first.codec.startswith("quantize") and first.model in _LINEAR:
        slope = _slope(rows)
        off = None if slope is None else abs(slope - _SLOPE)
        yield Bar(f"slope's distance from {_SLOPE}", off, _SLOPE_WITHIN)
    is_wide = first.precision == "float32" and first.model in _LINEAR
    if first.codec == "quantize" and is_wide:
        smaller = first.saved_bytes / first.packed_bytes
        yield Bar("times smaller", smaller, at_least=_SMALLER_BAR)


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Compare one case's gradients, codec by codec."""
    for precision in _precisions(task["model"]):
        torch.manual_seed(task["seed"])
        model, x = _CASES[task["model"]]()
        dtype = getattr(torch, precision)
        model, x = model.to(dtype), x.to(dtype).detach().requires_grad_()
        exact = _gradients(model, x, model(*_seeded(x)))
        for name, make in _CODECS.items():
            codecs = (Bits(), *make(task["seed"]))
            draws = task["draws"] if name.startswith("quantize") else 1
            for found in _averaged(model, x, codecs, draws):
                yield {
                    "model": task["model"],
                    "precision": precision,
                    "codec": name,
                    **{key: found[key] for key in _COUNTED},
                    "input_error": _error(exact[:1], found["gradients"][:1]),
                    "weight_error": _error(exact[1:], found["gradients"][1:]),
                }


_COUNTED = "saved_bytes", "packed_bytes", "draws"


def _precisions(name: str) -> tuple[str, ...]:
    # Elsewhere gradients themselves are rounded to what they are averaged in.
    return ("float32", "bfloat16") if name == "scale" else ("float32",)


def _seeded(x: torch.Tensor) -> tuple[torch.Tensor]:
    torch.manual_seed(1)  # dropout's masks are the same in each call
    return (x,)


def _gradients(
    model: nn.Module, x: torch.Tensor, output: torch.Tensor
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    direction = torch.randn(output.shape, generator=generator).sign().to(output)
    wanted = (x, *model.parameters())
    found = torch.autograd.grad(output, wanted, direction)
    return [gradient.double() for gradient in found]


def _averaged(
    model: nn.Module, x: torch.Tensor, codecs: Sequence[Codec], draws: int
) -> Iterator[dict[str, Any]]:
    """Yield gradients averaged over 1, 4, 16, ... calls, and what those held."""
    own = (*model.parameters(), *model.buffers())
    total: list[torch.Tensor] = []
    following = 1
    for number in range(1, draws + 1):
        call = packed_call(model, *_seeded(x), codecs, own)
        found = _gradients(model, x, call.output)
        total = [a + b for a, b in zip(total, found, strict=True)] if total else found
        if number == following:
            following *= 4
            yield {
                "gradients": [gradient / number for gradient in total],
                "draws": number,
                "saved_bytes": call.saved_bytes,
                "packed_bytes": call.device_bytes,
            }


def _error(exact: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float:
    one, other = (
        torch.cat([gradient.flatten() for gradient in gradients])
        for gradients in (exact, found)
    )
    return float((one - other).norm() / one.norm())


class _Scale(nn.Module):
    """Multiplies each element with a weight, whose gradient is that element."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones_like(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def _scale() -> tuple[nn.Module, torch.Tensor]:
    x = torch.randn(_ROWS, _WIDTH, _WIDTH)
    return _Scale(x), x


def _linear() -> tuple[nn.Module, torch.Tensor]:
    """Return a product with a weight, of a sequence that hardly changes."""
    model = nn.Linear(_WIDTH, _WIDTH)
    x = torch.randn(_ROWS, _WIDTH, _WIDTH).cumsum(1).div(_WIDTH**0.5)
    return model, x


def _smooth_images(channels: int) -> torch.Tensor:
    coarse = torch.randn(_ROWS, channels, _PIXELS // 4, _PIXELS // 4)
    size = (_PIXELS, _PIXELS)
    return functional.interpolate(coarse, size, mode="bicubic", align_corners=False)


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


class _Layer(nn.Module):
    """A layer as a model calls it, of which the first output counts."""

    def __init__(self, name: str) -> None:
        super().__init__()
        model, self.x = alone(name, 2)
        (self.layer,), self.options = model.layers, model.options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.layer(x, **self.options)
        first: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return first


def _layer(name: str) -> tuple[nn.Module, torch.Tensor]:
    layer = _Layer(name)
    return layer, layer.x


_LINEAR: Mapping[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "scale": _scale,
    "linear": _linear,
    "convolution": _convolution,
}
"""Cases whose gradients are linear in what is packed."""
_CASES: Mapping[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    **_LINEAR,
    "network": _network,
    **{name: partial(_layer, name) for name in _LAYERS},
}
