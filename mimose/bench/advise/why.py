"""Why the answer is what it is, with the numbers of this run."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mimose.bench.advise.advice import Advice, MethodAdvice
from mimose.bench.advise.methods import PLAIN
from mimose.bench.advise.models import Model, Steady
from mimose.bench.advise.phrases import UNKNOWN, listed
from mimose.budget import format_bytes
from mimose.predictors import Series
from mimose.predictors.lines import LINE
from mimose.report.page.looks import format_seconds
from mimose.report.page.tables import Cell, Table

_UNKNOWN: Cell = (UNKNOWN, -1.0)


def how_to_read(advice: Advice) -> list[str]:
    """Explain the rule behind the answer, a paragraph each.

    Args:
        advice: The answer.
    """
    return [
        "Every method that holds less makes a sample dearer: something is computed a "
        "second time, moved or packed. What it gives is room for more samples in a "
        "step, and a step has a fixed part (starting it, small operators, the "
        "optimizer) that more samples share. It makes training faster only where the "
        "second outweighs the first.",
        *_rule(advice),
        "Each series was fitted by the batch size: bytes as a line, or as a floor and "
        "then a line where a working buffer makes the peak of small batches; seconds "
        "as a line, or as flat and then a line where small batches do not fill the "
        "device. R² says how much of what was measured the fit explains, 1 being all. "
        "The ceiling is the R² with which one half of the rounds tells the other: no "
        "fit can be better than that. It is low on a noisy machine, and where "
        "throughput hardly changes with the batch, so that there is little to explain. "
        "A verdict does not rest on it but on the range that resampled rounds leave.",
    ]


def how_fitted(advice: Advice) -> Table:
    """Return the table of the fits, a row for each method that does not plan.

    Args:
        advice: The answer.
    """
    fitted = [
        (each, model)
        for each in advice.methods
        if isinstance(model := advice.models.get(each.name), Steady)
    ]
    planned = [
        name for name, model in advice.models.items() if not isinstance(model, Steady)
    ]
    caption = (
        "Bytes and seconds of a step: fixed, and for each sample. What is saved for a "
        "second: bytes that a sample saves, over the seconds it costs more."
    )
    if planned:
        caption += (
            f" {listed(planned)}: no line of their own; plain training's seconds, and "
            f"what the plans for each batch and memory add to them."
        )
    return Table(
        "fits",
        "How each was fitted",
        caption,
        (
            "method",
            "memory",
            "fixed",
            "a sample",
            "R²",
            "points",
            "seconds",
            "fixed time",
            "time a sample",
            "R² of seconds",
            "timed",
            "ceiling",
            "saved for a second",
        ),
        [_row(each, model) for each, model in fitted],
    )


def _rule(advice: Advice) -> Iterator[str]:
    """Yield the rule with this run's numbers, where both sides of it are known."""
    plain = advice.models.get(PLAIN)
    if not isinstance(plain, Steady) or plain.refused or math.isnan(advice.p_point):
        yield (
            "Plain training's bytes or seconds are no straight line here, so the "
            "short rule for that does not apply; the answer is from the fits below."
        )
        return
    fixed = plain.fitted.seconds.intercept
    free = advice.budget_bytes - plain.fitted.memory.intercept
    if free <= 0.0:
        yield (
            f"Here {format_bytes(advice.budget_bytes)} do not even hold what does not "
            f"depend on the batch ({format_bytes(plain.fitted.memory.intercept)}: "
            f"weights, gradients, the optimizer's state)."
        )
        return
    if math.isinf(advice.p_point):
        yield (
            "Here a step has no fixed time that could be measured: a larger batch wins "
            "nothing, so saving memory cannot make training faster, only possible."
        )
        return
    yield (
        f"Here a plain step has {format_seconds(fixed)} of fixed time, and "
        f"{format_bytes(free)} of {format_bytes(advice.budget_bytes)} are free for "
        f"samples: {_per_second(advice.p_point)}. A method has to save more "
        f"bytes a sample than that for each second that it makes a sample dearer, or "
        f"training gets slower. {_sides(advice)}"
    )
    yield (
        "That rule takes what does not depend on the batch to be the same with and "
        "without a method. The verdicts above do not: they are from each method's own "
        "fits."
    )


def _sides(advice: Advice) -> str:
    scores = [each for each in advice.methods if not math.isnan(each.p_score)]
    over = [each for each in scores if each.p_score > advice.p_point]
    under = [each for each in scores if each.p_score <= advice.p_point]
    parts = [
        f"{listed([_side(each) for each in group])} {what}"
        for group, what in ((over, "above it"), (under, "not above it"))
        if group
    ]
    return f"{'; '.join(parts)}." if parts else ""


def _side(method: MethodAdvice) -> str:
    if math.isinf(method.p_score):
        free = "for nothing" if method.p_score > 0.0 else "nothing"
        return f"{method.name} (saves {free})"
    return f"{method.name} ({_per_second(method.p_score)})"


def _per_second(n_bytes: float) -> str:
    return f"{format_bytes(n_bytes)} for each second"


def _row(method: MethodAdvice, model: Model) -> tuple[Cell, ...]:
    assert isinstance(model, Steady)
    memory, seconds = model.fitted.memory, model.fitted.seconds
    return (
        (method.name, method.name),
        _form(memory),
        _bytes(memory.floor),
        _bytes(memory.slope),
        _r2(memory.r2),
        _count(memory.n_points),
        _form(seconds),
        _seconds(seconds.floor),
        _seconds(seconds.slope),
        _r2(seconds.r2),
        _count(seconds.n_points),
        _r2(method.ceiling),
        _bytes(method.p_score),
    )


def _form(series: Series) -> Cell:
    text = "line" if series.form == LINE else f"flat to {series.knee:.3g}"
    text += ", refused" if series.refused else ""
    return text, text


def _bytes(n_bytes: float) -> Cell:
    return (format_bytes(n_bytes), n_bytes) if math.isfinite(n_bytes) else _UNKNOWN


def _seconds(seconds: float) -> Cell:
    sign = "−" if seconds < 0.0 else ""
    return f"{sign}{format_seconds(abs(seconds))}", seconds


def _r2(value: float) -> Cell:
    return (f"{value:.4f}", value) if math.isfinite(value) else _UNKNOWN


def _count(number: int) -> Cell:
    return f"{number}", float(number)
