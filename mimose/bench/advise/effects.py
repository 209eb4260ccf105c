"""What each method does, in words: batches, lengths, throughput, gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mimose.bench.advise.advice import Advice, MethodAdvice
from mimose.bench.advise.methods import PLAIN
from mimose.bench.advise.models import Steady
from mimose.bench.advise.phrases import (
    batch_text,
    beyond,
    called,
    in_brackets,
    interval_text,
    listed,
    ratio_text,
    refused_text,
)
from mimose.budget import format_bytes
from mimose.predictors.throughput import REACH

ACCUMULATE = "accumulate"
FURTHEST_LENGTH = 4
"""Times the longest measured: no longer input is looked for."""


def batches(advice: Advice) -> Iterator[str]:
    """Say which methods let a larger batch fit, and how many times."""
    plain = _plain(advice)
    if plain is None or plain.largest_batch is None:
        return
    known = [each for each in _told(advice) if each is not plain]
    larger = sorted(
        (each for each in known if _told_size(each) > _told_size(plain)),
        key=lambda each: -_told_size(each),
    )
    head = f"Largest batch within {format_bytes(advice.budget_bytes)}:"
    own = (
        f"plain training fits {largest_text(plain)}"
        if plain.largest_batch
        else "plain training fits not one sample"
    )
    if not larger:
        if known:
            yield f"{head} {own}; no other is known to fit more."
        return
    others = [
        f"{each.name} {largest_text(each, _times(_told_size(each), plain))}"
        for each in larger
    ]
    yield f"{head} {own}, {listed(others)}."


def lengths(advice: Advice) -> Iterator[str]:
    """Say which methods let longer inputs fit at the batch that is given."""
    plain = _plain(advice)
    known = [each for each in _told(advice) if each.longest is not None]
    if not known or advice.measurements.length is None:
        return
    own = 0 if plain is None else plain.longest or 0
    known.sort(key=lambda each: (each is not plain, -(each.longest or 0)))
    said = [
        f"{called(each.name)} {longest_text(advice, each)}"
        + in_brackets(_longer(each.longest, own), _measured_to(advice, each))
        for each in known
    ]
    yield (
        f"Longest input at your batch of {advice.measurements.batch}, in tokens: "
        f"{listed(said)}."
    )


def speeds(advice: Advice) -> Iterator[str]:
    """Say which methods raise or lower the best throughput, by how much."""
    exact = [each for each in _told(advice) if each.name != PLAIN]
    only = [each.name for each in exact if math.isinf(each.ratio)]
    if only:
        yield (
            f"Plain training does not fit with one sample; {listed(only)} "
            f"{'do' if only[1:] else 'does'}."
        )
        return
    groups = {
        "raise it": [each for each in exact if each.verdict == "raises"],
        "lower it": [each for each in exact if each.verdict == "lowers"],
    }
    said = [
        f"{listed([_ratio(each) for each in group])} {verb if group[1:] else one}"
        for (verb, group), one in zip(
            groups.items(), ("raises it", "lowers it"), strict=True
        )
        if group
    ]
    same = [each for each in exact if _is_noise(each)]
    if same:
        said.append(f"for {listed([_ratio(each) for each in same])} nobody can say")
    if said:
        yield (
            f"Best throughput, each method with the batch that suits it, as a multiple "
            f"of plain training's (in brackets: between what the noise leaves): "
            f"{'; '.join(said)}."
        )


def accumulation(advice: Advice) -> Iterator[str]:
    """Tell what accumulation is not for, where it may be chosen."""
    choices = [each for each in (advice.at_sample, advice.free) if each is not None]
    if any(ACCUMULATE in (each.name, each.runner_up) for each in choices):
        yield (
            "Accumulation needs no tool, only a change of your loop. It is not for "
            "losses or layers that compare the samples of a batch (contrastive losses, "
            "batch normalisation)."
        )


def lossy(advice: Advice) -> Iterator[str]:
    """Tell of the methods that change gradients, apart from all others."""
    said = [
        f"{each.name} ({each.what}): largest batch {largest_text(each)}, best "
        f"throughput {_ratio_of(each)}"
        for each in advice.methods
        if not each.is_exact and not each.why_not
    ]
    if said:
        yield (
            f"These change gradients, so they are no choice of memory alone, and none "
            f"of the answers above counts them: {'; '.join(said)}. Whether a model "
            f"still learns with them is to be tried on the task."
        )


def without_verdict(advice: Advice) -> Iterator[str]:
    """Say of which methods nothing is said, and why."""
    reasons: dict[str, list[str]] = {}
    for each in advice.methods:
        why = each.why_not or ("" if _is_noise(each) else _no_verdict(advice, each))
        if why:
            reasons.setdefault(why, []).append(called(each.name))
    if reasons:
        said = "; ".join(f"{listed(names)}: {why}" for why, names in reasons.items())
        yield f"No verdict on {said}."


def largest_text(method: MethodAdvice, *more: str) -> str:
    """Write a method's largest batch, and from what it was estimated.

    Not further than to twice the largest that ran.

    Args:
        method: Whose memory is known.
        *more: What else to put into the brackets.
    """
    batch = _size(method.largest_batch)
    if math.isinf(batch):
        return batch_text(batch)
    told = _told_size(method)
    over = "over " if told < batch else ""
    return f"{over}{told:,.0f}{in_brackets(*more, beyond(batch, method.highest))}"


def largest_cell(method: MethodAdvice) -> str:
    """Write a method's largest batch for a table, a tilde before one not run."""
    batch = _size(method.largest_batch)
    if math.isinf(batch):
        return batch_text(batch)
    told = _told_size(method)
    mark = "over " if told < batch else "~" if batch > method.highest else ""
    return f"{mark}{told:,.0f}"


def _told_size(method: MethodAdvice) -> float:
    """Return the largest batch, as far as it may be told."""
    batch = _size(method.largest_batch)
    return batch if math.isinf(batch) else min(batch, REACH * method.highest)


def longest_text(advice: Advice, method: MethodAdvice) -> str:
    """Write the longest input; one that was not looked beyond says so.

    Args:
        advice: The answer.
        method: One whose `longest` is known.
    """
    at_least = method.longest == FURTHEST_LENGTH * _longest_measured(advice, method)
    return f"{method.longest:,}{' or more' if at_least else ''}"


def _longest_measured(advice: Advice, method: MethodAdvice) -> int:
    measured = next(
        each for each in advice.measurements.methods if each.method == method.name
    )
    known = (*measured.weighed, *measured.timed, *measured.foretold)
    return max((each.length or 0 for each in known), default=0)


def _plain(advice: Advice) -> MethodAdvice | None:
    found = (each for each in advice.methods if each.name == PLAIN and not each.why_not)
    return next(found, None)


def _told(advice: Advice) -> list[MethodAdvice]:
    """Return the exact methods whose memory is known, accumulation left out."""
    return [
        each
        for each in advice.methods
        if each.is_exact
        and not each.why_not
        and each.name != ACCUMULATE
        and not _memory_refused(advice, each.name)
    ]


def _no_verdict(advice: Advice, method: MethodAdvice) -> str:
    """Say why there is no verdict; of fits that were refused in fewer words."""
    plain = advice.models.get(PLAIN)
    own = advice.models.get(method.name)
    if isinstance(plain, Steady) and not plain.is_usable and own is not None:
        return f"plain training's {refused_text(plain)}"
    if isinstance(own, Steady) and not own.is_usable:
        return f"its {refused_text(own)}"
    return method.no_verdict


def _memory_refused(advice: Advice, name: str) -> str:
    model = advice.models.get(name)
    return model.fitted.memory.refused if isinstance(model, Steady) else ""


def _size(batch: int | None) -> float:
    return math.inf if batch is None else float(batch)


def _times(found: float, plain: MethodAdvice) -> str:
    own = _told_size(plain)
    if not own or found <= own or math.isinf(found):
        return ""
    return f"{found / own:.1f} times"


def _longer(found: int | None, plain: int) -> str:
    return f"{found / plain:.1f} times" if found and plain and found > plain else ""


def _measured_to(advice: Advice, method: MethodAdvice) -> str:
    return beyond(method.longest or 0, _longest_measured(advice, method), "lengths")


def _is_noise(method: MethodAdvice) -> bool:
    return method.interval is not None and not method.verdict


def _ratio(method: MethodAdvice) -> str:
    return f"{method.name} {_ratio_of(method)}"


def _ratio_of(method: MethodAdvice) -> str:
    if math.isinf(method.ratio):
        return "where plain training does not fit"
    if math.isnan(method.ratio):
        return "not known"
    notes = in_brackets(
        interval_text(method) if method.interval else "",
        beyond(method.best_batch, method.timed_to),
    )
    return f"{ratio_text(method.ratio)}{notes}"
