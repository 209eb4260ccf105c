"""What each command does; `mimose.cli.main` reads the command line and calls these.

Everything heavy, and everything that an extra installs, is imported in here when a
command needs it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mimose.exceptions import MimoseError
from mimose.near_names import near_names
from mimose.usage import UsageError, need

if TYPE_CHECKING:
    from mimose.bench.advise.settings import Settings as AdviseSettings
    from mimose.bench.grid.settings import GridSettings
    from mimose.bench.grid.strategies import Strategy
    from mimose.bench.grid.traces import Sizes
    from mimose.bench.grid.workload import Workload
    from mimose.records import StepRecord
    from mimose.report.page.headline import Headline

OK = 0
FAILED = 1
"""What was run failed, or did not hold."""
UNUSABLE = 2
"""What was asked for cannot be done: no such file, a package is missing."""
INTERRUPTED = 130
UNREAD = 141
"""The output was closed before all of it was written (128 + SIGPIPE)."""

_BENCH = ("filelock", "matplotlib", "rich", "sympy", "tokenizers", "transformers")
"""Packages that a grid needs."""
_RECORDS = "records.jsonl"
_OUT = Path("runs/bench")
_ADVISE_OUT = Path("runs/advise")
_FOR_MEASURING = (
    "model",
    "minutes",
    "methods",
    "device",
    "dtype",
    "optimizer",
    "seed",
    "threads",
    "lengths",
    "dataset",
    "column",
    "texts",
    "longest",
)
"""Options that say nothing of readings that are there already."""


def demo(options: argparse.Namespace) -> int:
    """Run ``mimose demo``.

    Args:
        options: steps, seed, threads, out.

    Raises:
        UsageError: A package is missing, or the folder cannot be made.
    """
    need("bench", *_BENCH)
    from mimose.bench.grid.demo import SETTINGS, demo

    settings = replace(
        SETTINGS, seed=options.seed, steps=options.steps, threads=options.threads
    )
    return demo(settings, options.out)


def bench(options: argparse.Namespace) -> int:
    """Run ``mimose bench``.

    Args:
        options: As the command line says them.

    Raises:
        UsageError: A workload or a strategy is not known, the lengths or the rows
            cannot be read, or a package is missing.
    """
    need("bench", *_BENCH)
    from mimose.bench.grid.command import bench, prepare, show_again
    from mimose.bench.grid.registry import STRATEGIES
    from mimose.bench.grid.workloads import WORKLOADS

    if options.list:
        return _list(WORKLOADS, STRATEGIES)
    with _told_as_usage():
        if options.show:
            out = options.out or options.show.parent
            return show_again(options.show, out, options.against)
        if options.against:
            msg = "--against compares with the rows of --show: give both"
            raise UsageError(msg)
        settings = _grid(options)
        out = options.out or _OUT
        rows = prepare(settings, out, resume=options.resume)
    return bench(settings, out, rows)


@contextlib.contextmanager
def _told_as_usage() -> Iterator[None]:
    """Tell what cannot be read, written or done in one line."""
    with _told_of_files():
        try:
            yield
        except ValueError as error:
            raise UsageError(str(error)) from error


@contextlib.contextmanager
def _told_of_files() -> Iterator[None]:
    """Tell which file cannot be read or written in one line."""
    try:
        yield
    except OSError as error:
        name = error.filename or "a file"  # a full disk names none
        msg = f"cannot read or write {name}: {error.strerror or error}"
        raise UsageError(msg) from error


def _grid(options: argparse.Namespace) -> GridSettings:
    """Return what ``mimose bench`` was asked to compare."""
    from mimose.bench.device import need_device
    from mimose.bench.grid.registry import STRATEGIES
    from mimose.bench.grid.scaling import SCALED, SCALING
    from mimose.bench.grid.settings import GridSettings, refuse_workload

    if options.model and ":" not in options.model:
        msg = f"--model {options.model}: give it as module:function"
        raise UsageError(msg)
    if options.scaling:
        others = ("workloads", "model", "lengths", "dataset")
        given = [f"--{name}" for name in others if getattr(options, name)]
        if given:
            msg = (
                f"--scaling has workloads and lengths of its own; leave {given[0]} out"
            )
            raise UsageError(msg)
        named: Iterable[str] = SCALING
        options.strategies = options.strategies or SCALED
    else:
        named = options.workloads or ([] if options.model else _by_default(options))
    workloads = tuple(dict.fromkeys([*named, *filter(None, [options.model])]))
    strategies = tuple(dict.fromkeys(["none", *(options.strategies or STRATEGIES)]))
    unknown = [name for name in strategies if name not in STRATEGIES]
    if unknown:
        meant = [near for name in unknown for near in near_names(name, STRATEGIES)]
        advice = f"choose of {', '.join(STRATEGIES)}"
        if meant:
            advice = f"did you mean {', '.join(meant)}?"
        msg = f"no strategy is called {', '.join(unknown)}; {advice}"
        raise UsageError(msg)
    if not any(STRATEGIES[name].heeds_budget for name in strategies):
        msg = f"{', '.join(strategies)}: none of these heeds a budget; add mimose, say"
        raise UsageError(msg)
    need_device(options.device)
    settings = GridSettings(
        workloads=workloads,
        strategies=strategies,
        budgets=tuple(sorted(options.budgets)),
        steps=options.steps,
        warm_up=options.warm_up,
        scale=options.scale,
        seed=options.seed,
        threads=options.threads,
        device=options.device,
        dtype=options.dtype,
        trace=_trace(options, workloads),
    )
    if len(settings.trace) > settings.n_batches:
        sys.stderr.write(
            f"mimose bench: {settings.n_batches} of the {len(settings.trace)} batches "
            f"that were given are used, the first: see --steps\n"
        )
    for name in workloads:
        refuse_workload(settings, name)
    return settings


def _by_default(options: argparse.Namespace) -> list[str]:
    """Return the workloads to run: with lengths given, those that they are for."""
    from mimose.bench.grid.traces import columns_of
    from mimose.bench.grid.workloads import ALL, DEFAULT

    if not options.lengths and not options.dataset:
        return list(DEFAULT)
    given = columns_of(options.lengths) if options.lengths else ("length",)
    found = [name for name in DEFAULT if set(ALL[name].sizes) <= set(given)]
    if not found:
        msg = (
            f"{options.lengths} has columns {', '.join(given)}: no workload of the "
            f"default has these; name one with --workloads"
        )
        raise UsageError(msg)
    return found


def _trace(options: argparse.Namespace, workloads: Sequence[str]) -> tuple[Sizes, ...]:
    """Return the sizes that were given; none where they are the workloads' own."""
    from mimose.bench.grid.traces import from_dataset, from_file
    from mimose.bench.grid.workloads import workload_named

    if options.lengths:
        sizes = [name for each in workloads for name in workload_named(each).sizes]
        return tuple(from_file(options.lengths, [*dict.fromkeys(sizes)]))
    if not options.dataset:
        return ()
    need("bench", "datasets")
    found = from_dataset(
        options.dataset,
        options.column,
        batch_size=options.texts,
        most=options.longest,
        seed=options.seed,
    )
    return tuple(found)


def _list(workloads: Mapping[str, Workload], strategies: Mapping[str, Strategy]) -> int:
    from mimose.bench.grid.scaling import SCALING
    from mimose.report.columns import named, terminal_width

    works = [
        (
            each.name,
            f"{each.what}; lengths "
            + ("generated" if each.is_synthetic else "of real text"),
        )
        for each in workloads.values()
    ]
    works.append(
        (
            "--scaling",
            "language models of which one thing grows; or one of them: "
            + ", ".join(SCALING),
        )
    )
    chosen = []
    for strategy in strategies.values():
        why = strategy.why_not("cpu")
        chosen.append(
            (strategy.name, strategy.what + (f" (on a CPU: {why})" if why else ""))
        )
    width = terminal_width()
    _write(["workloads", *named(works, width), "strategies", *named(chosen, width)])
    return OK


def advise(options: argparse.Namespace) -> int:
    """Run ``mimose advise``.

    Args:
        options: As the command line says them.

    Raises:
        UsageError: The model cannot be made or trained, a name is not known, a file
            cannot be read, a package is missing, or there is nothing to measure with
            options for measuring.
    """
    try:
        return _advise(options)
    except KeyboardInterrupt:
        sys.stderr.write("mimose advise: interrupted before there was an answer\n")
        return INTERRUPTED


def _advise(options: argparse.Namespace) -> int:
    from mimose.bench.advise.command import again, ask
    from mimose.bench.advise.methods import METHODS
    from mimose.bench.device import need_device
    from mimose.report.columns import named, terminal_width

    if options.list:
        told = [(each.name, each.what) for each in METHODS.values()]
        _write(named(told, terminal_width()))
        return OK
    with _told_of_files():
        if options.show:
            _need_none_for_measuring(options)
            out = options.out or options.show.parent
            status, lines = again(options.show, out, options.budget, options.json)
        else:
            _need_given(options)
            need_device(options.device)
            out = options.out or _ADVISE_OUT
            status, lines = ask(_question(options), out, options.json)
    _write(lines)
    return status


def _need_none_for_measuring(options: argparse.Namespace) -> None:
    given = [
        f"--{name}"
        for name in _FOR_MEASURING
        if getattr(options, name) != options.default_of(name)
    ]
    if given:
        msg = (
            f"--show answers from readings that are there: leave out "
            f"{', '.join(given)}, or measure anew with --model"
        )
        raise UsageError(msg)


def _need_given(options: argparse.Namespace) -> None:
    missing = [name for name in ("model", "budget") if not getattr(options, name)]
    if missing:
        given = " and ".join(f"--{name}" for name in missing)
        msg = f"give {given}: what is to be trained, and in how much memory"
        raise UsageError(msg)


def _question(options: argparse.Namespace) -> AdviseSettings:
    from mimose.bench.advise.methods import METHODS
    from mimose.bench.advise.settings import Settings

    return Settings(
        source=options.model,
        model=options.model,
        budget=options.budget,
        methods=tuple(options.methods or METHODS),
        device=options.device,
        dtype=options.dtype,
        optimizer=options.optimizer,
        threads=options.threads,
        seed=options.seed,
        minutes=options.minutes,
        lengths=_lengths_to_come(options),
    )


def _lengths_to_come(options: argparse.Namespace) -> tuple[int, ...]:
    """Return the lengths that were given; none where they were not."""
    from mimose.bench.grid.traces import from_dataset, from_file

    if options.lengths:
        with _told_as_usage():
            found = from_file(options.lengths, ("length",))
    elif options.dataset:
        need("bench", "datasets", "tokenizers")
        n_texts = options.texts or _samples_of(options.model)
        with _told_as_usage():
            found = from_dataset(
                options.dataset,
                options.column,
                batch_size=n_texts,
                most=options.longest,
                seed=options.seed,
            )
    else:
        found = []
    return tuple(sizes["length"] for sizes in found)


def _samples_of(source: str) -> int:
    """Return how many samples a model's batch has."""
    from mimose.bench.advise.sample import Sample
    from mimose.bench.advise.source import make

    return Sample(make(source)[1]).batch


def report(options: argparse.Namespace) -> int:
    """Run ``mimose report``.

    Args:
        options: records, out, json, tensorboard.

    Raises:
        UsageError: There are no records, the page cannot be written, or a package is
            missing.
    """
    if options.tensorboard is not None:
        need("tensorboard", "tensorboard")
    path = _records_file(options.records)
    records = _read(path)
    files = {"page": options.out or path.with_suffix(".html")}
    if files["page"].resolve() == path.resolve():
        msg = f"{files['page']} is the file of the records itself"
        msg += f": give the page another name, such as --out {path.stem}-page.html"
        raise UsageError(msg)
    if options.tensorboard is not None:
        files["tensorboard"] = options.tensorboard
    return _report(records, files, title=f"mimose: {path}", as_json=options.json)


def _report(
    records: list[StepRecord], files: Mapping[str, Path], *, title: str, as_json: bool
) -> int:
    from mimose.report.page import page
    from mimose.report.page.headline import headline
    from mimose.report.page.steps import Steps

    steps = Steps(records)
    html = page(steps, title=title)
    try:
        files["page"].parent.mkdir(parents=True, exist_ok=True)
        files["page"].write_bytes(html)
        if "tensorboard" in files:
            from mimose.report.tensorboard import write_scalars

            write_scalars(records, files["tensorboard"])
    except OSError as error:
        msg = f"cannot write {error.filename}: {error.strerror}"
        raise UsageError(msg) from error
    numbers = headline(steps)
    _write((_json if as_json else _lines)(numbers, files))
    return FAILED if numbers.steps_over else OK


def _records_file(path: Path) -> Path:
    """Return the file that holds a run's records, given it or its folder."""
    if not path.is_dir():
        return path
    if (path / _RECORDS).exists():
        return path / _RECORDS
    msg = f"{path} holds no {_RECORDS}: give the file that attach(record_to=...) wrote"
    raise UsageError(msg)


def _read(path: Path) -> list[StepRecord]:
    from mimose.record_file import read_records

    try:
        records = read_records(path)
    except OSError as error:
        msg = f"cannot read {path}: {error.strerror}"
        raise UsageError(msg) from error
    except UnicodeDecodeError as error:
        msg = f"cannot read {path}: it is no text"
        raise UsageError(msg) from error
    except MimoseError as error:
        raise UsageError(str(error)) from error
    if not records:
        msg = f"{path} holds no step that was run to its end"
        raise UsageError(msg)
    return records


def _json(numbers: Headline, files: Mapping[str, Path]) -> list[str]:
    document = {
        **asdict(numbers),
        "files": {name: str(path) for name, path in files.items()},
    }
    return [json.dumps(document)]


def _lines(numbers: Headline, files: Mapping[str, Path]) -> list[str]:
    from mimose.report.columns import named, terminal_width, wrapped
    from mimose.report.page.headline import facts, verdict, written

    width = terminal_width()
    told = [(name, written(number, remark)) for name, number, remark in facts(numbers)]
    return [
        *wrapped(verdict(numbers), width),
        *named(told, width),
        *(f"{name}: {path}" for name, path in files.items()),
    ]


def _write(lines: Sequence[str]) -> None:
    """Write to the standard output; who reads no further has had enough of it."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write("\n".join(lines) + "\n")
    flush_output()


def flush_output() -> None:
    """Write what is in the buffer, if anybody still reads it."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        forget_output()


def forget_output() -> None:
    """Write no more to an output that nobody reads, and say nothing of it at the end.

    What is left in the buffer would otherwise fail as the interpreter ends.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
