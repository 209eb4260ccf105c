"""How names and numbers are written in an answer."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mimose.bench.advise.advice import Advice, MethodAdvice
from mimose.bench.advise.methods import PLAIN
from mimose.bench.advise.models import Steady
from mimose.predictors import Series
from mimose.predictors.lines import TOLERANCE
from mimose.predictors.noise import MEMORY_TOLERANCE
from mimose.report.page.looks import counted

UNKNOWN = "–"
"""Stands where nobody knows."""
_THOUSAND = 1000.0
_HUNDRED = 100.0


def called(name: str) -> str:
    """Return a method's name as it stands in a sentence."""
    return "plain training" if name == PLAIN else name


def explained(advice: Advice, name: str) -> str:
    """Return a method's name with what it does, where the name does not say that."""
    return called(name) if name == PLAIN else f"{name} ({advice.of(name).what})"


def listed(items: Sequence[str], last: str = "and") -> str:
    """Join items into one.

    >>> listed(["a", "b", "c"]), listed(["a"])
    ('a, b and c', 'a')
    """
    *others, final = items
    return f"{', '.join(others)} {last} {final}" if others else final


def batch_text(batch: float) -> str:
    """Write a batch size.

    >>> batch_text(19.0), batch_text(math.inf)
    ('19', 'any size')
    """
    return "any size" if math.isinf(batch) else f"{batch:,.0f}"


def beyond(size: float, measured_to: float, sizes: str = "batches") -> str:
    """Write that an answer goes beyond what was measured.

    Args:
        size: What it is about.
        measured_to: The largest that ran; of what is said of speed, that was timed.
        sizes: Of what.

    >>> beyond(66, 32), beyond(48, 32, "lengths"), beyond(32, 32)
    ('estimated from batches up to 32', 'estimated from lengths up to 32', '')
    """
    if math.isinf(size) or size <= measured_to:
        return ""
    return f"estimated from {sizes} up to {measured_to:g}"


def in_brackets(*parts: str) -> str:
    """Put what there is to add behind a word; nothing if there is nothing."""
    said = "; ".join(part for part in parts if part)
    return f" ({said})" if said else ""


def untimed(advice: Advice, names: Sequence[str]) -> str:
    """Say of these methods that their time is not known, and why."""
    reasons: dict[str, list[str]] = {}
    for name in names:
        method = advice.of(name)
        model = advice.models.get(name)
        why = method.no_time or method.no_verdict or method.why_not
        why = why or "your batch is far beyond those that were timed"
        if isinstance(model, Steady) and model.refused:
            why = f"its {refused_text(model)}"
        reasons.setdefault(why, []).append(called(name))
    return "; ".join(f"{listed(group)}: {why}" for why, group in reasons.items())


def refused_text(model: Steady) -> str:
    """Say which of a method's series follow no line, and how far off one is."""
    parts = (("bytes", model.fitted.memory), ("seconds", model.fitted.seconds))
    return " and ".join(
        f"{what} {_follow_no_line(series, allowed)}"
        for (what, series), allowed in zip(
            parts, (MEMORY_TOLERANCE, TOLERANCE), strict=True
        )
        if series.refused
    )


def _follow_no_line(series: Series, allowed: float) -> str:
    if math.isnan(series.loo_error):
        return "were read at too few batches to check a line with"
    what = "follow no line" if series.slope > 0.0 else "do not grow with the batch"
    return (
        f"{what} (predictions of left-out batches are off by {series.loo_error:.1%}; "
        f"allowed {allowed:.0%})"
    )


def sample_text(advice: Advice) -> str:
    """Write the sizes of the batch that was asked about."""
    of = advice.measurements
    samples = counted(of.batch, "sample")
    return samples if of.length is None else f"{samples} × {of.length:,} tokens"


def rate_text(samples_per_second: float) -> str:
    """Write a throughput, as a number to three figures.

    >>> rate_text(41.0), rate_text(0.12345), rate_text(1234.5), rate_text(321.4)
    ('41.0', '0.123', '1,234', '321')
    """
    if samples_per_second >= _THOUSAND:
        return f"{samples_per_second:,.0f}"
    if samples_per_second >= _HUNDRED:
        return f"{samples_per_second:.0f}"
    return f"{samples_per_second:#.3g}"


def ratio_text(ratio: float) -> str:
    """Write how many times more or less something is.

    >>> ratio_text(0.8131), ratio_text(12.34), ratio_text(math.nan)
    ('0.81', '12.3', '–')
    """
    if not math.isfinite(ratio):
        return UNKNOWN
    return f"{ratio:.1f}" if ratio >= 10.0 else f"{ratio:.2f}"


def interval_text(method: MethodAdvice) -> str:
    """Write between which ratios to plain training the truth lies."""
    if method.interval is None:
        return UNKNOWN
    low, high = method.interval
    return f"{low:.2f} to {high:.2f}"


def percent(share: float) -> str:
    """Write a share without more figures than it is known to.

    >>> percent(0.054), percent(0.2), percent(0.004)
    ('5.4%', '20%', '0.4%')
    """
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def longer(seconds: float, than: float) -> str:
    """Write how one time compares to another.

    >>> longer(1.1, 1.0), longer(0.5, 1.0), longer(1.0001, 1.0)
    ('10% longer than', '50% less than', 'as long as')
    """
    share = seconds / than - 1.0
    if abs(share) < 0.0005:
        return "as long as"
    return f"{percent(abs(share))} {'longer' if share > 0.0 else 'less'} than"
