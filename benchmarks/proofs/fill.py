"""Rows that follow lengths: which way trains the most tokens a second in a memory?

Models of real size train on hollow cards of their true size (`mimose.sim.hollow`),
on samples of log-normal lengths. It reports real tokens a second of

- a: the largest fixed number of rows that never runs out of memory, drawn at random;
- b: the largest number of tokens that never does, in batches of similar lengths;
- c: `mimose.BatchSampler` and a session, both with default settings;
- s: `mimose.BatchStream` on the same samples as a stream, otherwise like c.

What a and b find by trial, c must learn. They keep everything, and in another trial use
transformers' own checkpointing for all layers: the faster one counts. If the longest
sample fits in neither, they also compute the loss in chunks (a session whose plans
recompute every layer). For c all steps count from the first on, and so does an
out-of-memory error in any step. Sessions run forward and backward by `Session.step`, as
trainers do: a step that runs out of memory runs again and is reported. Rates are from
the device's clock and the user's (`mimose.sim.hollow`), with optimizer steps, after
the first steps.

Of texts and graphs that stand one after the other, and of frames with time first, the
rates are samples a second of whole epochs (`--steps 3000`), and a keeps everything.

    python -m benchmarks.fill
    python -m benchmarks.fill --places texts graphs time-first --parts a c --steps 3000
    python -m benchmarks.fill --places t5-large-24 --parts c --resume
    python -m benchmarks.fill --steps 300 --pad-to-multiple-of 8
    python -m benchmarks.fill --places bert-large-16 --parts c s
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Options, Row, Settings
from benchmarks.proofs.numbers import percent
from benchmarks.scale.fill import PLACES, work
from benchmarks.scale.models import OF_OTHER_DIMENSIONS
from mimose.bench.device import SIM

__all__ = ["OPTIONS", "QUESTION", "ask", "work"]

QUESTION = (
    "Who trains the most tokens a second within the memory, of lengths that vary?"
)
DEFAULTS = {"seed": 1, "threads": 1, "device": SIM}
OPTIONS = (
    common.some("--places", PLACES),
    common.some("--parts", "abcs"),
    ("--card", {"default": "h100", "help": "h200, h100, a100, rtx4090 or a10"}),
    ("--attention-plans", {"choices": ("yes", "no"), "default": "yes"}),
    common.count("--steps", 150, "a trial, at most"),
    common.count("--pad-to-multiple-of", 1, "to which padded lengths are rounded up"),
    ("--buffer", {"type": int, "default": 0, "help": "samples of s; 0: its choice"}),
    common.RESUME,
)


def ask(settings: Settings, options: Options) -> Answer:
    """Run what is asked for; each row is kept at once."""
    answer = Answer.begun(settings.out / "fill.csv", resume=options.resume)
    for place in options.places:
        for part in options.parts:
            where = {"place": place, "part": part}
            if any(where.items() <= row.items() for row in answer.rows):
                continue
            task = {**where, "card": options.card, "steps": options.steps}
            task["attention_plans"] = options.attention_plans == "yes"
            task["pad_to_multiple_of"] = options.pad_to_multiple_of
            task["buffer"] = options.buffer
            for told in common.measured("fill", settings, **task):
                name = f"{place}, {part}, {told['strategy']} {told['size'] or ''}"
                answer.add(name, [where | told], {}, (), head="trial")
    answer.table = [_line(answer.rows, place) for place in options.places]
    for part in sorted({"c", "s"}.intersection(options.parts)):
        ours = [row for row in answer.rows if row["part"] == part]
        for what in ("ooms", "over"):
            answer.bars.append(Bar(f"{part}: {what}", sum(r[what] for r in ours), 0))
    for line in answer.table:
        place = str(line["place"])
        clock = "" if place in OF_OTHER_DIMENSIONS else "user's "
        streamed = line["user's s/c"]
        if isinstance(streamed, float):
            answer.bars.append(Bar(f"{place}: user's s ÷ c", streamed, at_least=0.95))
        for part, least in (("a", PLACES[place].bar), ("b", 0.97)):
            found = line[f"{clock}c/{part}"]
            if isinstance(found, float) and not (part == "b" and not clock):
                what = f"{place}: {clock}c ÷ {part}"
                answer.bars.append(Bar(what, found, at_least=least))
    return answer


def _rate(place: str) -> str:
    """Return the column of a place's rates: whole epochs of samples, or late tokens."""
    is_whole = place in OF_OTHER_DIMENSIONS
    return "samples_per_second_all" if is_whole else "tokens_per_second"


def _best(
    rows: Iterable[Mapping[str, Any]], place: str, parts: str, rate: str = ""
) -> dict[str, Any]:
    own = [row for row in rows if row["place"] == place and row["part"] in parts]
    by = rate or _rate(place)
    best: Mapping[str, Any] = max(own, key=lambda row: row.get(by) or 0.0, default={})
    return dict(best)


def _line(rows: Iterable[Mapping[str, Any]], place: str) -> dict[str, object]:
    """Return what c reaches of a and b, on the device's clock and on the user's."""
    rows = list(rows)
    own = _best(rows, place, "c").get
    rates, ratios = dict[str, Any](), dict[str, Any]()
    for clock, name in (("", _rate(place)), ("user's ", "user_tokens_per_second")):
        rate: Row = {part: _best(rows, place, part, name).get(name) for part in "abcs"}
        rates |= {clock + part: rate[part] for part in "abc"}
        for one, other in ("ca", "cb", "sc"):
            both = rate[one] and rate[other]
            ratios[f"{clock}{one}/{other}"] = both and rate[one] / rate[other]
    return {
        "place": place,
        **{part: rate and round(rate) for part, rate in rates.items()},
        **ratios,
        "c, all steps": own("tokens_per_second_all"),
        "out of memory": own("ooms"),
        "run again": own("reruns"),
        "over": own("over"),
        "padding": percent(own("first_padding"), 1),
        "padding of all": percent(own("padding"), 2),
        "shapes": own("shapes"),
    }
