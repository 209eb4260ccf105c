"""The answer in a line: yes, no, or not known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mimose.bench.advise.advice import Advice
from mimose.bench.advise.answers import is_close, plain_bytes
from mimose.bench.advise.choice import Choice
from mimose.bench.advise.conditions import least_readings
from mimose.bench.advise.effects import FURTHEST_LENGTH
from mimose.bench.advise.methods import PLAIN
from mimose.bench.advise.phrases import called, listed
from mimose.bench.advise.ties import noise_of, spreads_of
from mimose.bench.advise.unknown import fits_unknown, fits_untimed
from mimose.predictors import LEAST_ROUNDS
from mimose.predictors.throughput import REACH
from mimose.report.page.looks import counted

_MAY_BE_FASTER = ("sdpa", "accumulate")
"""At a batch that fits: the others do all that plain training does, and more."""


def short_answer(advice: Advice) -> str:
    """Say whether to save memory, and how, as far as the answer below knows it.

    Args:
        advice: The answer.
    """
    asked = _about_lengths(advice) if advice.measurements.lengths else _about(advice)
    if asked.does_plain_fit is None or asked.is_far:
        return f"Not known: {asked.why_not_known}; {_more(advice)}."
    if asked.is_close:
        safe = [called(name) for name in asked.fastest if name != PLAIN]
        sure = f"; to be sure, use {listed(safe, 'or')}" if safe else ""
        return f"Not known: plain training needs just about the memory there is{sure}."
    if asked.does_plain_fit:
        return _fits(advice, asked)
    return _does_not_fit(advice, asked)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """What the line is about: one batch, or those of the lengths that will come."""

    fits: str
    fits_not: str
    it: str = "it"
    does_plain_fit: bool | None
    """None where nobody knows."""
    why_not_known: str = ""
    is_close: bool = False
    is_far: bool = False
    """Whether it lies far beyond what was timed."""
    fastest: tuple[str, ...] = ()
    """One, or two that cannot be told apart; empty where none is known to fit."""
    is_alone: bool = False
    """Whether there is no other to compare it with."""
    too_few: bool = False
    beats_plain: bool = False
    untimed: tuple[str, ...] = ()
    """Methods with which it fits, at a speed that nobody knows."""
    unknown: tuple[str, ...] = ()
    """Methods of which nobody knows whether it fits."""
    elsewhere: tuple[str, ...] = ()
    """Which are the fastest where the batch may be chosen."""


def _fits(advice: Advice, asked: _Asked) -> str:
    others = [name for name in asked.fastest if name != PLAIN]
    if others and PLAIN not in asked.fastest and asked.beats_plain:
        names = listed([called(name) for name in others], "or")
        head = f"Yes{_stays(asked, others)}: use {names}"
        return f"{head}. {_capital(asked.fits)}, but so training is faster."
    stays = _stays(asked, [PLAIN])
    open_ = [*asked.untimed, *asked.unknown]
    rivals = others or [name for name in open_ if name in _MAY_BE_FASTER]
    if rivals or asked.is_alone or not asked.fastest:
        names = listed([called(name) for name in rivals] or ["any method"], "or")
        more = f" ({_more(advice)})" if asked.too_few else ""
        return (
            f"Not known whether {names} is faster{more}{stays}: train as you do, "
            f"{asked.fits}."
        )
    timed = " that was timed" if open_ else ""
    return (
        f"No{stays}: train as you do. {_capital(asked.fits)}, and no method"
        f"{timed} is faster."
    )


def _does_not_fit(advice: Advice, asked: _Asked) -> str:
    names = asked.fastest or asked.untimed
    if not names:
        if asked.unknown:
            of = listed([called(name) for name in asked.unknown], "or")
            return (
                f"Not known: {asked.fits_not}, and whether {of} would help was not "
                f"measured; {_more(advice)}."
            )
        return f"No: no exact method that was measured makes {asked.it} fit."
    use = listed([called(name) for name in names], "or")
    head = f"Yes{_stays(asked, names)}: use {use}. {_capital(asked.fits_not)} without"
    open_ = [called(name) for name in (*asked.untimed, *asked.unknown)]
    if not asked.fastest:
        are = "they are" if names[1:] else "it is"
        return f"{head}; how fast {are} is not known."
    if names[1:]:
        more = f": {_more(advice)}" if asked.too_few else ""
        return f"{head}; which is faster is not known{more}."
    if open_:
        return f"{head}; whether {listed(open_, 'or')} would be faster is not known."
    return f"{head}."


def _about(advice: Advice) -> _Asked:
    """Return what is known of the batch that is given."""
    needed, choice = plain_bytes(advice), advice.at_sample
    does_fit = None if needed is None else needed <= advice.budget_bytes
    why = "what plain training needs for your batch was not measured"
    if does_fit and advice.measurements.batch > REACH * advice.of(PLAIN).highest:
        does_fit = None
        why = f"your batch is more than {REACH:g} times the largest that ran"
    return _Asked(
        fits="your batch fits",
        fits_not="your batch does not fit",
        does_plain_fit=does_fit,
        why_not_known=why,
        is_close=needed is not None and is_close(advice, needed),
        fastest=_fastest(choice),
        is_alone=choice is not None and not choice.runner_up,
        too_few=choice is not None and choice.too_few,
        beats_plain=choice is not None and _beats_plain(advice, choice),
        untimed=tuple(fits_untimed(advice)),
        unknown=tuple(fits_unknown(advice)),
        elsewhere=_fastest(advice.free),
    )


def _about_lengths(advice: Advice) -> _Asked:
    """Return what is known of the batches of the lengths that will come."""
    found = advice.lengths
    plain = None
    if found is not None:
        plain = next((each for each in found.methods if each.name == PLAIN), None)
    if found is None or plain is None:
        return _Asked(
            fits="",
            fits_not="",
            does_plain_fit=None,
            why_not_known="plain training was timed at too few of your lengths",
        )
    by_name = {each.name: each for each in found.methods}
    tied = (found.best, found.runner_up) if found.is_tie else (found.best,)
    fastest = tuple(filter(None, tied))
    best = by_name.get(found.best)
    second = found.runner_up
    return _Asked(
        fits="all batches of your lengths fit",
        fits_not="not all batches of your lengths fit",
        it="all of them",
        does_plain_fit=plain.n_fit == found.n_batches,
        why_not_known="your longest batches are far longer than any that was timed",
        is_far=any(
            found.longest > FURTHEST_LENGTH * by_name[name].timed_to for name in fastest
        ),
        fastest=fastest,
        is_alone=bool(fastest) and not second,
        too_few=bool(second) and math.isinf(_noise(advice, found.best, second)),
        beats_plain=best is not None
        and plain.seconds / best.seconds - 1.0 > _noise(advice, best.name, PLAIN),
        unknown=found.unknown,
    )


def _beats_plain(advice: Advice, choice: Choice) -> bool:
    """Tell whether a choice is faster than plain training by more than the noise."""
    seconds = advice.of(PLAIN).sample_seconds
    ratio = choice.samples_per_second * seconds / advice.measurements.batch
    return math.isfinite(ratio) and ratio - 1.0 > _noise(advice, choice.name, PLAIN)


def _noise(advice: Advice, one: str, other: str) -> float:
    spreads = spreads_of(advice.measurements, advice.models)
    return noise_of(spreads, one, other)


def _fastest(choice: Choice | None) -> tuple[str, ...]:
    if choice is None:
        return ()
    return (choice.name, choice.runner_up) if choice.is_tie else (choice.name,)


def _stays(asked: _Asked, names: Sequence[str]) -> str:
    """Return a condition where with another batch none of these is the fastest."""
    if not (asked.fastest and asked.elsewhere) or set(names) & set(asked.elsewhere):
        return ""
    return ", if the batch must stay as it is"


def _more(advice: Advice) -> str:
    """Advise so many minutes that there are timings enough."""
    of = advice.measurements
    minutes, readings = of.promised_seconds / 60.0, least_readings(advice)
    if not of.is_interrupted:
        minutes *= LEAST_ROUNDS / readings if 0 < readings < LEAST_ROUNDS else 2.0
    return f"give it {counted(math.ceil(minutes), 'minute')}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
