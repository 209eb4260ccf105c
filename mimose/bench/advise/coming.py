"""What is said of the lengths that will come."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mimose.bench.advise.advice import Advice
from mimose.bench.advise.conditions import least_readings
from mimose.bench.advise.lengths import LEAST_LENGTHS, LengthsAnswer, LengthsOfMethod
from mimose.bench.advise.phrases import (
    beyond,
    called,
    in_brackets,
    listed,
    percent,
)
from mimose.budget import format_bytes
from mimose.predictors import LEAST_ROUNDS


def at_your_lengths(advice: Advice) -> Iterator[str]:
    """Say which method trains the batches that will come, and how fast."""
    found = advice.lengths
    if found is None:
        if advice.measurements.lengths:
            yield (
                f"Of the lengths that will come nothing can be said: no method was "
                f"timed at enough of them (it takes {LEAST_LENGTHS})."
            )
        return
    yield " ".join(_sentences(advice, found))
    left_out = [each for each in found.methods if each.n_fit < found.n_batches]
    if left_out:
        yield (
            "Of these batches do not fit: "
            + listed([_left_out(found, each) for each in left_out])
            + "."
        )
    if found.unknown:
        names = listed([called(name) for name in found.unknown])
        yield (
            f"On these lengths {names} could not be compared: too few of them were "
            f"timed."
        )
    if found.most_tokens:
        yield _by_tokens(advice, found)


def _sentences(advice: Advice, found: LengthsAnswer) -> Iterator[str]:
    yield (
        f"Of the {found.n_batches:,} batches that will come, "
        f"{found.batch} samples of {found.shortest:,} to {found.longest:,} tokens each "
        f"(half of them up to {found.median:,}):"
    )
    by_name = {each.name: each for each in found.methods}
    if not found.best:
        yield "with no exact method that was measured do all of them fit."
        return
    best = by_name[found.best]
    if not found.runner_up:
        known = "of those that were timed " if found.unknown else ""
        yield f"{known}only with {_named(found, best)} do all of them fit."
        return
    other = by_name[found.runner_up]
    share = other.seconds / best.seconds - 1.0
    if found.is_tie:
        few = 0 < least_readings(advice) < LEAST_ROUNDS
        why = "in too few rounds to be sure" if few else "within the noise"
        yield (
            f"no winner between {_named(found, best)} and {_named(found, other)}, "
            f"which takes {percent(share)} longer, {why}."
        )
    else:
        yield (
            f"{_named(found, best)} is the fastest that fits all of them; "
            f"{_named(found, other)} takes {percent(share)} longer."
        )
    dearer = [
        f"{_named(found, each)} takes "
        f"{percent(each.seconds / best.seconds - 1.0)} longer"
        for each in found.methods
        if each.name not in (best.name, other.name)
        and each.is_exact
        and math.isfinite(each.seconds)
    ]
    if dearer:
        yield f"Beside the fastest: {listed(dearer)}."


def _named(found: LengthsAnswer, method: LengthsOfMethod) -> str:
    """Name a method, and from which lengths its times were estimated."""
    notes = in_brackets(beyond(found.longest, method.timed_to, "lengths"))
    return f"{called(method.name)}{notes}"


def _left_out(found: LengthsAnswer, method: LengthsOfMethod) -> str:
    share = (found.n_batches - method.n_fit) / found.n_batches
    return f"{percent(share)} with {called(method.name)}"


def _by_tokens(advice: Advice, found: LengthsAnswer) -> str:
    assert found.most_tokens is not None
    return (
        f"If you may put the batches together yourself, by tokens and not by samples: "
        f"batches of up to {found.most_tokens:,} padded tokens fit into "
        f"{format_bytes(advice.budget_bytes)} at any of these lengths without saving "
        f"any memory ({found.most_tokens // found.longest:,} of the longest texts, "
        f"{found.most_tokens // found.median:,} of the median). Then nothing has to be "
        f"computed twice."
    )
