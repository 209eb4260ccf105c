"""`mimose rehearse` and `mimose.rehearse`: a process for each card, and the answer."""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mimose.arguments import check_integer
from mimose.bench.advise.methods import DTYPES, OPTIMIZERS
from mimose.bench.child import RunFailedError, run_child
from mimose.bench.rehearse.batches import Lengths, checked
from mimose.bench.usage import UsageError
from mimose.budget import format_bytes
from mimose.exceptions import RehearsalError
from mimose.records import read_records
from mimose.report.page import write_page
from mimose.report.text import named, table, terminal_width, wrapped
from mimose.sim import why_not

GIB: Mapping[str, float] = {
    "h200": 139.8,
    "h100": 79.11,
    "a100": 79.25,
    "rtx4090": 23.64,
    "a10": 21.99,
}
"""What torch sees of a card's memory: of the H200 in ``docs/results/nvidia-h200``, of
the others in public reports (vllm#27508, VAREdit#6, VGen#104, CogVLM#236)."""
_CHILD = "mimose.bench.rehearse.training"
_CLOCK = (
    "the clock was off by -5 to +17% on an H200; other cards' rates are of data sheets"
)
"""See ``docs/results/README.md``: Is the user's clock right?"""
_MOST_ROWS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What is rehearsed.

    Raises:
        UsageError: There is no such card, or a number is out of range.
    """

    model: str
    """``module:function``."""
    cards: tuple[tuple[str, float], ...]
    """Names of cards, with their GiB."""
    lengths: Lengths | None = None
    budget: float | str | None = None
    ranks: int = 1
    steps: int = 40
    actions: str = "auto"
    dtype: str = "float32"
    """``"bfloat16"`` for autocast."""
    optimizer: str = "adamw"
    """Where the function returns none."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Check what no type says."""
        for card, gib in self.cards:
            if card not in GIB:
                msg = f"no card is called {card}; choose from {', '.join(GIB)}"
                raise UsageError(msg)
            if not 0 < gib < math.inf:
                msg = f"a card must have more than 0 GiB, got {gib}"
                raise UsageError(msg)
        for name, least in (("steps", 1), ("ranks", 1), ("seed", 0)):
            try:
                check_integer(name, getattr(self, name), least)
            except ValueError as error:
                raise UsageError(str(error)) from error
        for name, known in (("dtype", DTYPES), ("optimizer", OPTIMIZERS)):
            if (given := getattr(self, name)) not in known:
                msg = f"{name} must be one of {', '.join(known)}, got {given!r}"
                raise UsageError(msg)
        if self.lengths is not None:
            checked(self.lengths)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """What a training would do on one card."""

    card: str
    gib: float
    ranks: int
    fits: bool
    """Whether every step ran on the card; `over` counts those over the budget."""
    missing_bytes: int
    """What is missing if it does not fit: for weights, or for the lowest peak that any
    plan reaches; 0 if that is not known."""
    why: str
    """Why it does not fit; "" if it does."""
    total_bytes: int
    """The card's memory."""
    outside_bytes: int
    """The part that the process and NCCL hold outside of torch's allocator."""
    budget_bytes: int | None = None
    peak_bytes: int | None = None
    """The most that the allocator has reserved."""
    held: Mapping[str, int] = field(default_factory=dict)
    """Bytes of weights, gradients and optimizer, on this rank."""
    holders: Mapping[str, float] = field(default_factory=dict)
    """What held the highest level of any step, in bytes; with what the allocator had
    reserved beyond it."""
    items_per_second: float | None = None
    """Tokens or samples of this rank, behind the tenth step, as a user waits."""
    unit: str = "tokens"
    extra_share: float | None = None
    """The part of a step's time that recomputation takes."""
    collective_seconds: float | None = None
    """What ranks exchange in a step, in seconds, whatever runs beside it."""
    largest: Mapping[str, int] = field(default_factory=dict)
    """The largest value of each size that was trained, the others at their largest in
    the rehearsal; rows too."""
    error_p50: float | None = None
    """Errors of predicted growth behind the tenth step, of steps that did not run
    again: the median, ..."""
    error_p99: float | None = None
    """... and the 99th percentile."""
    over: int = 0
    """Steps over the budget."""
    reruns: int = 0
    """Forwards that ran again."""
    notes: tuple[str, ...] = ()
    """Where a card may do something else, for its numbers are computed."""
    steps: tuple[Mapping[str, Any], ...] = ()
    """Each step: shape, plan, peaks in bytes, virtual seconds."""
    cpu_seconds: float | None = None
    """What the rehearsal took here."""
    host_peak_bytes: int | None = None
    """The most host memory that it held."""

    def __str__(self) -> str:
        """Return the answer in words and a table."""
        return "\n".join(_text(self, terminal_width()))


def rehearse(
    model: str,
    cards: str | Sequence[str] = "h100",
    *,
    gib: float | None = None,
    lengths: Lengths | None = None,
    budget: float | str | None = None,
    ranks: int = 1,
    steps: int = 40,
    actions: str = "auto",
    dtype: str = "float32",
    optimizer: str = "adamw",
    seed: int = 0,
    save: str | Path | None = None,
    out: str | Path | None = None,
    progress: bool = True,
) -> list[Rehearsal]:
    """Train a model on cards that are not there, and say whether it fits, and how fast.

    A simulated card runs your code at true size without arithmetic: every byte is that
    of torch's allocator on the card, seconds are those of a clock. It needs a C++
    compiler, once, and neither weights nor a network.

    Args:
        model: ``"module:function"``. The function takes no arguments and returns the
            model and one batch, and a third value if you like, the optimizer. It is
            called where torch's default device is the card. A function ``batches``
            beside it may yield the batches.
        cards: Names: h200, h100, a100, rtx4090, a10; with ``":40"`` of so many GiB.
        gib: The memory of cards that do not say; None for what torch sees of them.
        lengths: The length of each batch: integers, or lists by the name of a size,
            such as ``{"input_ids.1": [...]}``. None: the batch's own.
        budget: As for `mimose.attach`.
        ranks: How many processes train together. The function shards the model itself,
            such as by ``fully_shard``; this rank is rehearsed.
        steps: Steps to train.
        actions: As for `mimose.attach`.
        dtype: ``"float32"``, or ``"bfloat16"`` for autocast.
        optimizer: ``"adamw"`` or ``"sgd"``, if the function returns none.
        seed: Seed of the order of lengths.
        save: A file for what the session has learned, as JSON: `Session.
            load_state_dict` takes it on the card.
        out: A file for the page of the run.
        progress: Whether to show the progress on the standard error.

    Returns:
        The answer for each card.

    Raises:
        RehearsalError: The model cannot be made or trained here, there is no compiler,
            or an argument is wrong; the message says what to change.
    """
    try:
        settings = Settings(
            model=model,
            cards=chosen([cards] if isinstance(cards, str) else cards, gib),
            lengths=lengths,
            budget=budget,
            ranks=ranks,
            steps=steps,
            actions=actions,
            dtype=dtype,
            optimizer=optimizer,
            seed=seed,
        )
        files = (None if each is None else Path(each) for each in (save, out))
        return run(settings, *files, show=progress)
    except (UsageError, RunFailedError) as error:
        raise RehearsalError(str(error)) from error


def chosen(cards: Sequence[str], gib: float | None) -> tuple[tuple[str, float], ...]:
    """Return cards with their GiB.

    Raises:
        UsageError: There is no such card, or its size is no number.
    """
    found = []
    for each in cards:
        name, _, size = each.lower().partition(":")
        try:
            found.append((name, float(size or gib or GIB.get(name, 1.0))))
        except ValueError as error:
            msg = f"{each}: write a card's GiB as a number, such as {name}:40"
            raise UsageError(msg) from error
    return tuple(found)


def run(
    settings: Settings, save: Path | None, out: Path | None, *, show: bool
) -> list[Rehearsal]:
    """Rehearse every card, one after the other.

    Args:
        settings: What is rehearsed.
        save: A file for the learned state; None for none.
        out: A file for the page; None for none.
        show: Whether to show the progress.

    Raises:
        RunFailedError: It cannot be rehearsed here.
        OSError: A file cannot be written.
    """
    found = []
    if reason := why_not():
        raise RunFailedError(reason)
    for card, gib in settings.cards:
        with tempfile.TemporaryDirectory(prefix="mimose-rehearse-") as folder:
            records = Path(folder) / "records.jsonl"
            told, steps = _one(settings, card, gib, records, save is not None, show)
            state = told.pop("state", None)
            found.append(_rehearsal(settings, card, gib, told, steps))
            several = f"-{card}-{gib:g}" if len(settings.cards) > 1 else ""
            if save is not None and state is not None:
                _named(save, several).write_text(json.dumps(state), encoding="utf-8")
            if out is not None and records.exists():
                virtual = {s["record"]: s["seconds"] for s in steps if "record" in s}
                page = [
                    replace(record, seconds=virtual[record.step])
                    for record in read_records(records)
                    if record.step in virtual
                ]
                title = f"{settings.model} rehearsed on {card}, {gib:g} GiB"
                write_page(page, _named(out, several), title=title)
    return found


def _named(path: Path, more: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f"{path.stem}{more}{path.suffix}")


def _one(
    settings: Settings, card: str, gib: float, records: Path, save: bool, show: bool
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    task = {**asdict(settings), "card": card, "gib": gib, "save": save}
    began, steps, told = time.monotonic(), list[dict[str, Any]](), dict[str, Any]()
    for each in run_child(_CHILD, {**task, "records": str(records)}, threads=1):
        if "step" not in each:
            told = each
            continue
        steps.append(each)
        if show:
            passed = time.monotonic() - began
            left = passed / len(steps) * (settings.steps - len(steps))
            end = "\r" if sys.stderr.isatty() else "\n"
            text = f"mimose rehearse: {card} {gib:g} GiB, step {len(steps)} of "
            text += f"{settings.steps}, about {left:.0f} s left"
            sys.stderr.write(f"{text:79}{end}")
            sys.stderr.flush()
    return told, steps


def _rehearsal(
    settings: Settings,
    card: str,
    gib: float,
    told: dict[str, Any],
    steps: Sequence[Mapping[str, Any]],
) -> Rehearsal:
    errors = told.pop("errors", [])
    n_failed = sum(bool(step["no_room"]) for step in steps)
    why = told.pop("why", "")
    if not steps:
        why = why or "the weights do not fit"
    missing = int(told.pop("missing_bytes", 0))
    return Rehearsal(
        card=card,
        gib=gib,
        ranks=settings.ranks,
        fits=bool(steps) and not n_failed,
        missing_bytes=missing,
        why=why,
        error_p50=errors[len(errors) // 2] if errors else None,
        error_p99=errors[-max(1, len(errors) // 100)] if errors else None,
        notes=tuple(told.pop("notes", ())),
        steps=tuple(steps),
        **told,
    )


# ------------------------------------------------------------------ in words


def lines(found: Sequence[Rehearsal], width: int) -> list[str]:
    """Return the answers as text: one card in full, several in a line each."""
    if len(found) == 1:
        return _text(found[0], width)
    rows = [("card", "fits", "peak", "recomputed", "a second", "largest", "missing")]
    for each in found:
        rate = each.items_per_second
        rows.append(
            (
                f"{each.card}, {each.gib:g} GiB",
                "yes" if each.fits else "no",
                _bytes(each.peak_bytes),
                "-" if each.extra_share is None else f"{each.extra_share:.0%}",
                f"{rate:,.0f} {each.unit}" if rate else "-",
                " ".join(f"{n}={size}" for n, size in each.largest.items()) or "-",
                format_bytes(each.missing_bytes) if each.missing_bytes else "-",
            )
        )
    enough = [each for each in found if each.fits]
    least = min(enough, key=lambda each: each.gib, default=None)
    says = "none of them is enough"
    if least is not None:
        says = f"{least.card} with {least.gib:g} GiB is enough"
    return [*table(rows), *wrapped(says, width), *wrapped(f"time: {_CLOCK}", width)]


def _bytes(n_bytes: float | None) -> str:
    return "-" if n_bytes is None else format_bytes(n_bytes)


def _text(found: Rehearsal, width: int) -> list[str]:
    where = f"{found.card} of {found.gib:g} GiB"
    if found.ranks > 1:
        where = f"one rank of {found.ranks}, each {where}"
    if found.fits:
        verdict = f"fits: {len(found.steps)} steps on {where}"
    else:
        verdict = f"does not fit: {where}"
        if found.missing_bytes:
            verdict += f"; {format_bytes(found.missing_bytes)} are missing"
        verdict += f". {found.why}"
    rows = []
    outside, total = map(format_bytes, (found.outside_bytes, found.total_bytes))
    if found.budget_bytes is not None:
        is_above = (found.peak_bytes or 0) > found.budget_bytes and not found.over
        when = " outside of forward and backward" if is_above else ""
        rows.append(
            (
                "budget",
                f"{_bytes(found.budget_bytes)} of {total}, {outside} of which lie "
                f"outside of the allocator; reserved at most "
                f"{_bytes(found.peak_bytes)}{when}; {found.over} steps over, "
                f"{found.reruns} forwards ran again",
            )
        )
    kept = "; ".join(f"{k} {format_bytes(v)}" for k, v in found.held.items() if v)
    rows.append(("between steps", kept))
    if found.holders:
        held = "; ".join(f"{k} {format_bytes(v)}" for k, v in found.holders.items())
        rows.append(("at the peak", held))
    if found.items_per_second is not None:
        rate = f"{found.items_per_second:,.0f} {found.unit} a second"
        if found.ranks > 1:
            rate += (
                f" and rank ({found.collective_seconds or 0.0:.2f} s of collectives "
            )
            rate += "a step, beside the rest where streams allow)"
        if found.extra_share is not None:
            rate += f", {found.extra_share:.0%} of the time recomputes"
        rows.append(("pace", f"{rate}: {_CLOCK}"))
    if found.largest:
        sizes = ", ".join(f"{name}={size:,}" for name, size in found.largest.items())
        rows.append(("largest", f"{sizes} were trained, one at a time"))
    if found.error_p50 is not None and found.error_p99 is not None:
        rows.append(
            (
                "prediction",
                f"off by {found.error_p50:.2%} of the growth (median), "
                f"{found.error_p99:.2%} (99th percentile) behind the tenth step",
            )
        )
    if found.cpu_seconds is not None:
        here = f"{found.cpu_seconds:.0f} s of one core, "
        rows.append(("here", here + f"{_bytes(found.host_peak_bytes)} of memory"))
    rows += [("note", note) for note in found.notes]
    return [*wrapped(verdict, width), *named(rows, width), *_shapes(found)]


def _shapes(found: Rehearsal) -> list[str]:
    done = {tuple(step["shape"].items()): step for step in found.steps}
    ordered = sorted(
        done.values(), key=lambda step: [-n for n in step["shape"].values()]
    )
    if len(ordered) > _MOST_ROWS:  # evenly, with both ends
        last = len(ordered) - 1
        at = {round(i * last / (_MOST_ROWS - 1)) for i in range(_MOST_ROWS)}
        ordered = [ordered[i] for i in sorted(at)]
    names = " x ".join(ordered[0]["shape"]) if ordered else ""
    rows = [(names, "phase", "recomputed", "predicted", "peak", "reserved", "ms")]
    for step in ordered:
        sizes = " x ".join(map(str, step["shape"].values())) or "-"
        if step["no_room"]:
            rows.append((sizes, "no room", "-", "-", "-", "-", "-"))
            continue
        rows.append(
            (
                sizes,
                step["phase"],
                f"{step['recomputed']}/{step['calls']}",
                *map(_bytes, (step["predicted"], step["observed"], step["reserved"])),
                f"{step['seconds'] * 1e3:,.0f}",
            )
        )
    return ["", *table(rows)] if ordered else []
