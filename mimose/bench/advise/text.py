"""The answer as text: a headline, a table, some sentences, and code to use."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Iterator, Sequence

from mimose.bench.advise.advice import (
    LEAST_ROUNDS,
    Advice,
    Choice,
    MethodAdvice,
    is_close,
    n_readings,
    plain_bytes,
)
from mimose.bench.advise.measure import MORE
from mimose.bench.advise.methods import METHODS, PARTS, PLAIN
from mimose.budget import format_bytes
from mimose.planners import Pattern
from mimose.predictors.throughput import REACH

_UNKNOWN = "–"
_COLUMNS = (
    "method",
    "verdict",
    "largest batch",
    "your batch takes",
    "best batch",
    "samples/s",
    "× plain",
    "between",
)
_WITHOUT_A_SESSION = {
    "sdpa": ('model.set_attn_implementation("sdpa")',),
    "accumulate": (
        f"for part in parts:  # {PARTS} of a batch",
        f"    (loss_of(part) / {PARTS}).backward()",
        "optimizer.step()",
        "optimizer.zero_grad()",
    ),
}


def text(advice: Advice, width: int | None = None) -> str:
    """Return the answer as text for a terminal.

    Args:
        advice: The answer.
        width: Number of columns; None for the terminal's.
    """
    width = max(20, width or shutil.get_terminal_size((100, 24)).columns)
    sentences = [headline(advice), *_sentences(advice)]
    first, *others = (textwrap.fill(each, width) for each in sentences)
    parts = [first, "\n".join(table(advice, width)), *others]
    for name in advice.use if advice.answer == "yes" else ():
        code = (f"  {line}" for line in recipe(name, advice.budget_bytes))
        parts.append("\n".join([f"To train with {name}:", *code]))
    return "\n\n".join(parts)


def headline(advice: Advice) -> str:
    """Return one line: yes, no or not known, and why."""
    of, budget = advice.measurements, format_bytes(advice.budget_bytes)
    use, fits = _listed(advice.use, "or"), advice.of(PLAIN).fits
    it, without = f"your batch of {of.batch}", "does not fit"
    if not math.isnan(plain_bytes(of)):
        without = f"needs {format_bytes(plain_bytes(of))}"
    if advice.answer == "yes" and fits:
        return f"Yes: use {use}. Plain training fits into {budget}, but is slower."
    if advice.answer == "yes":
        return f"Yes: use {use}. With plain training {it} {without}; there is {budget}."
    if advice.answer == "no" and fits:
        return f"No: train as you do. In {budget} {it} fits, and nothing is faster."
    if advice.answer == "no":
        return f"No: no exact method that was measured makes {it} fit into {budget}."
    more = _remedy(advice, (PLAIN,) if fits is None else advice.use)
    if fits is not None and is_close(of, advice.budget_bytes):
        sure = f"; to be sure, use {use}" if use else ""
        return (
            f"Not known: plain training needs almost exactly {budget}, all there "
            f"is{sure}."
        )
    if fits:
        rival = use or "another method"
        return f"Not known whether {rival} is faster: train as you do, it fits; {more}."
    if fits is None:
        return f"Not known whether {it} fits into {budget} with plain training; {more}."
    return (
        f"Not known: with plain training {it} {without}, there is {budget}, and {use} "
        f"was not measured; {more}."
    )


def _remedy(advice: Advice, names: Sequence[str]) -> str:
    """Return what would help: more minutes, or why more time does not help."""
    reasons = {name: _why_unknown(advice.of(name)) for name in names}
    own = [f"{of}: {why}" for of, why in reasons.items() if why and MORE not in why]
    if own and len(own) == len(names):
        return "; ".join(own)
    minutes = math.ceil(advice.measurements.promised_seconds / 30)
    return "; ".join([*own, f"give it {minutes} minutes"])


def _why_unknown(method: MethodAdvice) -> str:
    """Return why a method's throughput is not known; "" if it is."""
    return "" if method.interval else method.why_not or method.no_verdict


def _sentences(advice: Advice) -> Iterator[str]:
    of = advice.measurements
    if advice.at_sample is not None:
        yield f"With your batch of {of.batch}, {_compared(advice.at_sample)}."
    if advice.free is not None:
        free = _compared(advice.free, batches=True)
        yield f"If you may choose the batch, {free}."
    if advice.answer == "yes" and "accumulate" in advice.use:
        yield (
            "Accumulation needs only a change of your loop. It is not for losses or "
            "layers that compare the samples of a batch (batch normalisation)."
        )
    lossy = [each.name for each in advice.methods if not each.is_exact]
    if lossy:
        yield f"* {_listed(lossy)}: gradients differ, so the answer leaves them out."
    whys: dict[str, list[str]] = {}
    for each in advice.methods:
        if why := _why_unknown(each):
            whys.setdefault(why, []).append(each.name)
    if whys:
        said = (f"{_listed(names)} ({why})" for why, names in whys.items())
        yield f"Not known: {'; '.join(said)}."
    counts = [n for n in (n_readings(each.steps) for each in of.methods) if n]
    rounds = f"Seconds are medians of {min(counts, default=0)} rounds"
    if of.is_interrupted:
        rounds = f"Measuring was interrupted. {rounds}"
    how = f"{of.taken_seconds / 60.0:.1f} min, {of.machine['device']}"
    notes = "".join(f" Note: {each}." for each in of.notes)
    yield f"{rounds} ({how}); ~ is estimated, – is not known.{notes}"


def _compared(choice: Choice, *, batches: bool = False) -> str:
    """Return a sentence with the throughput of the best and the second best method."""

    def one(name: str, batch: float, rate: float) -> str:
        of = f" (batch {batch:,.0f})" if batches else ""
        return f"{name}{of} makes {_number(rate)} samples a second"

    first = one(choice.name, choice.batch, choice.samples_per_second)
    if not choice.runner_up:
        return f"{first}; no other measured method fits"
    second = one(
        choice.runner_up, choice.runner_up_batch, choice.runner_up_samples_per_second
    )
    tie = "the difference is within the noise"
    if choice.too_few:
        tie = f"it takes {LEAST_ROUNDS} rounds to know which is faster"
    return f"{first}, {second}" + (f"; {tie}" if choice.is_tie else "")


def table(advice: Advice, width: int) -> list[str]:
    """Return a line for each method; columns that do not fit are left out."""
    rows = [_COLUMNS, *map(_row, advice.methods)]
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while len(sizes) > 3 and sum(sizes) + 2 * len(sizes) > width:
        sizes.pop()
    lines = []
    for row in rows:
        cells = [
            cell.rjust(size) for cell, size in zip(row[1:], sizes[1:], strict=False)
        ]
        lines.append("  ".join(["", row[0].ljust(sizes[0]), *cells]))
    return lines


def _row(method: MethodAdvice) -> tuple[str, ...]:
    verdict = {"raises": "faster", "lowers": "slower"}.get(method.verdict, "not known")
    if method.name == PLAIN:
        verdict = _UNKNOWN
    elif method.interval and not method.verdict:
        verdict = "in the noise"
    largest, most = method.largest_batch, REACH * method.highest
    mark = "" if largest <= method.highest else "~" if largest <= most else "over "
    took = "does not fit" if method.fits is False else _UNKNOWN
    if math.isfinite(method.sample_seconds):
        took = _seconds(method.sample_seconds)
    between = (
        "{:.2f} to {:.2f}".format(*method.interval) if method.interval else _UNKNOWN
    )
    timed = method.samples_per_second > 0.0
    ratio = "only it fits" if math.isinf(method.ratio) else f"{method.ratio:.2f}"
    return (
        method.name + ("" if method.is_exact else "*"),
        verdict,
        _UNKNOWN if math.isnan(largest) else f"{mark}{min(largest, most):,.0f}",
        took,
        f"{method.best_batch:,.0f}" if timed else _UNKNOWN,
        _number(method.samples_per_second) if timed else _UNKNOWN,
        ratio if timed and not math.isnan(method.ratio) else _UNKNOWN,
        between,
    )


def recipe(name: str, budget_bytes: int) -> list[str]:
    """Return lines of Python that train with a method.

    Args:
        name: The name of the method.
        budget_bytes: The budget.
    """
    method = METHODS[name]
    if method.options is None:
        return list(_WITHOUT_A_SESSION.get(name, ("# nothing to change",)))
    given = [f"{key}={_value(value)}" for key, value in method.options.items()]
    lines = ["import mimose"]
    if any(isinstance(value, Pattern) for value in method.options.values()):
        lines.append("from mimose.planners import everywhere")
    budget = f'"{budget_bytes // 2**20}MiB"' if budget_bytes >= 2**20 else budget_bytes
    return [*lines, f"mimose.attach({', '.join(['model', str(budget), *given])})"]


def _value(value: object) -> str:
    if isinstance(value, Pattern):
        return f'everywhere("{value.actions[0]}")'
    if isinstance(value, tuple):
        return f"({', '.join(map(_value, value))})"
    return f'"{value}"'


def _listed(names: Sequence[str], word: str = "and") -> str:
    *first, last = names or ("",)
    return f"{', '.join(first)} {word} {last}" if first else last


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1.0 else f"{1e3 * value:.3g} ms"
