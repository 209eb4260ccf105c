"""The answer in words: which method, at the batch that is given and at any other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from mimose.bench.advise.advice import Advice
from mimose.bench.advise.choice import Choice
from mimose.bench.advise.effects import largest_text
from mimose.bench.advise.flips import FURTHEST, Flip
from mimose.bench.advise.memory import memory_series
from mimose.bench.advise.methods import PLAIN
from mimose.bench.advise.models import Steady
from mimose.bench.advise.phrases import (
    batch_text,
    beyond,
    called,
    explained,
    in_brackets,
    listed,
    longer,
    percent,
    rate_text,
    ratio_text,
    sample_text,
    untimed,
)
from mimose.bench.advise.ties import n_readings
from mimose.bench.advise.unknown import (
    fits_unknown,
    fits_untimed,
    room_unknown,
    room_untimed,
)
from mimose.budget import format_bytes
from mimose.predictors import LEAST_ROUNDS
from mimose.report.page.looks import counted, format_seconds

_NO_PLAN = {"sdpa": "fused attention"}
"""Free memory that nothing has to be recomputed for."""
_NOTABLE = 0.01
"""Of plain training's peak; less is not worth a sentence."""
_AT_THE_END = 1.01
_REPEATS_TO = 2**20
"""Bytes: what a process holds on a CPU is not known better."""


def at_your_batch(advice: Advice) -> Iterator[str]:
    """Say whether the batch fits as it is, and what is the fastest that fits."""
    said = [_plain_fits(advice)]
    choice = advice.at_sample
    if choice is not None:
        said.append(_fastest_at(advice, choice))
        said += _against_plain(advice, choice)
    elif not _comparable(advice):
        said.append(
            "Which method is the fastest cannot be said: none could be fitted from "
            "what was measured; the reasons are below."
        )
    elif _is_far(advice):
        said.append("It is too far beyond the batches that ran to say more.")
    elif not fits_untimed(advice):
        said.append(_nothing_fits(advice))
    said += _untimed(advice)
    yield " ".join(said)


def at_any_batch(advice: Advice) -> Iterator[str]:
    """Say which method and which batch give the most samples a second."""
    choice = advice.free
    budget = format_bytes(advice.budget_bytes)
    if choice is None:
        if _comparable(advice):
            timed = " whose time is known" if room_untimed(advice) else ""
            yield (
                f"Not one sample fits into {budget} with any exact method{timed}"
                f"{_not_known(room_unknown(advice))}."
            )
        return
    first = (
        f"{_anew(advice, choice.name)} with batches of "
        f"{_batch(advice, choice.name, choice.batch)}"
    )
    rate = rate_text(choice.samples_per_second)
    head = "If you may choose the batch as well:"
    if not choice.runner_up:
        yield f"{head} {first}, {rate} samples a second; {_no_other(advice)}."
        return
    second = (
        f"{_anew(advice, choice.runner_up)} with batches of "
        f"{_batch(advice, choice.runner_up, choice.runner_up_batch)}"
    )
    if choice.is_tie:
        yield (
            f"{head} {_no_winner(choice)}. {_capital(first)} makes {rate} samples a "
            f"second, {second} {rate_text(choice.runner_up_samples_per_second)}"
            f"{_why_tied(advice, choice)}."
        )
        return
    yield f"{head} {first} gives the most, {rate} samples a second; next {second}, " + (
        _behind(choice)
    )


def _no_other(advice: Advice) -> str:
    """Say why a choice has no other beside it."""
    others = room_untimed(advice)
    if others:
        return (
            f"no other could be compared, for their time is not known "
            f"({untimed(advice, others)})"
        )
    known = [each for each in advice.methods if each.is_exact and not each.why_not]
    if not known[1:]:
        return "no other was measured"
    return f"nothing else fits{_not_known(room_unknown(advice))}"


def without_a_plan(advice: Advice) -> Iterator[str]:
    """Say which changes free memory at no recomputation, and whether that suffices."""
    needed = plain_bytes(advice)
    if needed is None:
        return
    missing = needed - advice.budget_bytes
    for measured in advice.measurements.methods:
        name, memory = measured.method, memory_series(measured)
        if name not in _NO_PLAN or memory is None or memory.refused:
            continue
        what = _NO_PLAN[name]
        batch = advice.measurements.batch
        freed = needed - memory.predict(batch)
        if freed < _NOTABLE * needed:
            continue
        ran = min(advice.of(each).highest for each in (PLAIN, name))
        frees = (
            f"{what} ({name}) frees {format_bytes(freed)} at your batch"
            f"{in_brackets(beyond(batch, ran))} without computing anything twice"
        )
        speed = f" ({_speed(advice, name)})"
        if missing <= 0.0:
            if math.isnan(advice.of(name).ratio):
                yield f"{_capital(frees)}{speed}."
            elif advice.of(name).verdict != "lowers":
                yield f"Whatever else you do: {frees}{speed}."
        elif freed >= missing:
            yield (
                f"Do this first: {frees}{speed}, and that is more than the "
                f"{format_bytes(missing)} that any other method would have to free."
            )
        else:
            yield (
                f"Do this first: {frees}{speed}, of the {format_bytes(missing)} that "
                f"are missing; a method that recomputes then has only "
                f"{format_bytes(missing - freed)} left to find."
            )


def at_other_memory(advice: Advice) -> Iterator[str]:
    """Say at which memory the answer becomes another one."""
    if not _comparable(advice) or (advice.free is not None and advice.free.is_tie):
        return
    head = "The answer depends on the memory, if the batch may be chosen."
    first, *others = advice.flips or (None,)
    if first is None or (not others and _is_at_the_end(advice, first.memory_bytes)):
        if advice.free is not None and not advice.free.is_tie:
            yield (
                f"With more or less memory, as far as could be looked (from a quarter "
                f"to {FURTHEST:g} times, and no further than twice the batches "
                f"measured), {called(advice.free.name)} stays the fastest."
            )
        return
    at = format_bytes(first.memory_bytes)
    if _is_at_the_end(advice, first.memory_bytes):
        said = [
            f"{called(first.after)} is the fastest at {at}, the least looked at"
            f"{_notes(advice, first)}"
        ]
    else:
        open_ = room_untimed(advice) or room_unknown(advice)
        timed = " whose time is known" if open_ else ""
        said = [
            f"below {at} nothing{timed} fits; from there {called(first.after)} is the "
            f"fastest{_notes(advice, first)}"
        ]
    said += [
        f"from {format_bytes(each.memory_bytes)} on {called(each.after)}"
        f"{_notes(advice, each)}"
        for each in others
        if each is not None
    ]
    yield f"{head} {_capital('; '.join(said))}."


def _notes(advice: Advice, flip: Flip) -> str:
    """Add to a flip what is as fast there, and whether such a batch was timed."""
    same = [called(name) for name in flip.ties]
    method = advice.of(flip.after)
    return in_brackets(
        f"there no faster than {listed(same, 'or')}, within the noise" if same else "",
        beyond(math.floor(flip.batch), method.timed_to),
    )


def plain_bytes(advice: Advice) -> float | None:
    """Return what plain training needs at the sample's batch; None if nobody knows.

    By its fit; where it has none, by the one step that was weighed.
    """
    batch = advice.measurements.batch
    model = advice.models.get(PLAIN)
    if isinstance(model, Steady) and not model.fitted.memory.refused:
        return model.fitted.peak_bytes(batch)
    for method in advice.measurements.methods:
        for each in method.weighed:
            if method.method == PLAIN and each.batch == batch and each.length is None:
                return float(max(each.peak_bytes, each.reserved_bytes))
    return None


def is_close(advice: Advice, needed: float) -> bool:
    """Tell whether readings leave open if so much fits."""
    off = abs(needed - advice.budget_bytes)
    return advice.measurements.device == "cpu" and off < _REPEATS_TO


def _plain_fits(advice: Advice) -> str:
    budget = format_bytes(advice.budget_bytes)
    needed = plain_bytes(advice)
    head = f"Your batch, {sample_text(advice)},"
    if needed is None:
        return f"{head} was not tried with plain training in {budget}."
    ran = in_brackets(beyond(advice.measurements.batch, advice.of(PLAIN).highest))
    needs = f"plain training needs {format_bytes(needed)}{ran}"
    if is_close(advice, needed):
        return f"{head} may fit into {budget} or not: {needs}, just about as much."
    if needed <= advice.budget_bytes:
        return f"{head} fits into {budget}: {needs}."
    missing = format_bytes(needed - advice.budget_bytes)
    return f"{head} does not fit into {budget}: {needs}, {missing} too much."


def _fastest_at(advice: Advice, choice: Choice) -> str:
    rate = rate_text(choice.samples_per_second)
    first, second = (_ran(advice, n) for n in (choice.name, choice.runner_up))
    known = " of those whose time is known" if fits_untimed(advice) else ""
    if not choice.runner_up:
        if known:
            return (
                f"The only one that fits{known} is {explained(advice, choice.name)}: "
                f"{rate} samples a second{first}."
            )
        verb = "fits" if choice.name == PLAIN else "makes it fit"
        return (
            f"Of the methods measured only {explained(advice, choice.name)} {verb}"
            f"{_not_known(fits_unknown(advice))}: {rate} samples a second{first}."
        )
    if choice.is_tie:
        both = choice.name, choice.runner_up
        names = listed([explained(advice, name) for name in both])
        return (
            f"{_capital(_no_winner(choice))}{known}: {names} make {rate}{first} and "
            f"{rate_text(choice.runner_up_samples_per_second)}{second} samples a "
            f"second{_why_tied(advice, choice)}."
        )
    return (
        f"The fastest that fits{known} is {explained(advice, choice.name)}: {rate} "
        f"samples a second{first}. Next comes {explained(advice, choice.runner_up)}"
        f"{second}, {_behind(choice)}"
    )


def _ran(advice: Advice, name: str) -> str:
    """Add that a method was not timed at batches as large as the sample."""
    if not name:
        return ""
    method = advice.of(name)
    batch = advice.measurements.batch
    return in_brackets(beyond(batch, method.timed_to))


def _no_winner(choice: Choice) -> str:
    return "no winner yet" if choice.too_few else "no winner"


def _why_tied(advice: Advice, choice: Choice) -> str:
    if not choice.too_few:
        return ", a difference within the noise"
    both = (choice.name, choice.runner_up)
    methods = advice.measurements.methods
    rounds = min(n_readings(each) for each in methods if each.method in both)
    are = "is" if rounds == 1 else "are"
    return (
        f"; {counted(rounds, 'round')} {are} too few to be sure, {LEAST_ROUNDS} are "
        f"needed"
    )


def _is_far(advice: Advice) -> bool:
    """Tell whether the batch may fit with a method that ran far smaller ones only."""
    unknown = fits_unknown(advice)
    return any(each.fits_sample for each in advice.methods if each.name in unknown)


def _not_known(names: Sequence[str]) -> str:
    """Add of which methods it is not known."""
    if not names:
        return ""
    return f" (not known of {listed([called(name) for name in names], 'or')})"


def _untimed(advice: Advice) -> Iterator[str]:
    """Say which others would fit, if nobody knows how fast they are."""
    names = fits_untimed(advice)
    if names:
        also = "" if advice.at_sample is None else " too"
        yield (
            f"With {listed([called(name) for name in names], 'or')} it would fit"
            f"{also}, but how fast is not known ({untimed(advice, names)})."
        )


def _behind(choice: Choice) -> str:
    rate = rate_text(choice.runner_up_samples_per_second)
    return f"{rate} ({percent(1.0 - 1.0 / choice.ratio)} fewer)."


def _against_plain(advice: Advice, choice: Choice) -> Iterator[str]:
    """Compare a step to plain training's, whether that fits or not."""
    plain = advice.models.get(PLAIN)
    if choice.name == PLAIN or not isinstance(plain, Steady) or plain.refused:
        return
    if math.isnan(advice.of(PLAIN).sample_seconds):
        return
    batch = advice.measurements.batch
    seconds, bare = batch / choice.samples_per_second, plain.fitted.step_seconds(batch)
    if bare <= 0.0:
        return
    fits = math.isfinite(advice.of(PLAIN).sample_seconds)
    would = "plain training's" if fits else "plain training's would, if it fitted"
    notes = in_brackets(format_seconds(bare), beyond(batch, advice.of(PLAIN).timed_to))
    yield (
        f"With {choice.name} a step takes {format_seconds(seconds)}, "
        f"{longer(seconds, bare)} {would}{notes}."
    )


def _nothing_fits(advice: Advice) -> str:
    unknown = _not_known(fits_unknown(advice))
    said = f"No exact method that was measured makes it fit{unknown}."
    largest = max(
        (each for each in advice.methods if each.is_exact and each.largest_batch),
        key=lambda each: each.largest_batch or 0,
        default=None,
    )
    if largest is None or largest.largest_batch is None:
        return f"{said} Take a smaller model, shorter inputs or more memory."
    return (
        f"{said} The largest batch that does fit is {largest_text(largest)}, with "
        f"{explained(advice, largest.name)}: take smaller batches, shorter inputs or "
        f"more memory."
    )


def _comparable(advice: Advice) -> bool:
    """Tell whether anything is known of any exact method."""
    exact = {each.name for each in advice.methods if each.is_exact}
    return any(name in exact and not m.refused for name, m in advice.models.items())


def _anew(advice: Advice, name: str) -> str:
    """Return a method's name, explained if `at_your_batch` has not done that."""
    given = advice.at_sample
    told = () if given is None else (given.name, given.runner_up)
    return called(name) if name in told else explained(advice, name)


def _batch(advice: Advice, name: str, batch: float) -> str:
    method = advice.of(name)
    return f"{batch_text(batch)}{in_brackets(beyond(batch, method.timed_to))}"


def _speed(advice: Advice, name: str) -> str:
    method = advice.of(name)
    if math.isfinite(method.ratio):
        return f"best throughput {ratio_text(method.ratio)} times plain training's"
    if math.isinf(method.ratio):
        return "plain training does not fit at all"
    return f"how fast is not known: {method.no_time or method.no_verdict}"


def _is_at_the_end(advice: Advice, memory_bytes: float) -> bool:
    """Tell whether a flip is only where looking began."""
    return memory_bytes <= _AT_THE_END * advice.budget_bytes / FURTHEST


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
