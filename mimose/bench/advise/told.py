"""The answer for a script: plain data that JSON can hold."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from mimose.bench.advise.advice import Advice, MethodAdvice
from mimose.bench.advise.choice import Choice
from mimose.bench.advise.models import Steady
from mimose.bench.advise.recipe import recipe
from mimose.bench.advise.short import short_answer
from mimose.bench.advise.words import verdict


def as_json(advice: Advice) -> dict[str, Any]:
    """Return all that is said, and under which conditions was measured.

    Bytes and seconds; what is infinite or not a number is None.

    Args:
        advice: The answer.

    Returns:
        ``answer``, in a line; ``budget_bytes``; ``at_sample`` and ``free``, a choice
        each with the ``code`` that trains so, or None where nothing fits; ``methods``,
        with the two ``fits`` of those that have them; ``flips``; ``lengths``, or None
        where nobody knows them; ``p_point``; ``verdict``, the paragraphs;
        ``measurements``, without the readings.
    """
    conditions = asdict(advice.measurements)
    del conditions["methods"]
    told = _finite(
        {
            "answer": short_answer(advice),
            "budget_bytes": advice.budget_bytes,
            "at_sample": _choice(advice, advice.at_sample),
            "free": _choice(advice, advice.free),
            "methods": [_method(advice, each) for each in advice.methods],
            "flips": [flip._asdict() for flip in advice.flips],
            "lengths": None if advice.lengths is None else asdict(advice.lengths),
            "p_point": advice.p_point,
            "verdict": verdict(advice),
            "measurements": conditions,
        }
    )
    assert isinstance(told, dict)
    return told


def _choice(advice: Advice, choice: Choice | None) -> dict[str, Any] | None:
    if choice is None:
        return None
    code = "\n".join(recipe(choice.name, advice.budget_bytes))
    return {**asdict(choice), "ratio": choice.ratio, "code": code}


def _method(advice: Advice, method: MethodAdvice) -> dict[str, Any]:
    model = advice.models.get(method.name)
    fits = None
    if isinstance(model, Steady):
        fits = {
            "memory": asdict(model.fitted.memory),
            "seconds": asdict(model.fitted.seconds),
        }
    return {**asdict(method), "fits": fits}


def _finite(told: Any) -> Any:
    """Return the same with None for numbers that JSON has no word for."""
    if isinstance(told, dict):
        return {key: _finite(value) for key, value in told.items()}
    if isinstance(told, (list, tuple)):
        return [_finite(value) for value in told]
    if isinstance(told, float):
        return float(told) if math.isfinite(told) else None
    return told
