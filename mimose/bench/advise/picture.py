"""The answer as a picture: throughput and largest batch over memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from mimose.bench.advise.advice import Advice
from mimose.bench.advise.flips import FURTHEST, Flip
from mimose.bench.advise.looks import LOOKS
from mimose.bench.advise.measured import Measured
from mimose.bench.advise.models import Model, Steady
from mimose.bench.advise.phrases import batch_text, called, listed, rate_text
from mimose.budget import format_bytes
from mimose.predictors.throughput import REACH
from mimose.report.page.looks import Figure, byte_unit, nothing
from mimose.report.page.scales import Extent, whole
from mimose.report.page.svg import Panel, Point, Rule, Series, draw

_NAME = "memory"
_TITLE = "Throughput and largest batch at every memory"
_PLACES = 90
"""On each line."""
_AROUND = 1.3
"""The axis shows at least so much more than the memory asked about."""
_ROOM = 1.1
_FAINT = 0.35


def picture(advice: Advice) -> Figure:
    """Draw what every method that has a model does, over memory.

    Args:
        advice: The answer.
    """
    models = [model for model in advice.models.values() if model.is_usable]
    memory = _memory(advice, models)
    if not models or memory is None:
        why = "Of no method bytes and seconds are known, so there is nothing to draw."
        return nothing(_NAME, _TITLE, why)
    factor, unit = byte_unit([memory[1]])
    drawn = _Drawn(advice, models, memory, factor)
    across = Extent(memory[0] / factor, memory[1] / factor)
    rates, sizes = list(drawn.rates()), list(drawn.sizes())
    if not rates or not sizes:
        why = (
            f"At {format_bytes(advice.budget_bytes)} all answers are about batches "
            f"more than twice the largest that ran, so there is nothing to draw."
        )
        return nothing(_NAME, _TITLE, why)
    panels = [
        Panel(across, _up(rates), "", "samples a second", rates, drawn.rules(), 380),
        Panel(
            across,
            _up(sizes),
            f"memory ({unit})",
            "largest batch",
            sizes,
            drawn.rules(is_named=False),
            220,
        ),
    ]
    caption = (
        "Above: the most samples a second that each method makes with the best batch "
        "that fits into a memory; below: its largest batch. The broken rule down both "
        "is the memory asked about; thin dotted rules are where another exact method "
        "becomes the fastest. Lines are fitted, or drawn through what was timed where "
        "no fit explains it, and batches are not rounded to whole samples; dots are "
        "steps that ran, at the memory they needed. A line is faint beyond the largest "
        "batch that ran, and ends at twice that. Methods that "
        "change gradients are dotted and no answer counts them."
    )
    return Figure(_NAME, _TITLE, caption, draw(panels, _TITLE))


class _Drawn:
    """The series of both panels.

    Args:
        advice: The answer.
        models: Those to draw.
        memory: From where to where, in bytes.
        factor: Bytes in a unit of the axis.
    """

    def __init__(
        self,
        advice: Advice,
        models: list[Model],
        memory: tuple[float, float],
        factor: float,
    ) -> None:
        self._advice = advice
        self._models = models
        self._memory = memory
        self._factor = factor

    def rates(self) -> Iterator[Series]:
        """Yield each method's throughput, and the steps that were timed."""
        for model in self._models:
            points = [
                (memory, model.best(memory, whole=False).samples_per_second)
                for memory in self._places(model)
            ]
            yield from self._line(model, points)
            yield from self._dots(model, self._timed(model))

    def sizes(self) -> Iterator[Series]:
        """Yield each method's largest batch, and the steps that were weighed."""
        for model in self._models:
            points = [
                (memory, model.largest_batch(memory, whole=False))
                for memory in self._places(model)
            ]
            yield from self._line(model, points)
            yield from self._dots(model, self._weighed(model))

    def rules(self, *, is_named: bool = True) -> list[Rule]:
        """Return the memory asked about, and where the answer flips."""
        budget = float(self._advice.budget_bytes)
        found = [(budget, f"asked about: {format_bytes(budget)}", "7 4")]
        found += [
            (flip.memory_bytes, f"from here on {_fastest(flip)}", "2 4")
            for flip in self._advice.flips
            if self._memory[0] < flip.memory_bytes < self._memory[1]
        ]
        return [
            Rule(at / self._factor, text if is_named else "", True, dash)
            for at, text, dash in found
        ]

    def _places(self, model: Model) -> list[float]:
        """Return the memories at which something fits, up to where a line ends."""
        places = np.linspace(*self._memory, _PLACES).tolist()
        fitting = [
            each
            for each in places
            if 0.0 < model.largest_batch(each, whole=False) < math.inf
        ]
        return [
            each
            for each in fitting
            if model.largest_batch(each, whole=False) <= REACH * model.highest
        ]

    def _line(
        self, model: Model, points: list[tuple[float, float]]
    ) -> Iterator[Series]:
        """Yield the part that was measured, and fainter the part that was not."""
        parts: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for memory, y in points:
            is_far = model.largest_batch(memory, whole=False) > model.highest
            parts[is_far].append((memory, y))
        if parts[False] and parts[True]:
            parts[True].insert(0, parts[False][-1])
        last = max((far for far, part in parts.items() if part), default=False)
        look = LOOKS[model.name]
        for is_far, part in parts.items():
            if part:
                yield Series(
                    name=called(model.name),
                    colour=look.colour,
                    points=[Point(x / self._factor, y) for x, y in part],
                    symbol=look.symbol,
                    size=0.0,
                    line=look.line,
                    dash=look.dash,
                    opacity=_FAINT if is_far else 1.0,
                    tag=called(model.name) if is_far == last else "",
                )

    def _dots(
        self, model: Model, points: list[tuple[float, float, str]]
    ) -> Iterator[Series]:
        low, high = self._memory
        look = LOOKS[model.name]
        found = [
            Point(memory / self._factor, y, text=f"{called(model.name)}, ran\n{said}")
            for memory, y, said in points
            if low <= memory <= high
        ]
        if found:
            yield Series(
                name=called(model.name),
                colour=look.colour,
                points=found,
                symbol=look.symbol,
                size=4.5,
                opacity=1.0,
            )

    def _timed(self, model: Model) -> list[tuple[float, float, str]]:
        """Return memory, samples a second and words of batches that were timed.

        Of methods that do the same at any memory: of the others a step's memory says
        nothing of which plan it had.
        """
        if not isinstance(model, Steady):
            return []
        return [
            (
                model.fitted.peak_bytes(each.batch),
                each.batch / each.seconds,
                f"batch {each.batch}: {rate_text(each.batch / each.seconds)} samples/s",
            )
            for each in self._measured(model).timed
            if each.length is None
        ]

    def _weighed(self, model: Model) -> list[tuple[float, float, str]]:
        if not isinstance(model, Steady):
            return []
        return [
            (
                float(each.reserved_bytes),
                float(each.batch),
                f"batch {batch_text(each.batch)}: {format_bytes(each.reserved_bytes)}",
            )
            for each in self._measured(model).weighed
            if each.length is None
        ]

    def _measured(self, model: Model) -> Measured:
        methods = self._advice.measurements.methods
        return next(each for each in methods if each.method == model.name)


def _fastest(flip: Flip) -> str:
    """Name the fastest from a flip on, and those that are as fast there."""
    return listed([called(name) for name in (flip.after, *flip.ties)], "or")


def _memory(advice: Advice, models: list[Model]) -> tuple[float, float] | None:
    """Return from where to where memory goes; None where nothing fits anywhere."""
    budget = float(advice.budget_bytes)
    places = np.geomspace(budget / FURTHEST, budget * FURTHEST, 4 * _PLACES).tolist()
    fitting = [
        each
        for each in places
        if any(model.largest_batch(each, whole=False) > 0.0 for model in models)
    ]
    if not fitting:
        return None
    ends = [
        low
        for model in models
        for low, high in pairwise(places)
        if model.largest_batch(low, whole=False) <= model.highest
        and model.largest_batch(high, whole=False) > model.highest
    ]
    far = max([_AROUND * budget, *(flip.memory_bytes for flip in advice.flips), *ends])
    low = min(fitting[0], budget)
    return max(0.0, low - 0.03 * (far - low)), min(far, FURTHEST * budget)


def _up(series: list[Series]) -> Extent:
    """Return the axis of all points, with room above for names."""
    most = max(point.y for each in series for point in each.points)
    return whole([0.0, _ROOM * most])
