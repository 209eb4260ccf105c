"""Keep PyTorch training within a memory budget, with a plan for every input shape.

Examples:
  mimose demo                        see what it does, on this machine
  mimose advise --model mine:make --budget 8GiB
                                     does saving memory pay for your model?
  mimose rehearse --model mine:make --cards h100
                                     does it fit a card that you do not have?
  mimose bench --list                what can be compared
  mimose report run/records.jsonl    see what it did in your own run

mimose COMMAND --help describes a command.

Exit status:
  0    success
  1    what was run failed, or a step was over the budget
  2    not possible: wrong options, an unreadable file, a missing package
  130  Ctrl-C
  141  the reader closed the pipe before the end
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import mimose
from mimose.bench.usage import (
    UsageError,
    at_least_one,
    names,
    need,
    positive,
    seed,
    shares,
)
from mimose.exceptions import MimoseError
from mimose.report.text import named, terminal_width, wrapped

if TYPE_CHECKING:
    from mimose.bench.grid.runner import GridSettings
    from mimose.records import StepRecord

_Options: TypeAlias = argparse.Namespace
_Option: TypeAlias = tuple[str, Any, Any, str]
"""Flag and the name of its value; type, choices or `bool`; default; help."""

_OK, _FAILED, _UNUSABLE, _INTERRUPTED = 0, 1, 2, 130
_UNREAD = 141
"""The reader closed the output before its end (128 + SIGPIPE)."""
_BENCH = ("filelock", "matplotlib", "rich", "tokenizers", "transformers")
"""Packages that ``mimose bench`` needs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: The command line after ``mimose``; None for the process's own.

    Returns:
        The exit status of the process.
    """
    options = _parser().parse_args(arguments)
    try:
        status: int = options.do(options)
        sys.stdout.flush()
    except UsageError as error:
        sys.stderr.write(f"mimose {options.command}: {error}\n")
        status = _UNUSABLE
    except BrokenPipeError:  # a flush at exit would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = _UNREAD
    return status


def _parser() -> argparse.ArgumentParser:
    how: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser("mimose", description=__doc__, **how)
    version = f"mimose {mimose.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for do, options in _COMMANDS.items():
        text = inspect.getdoc(do) or ""
        first = text.partition(".\n")[0]
        command = commands.add_parser(
            do.__name__.strip("_"),
            help=first[0].lower() + first[1:],
            description=text,
            **how,
        )
        for option in options:
            _add(command, *option)
        command.set_defaults(do=do)
    return parser


def _add(
    parser: argparse.ArgumentParser, flag: str, kind: Any, default: Any, text: str
) -> None:
    flag, _, metavar = flag.partition(" ")
    if kind is bool:
        parser.add_argument(flag, action="store_true", help=text)
        return
    how: dict[str, Any] = {"choices" if isinstance(kind, tuple) else "type": kind}
    if flag.startswith("--"):
        how["default"] = default
    if default is not None:
        shown = default if isinstance(default, tuple) else (default,)
        text += f" (default: {','.join(map(str, shown))})"
    parser.add_argument(flag, metavar=metavar or None, help=text, **how)


def _write(lines: Sequence[str]) -> None:
    sys.stdout.write("\n".join(lines) + "\n")


def _shown(options: _Options, out: Path, do: Callable[[], int]) -> int:
    """Run a command that writes ``summary.json``; with --json print only that file.

    Args:
        options: The options; `json` decides.
        out: The folder of the summary.
        do: Runs the command and returns the exit status.
    """
    if not options.json:
        return do()
    summary = out / "summary.json"
    with _usage_errors():  # one of an earlier run must not be printed
        summary.unlink(missing_ok=True)
    with contextlib.redirect_stdout(io.StringIO()):
        status = do()
    if summary.exists():
        _write([summary.read_text(encoding="utf-8").rstrip()])
    return status


@contextlib.contextmanager
def _usage_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turn file errors, and errors of the given classes, into usage errors.

    Raises:
        UsageError: Instead of these errors.
    """
    try:
        yield
    except OSError as error:
        name = error.filename or "a file"  # an error of a full disk has no name
        msg = f"cannot read or write {name}: {error.strerror or error}"
        raise UsageError(msg) from error
    except kinds as error:
        raise UsageError(str(error)) from error


def _demo(options: _Options) -> int:
    """Train the same batches four ways and show what each needs.

    The four ways are: keep everything, recompute everything, one plan for the longest
    batch, and mimose. They train on real text, first with a budget and then under a
    hard memory limit. The command writes a table, a picture and the rows of both.
    Ctrl-C shows the result so far.

    Examples:
      mimose demo
      mimose demo --steps 20 --out elsewhere

    Exit status:
      0    success
      1    a strategy failed that should not fail
      2    not possible: wrong options, a missing package
      130  Ctrl-C
    """
    need("bench", *_BENCH)
    from mimose.bench.grid.demo import SETTINGS, demo

    settings = replace(
        SETTINGS, seed=options.seed, steps=options.steps, threads=options.threads
    )
    return _shown(options, options.out, lambda: demo(settings, options.out))


def _advise(options: _Options) -> int:
    """Measure whether saving memory pays for a model, and with which method.

    The command measures plain training and each method at a few batch sizes, in
    separate processes that take turns: first bytes, then seconds. It says whether a
    batch as large as the sample fits, how each method changes the largest batch and the
    throughput, and what is not known. It writes the answer and the readings as JSON;
    --show answers from these readings for another budget. Ctrl-C keeps what was
    measured. To compare methods on batches of many lengths, use mimose bench --model.

    Examples:
      mimose advise --model mypackage.train:make --budget 8GiB
      mimose advise --model mypackage.train:make --budget 80% --device cuda
      mimose advise --show runs/advise/measured.json --budget 6GiB

    MODULE:FUNCTION is a function without arguments that returns (model, sample): the
    model on the CPU, and one batch: a mapping of keyword arguments, a tuple of
    arguments, or a single tensor. Batches of other sizes repeat its rows. Give the
    longest batch that you want to train on.

    Exit status:
      0    success
      2    not possible: wrong options, an unreadable file, a missing package
      130  Ctrl-C
    """
    from mimose.bench.advise.command import again, ask
    from mimose.bench.advise.methods import METHODS
    from mimose.bench.advise.settings import Settings

    if options.list:
        methods = [(each.name, each.what) for each in METHODS.values()]
        _write(named(methods, terminal_width()))
        return _OK
    try:
        with _usage_errors():
            if options.show:
                out = options.out or options.show.parent
                status, lines = again(options.show, out, options.budget, options.json)
            else:
                if not (options.model and options.budget):
                    msg = "give --model, the model to train, and --budget, its memory"
                    raise UsageError(msg)
                settings = Settings(
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
                )
                out = options.out or Path("runs/advise")
                status, lines = ask(settings, out, options.json)
    except KeyboardInterrupt:
        sys.stderr.write("mimose advise: interrupted before an answer was known\n")
        return _INTERRUPTED
    _write(lines)
    return status


def _rehearse(options: _Options) -> int:
    """Train a model on cards that you do not have: does it fit, and how fast?

    A simulated card runs your code at true size without arithmetic: every byte is that
    of torch's allocator on the card, seconds are those of a clock. It needs a C++
    compiler, once, and neither weights nor a network. Several cards get a line each.

    Examples:
      mimose rehearse --model mypackage.train:make --cards h100
      mimose rehearse --model mypackage.train:make --cards rtx4090,a100:40,h100
      mimose rehearse --model mypackage.train:make --cards h100 --lengths lengths.json
      mimose rehearse --model mypackage.train:make --cards h100 --ranks 64

    MODULE:FUNCTION is a function without arguments that returns (model, batch), or
    (model, batch, optimizer). It is called where torch's default device is the card,
    and shards the model itself if there are ranks. A function called batches beside it
    may yield the batches. Otherwise the batch is stretched to each of the lengths: a
    JSON list of integers, or lists by the name of a size, such as "input_ids.1".

    Exit status:
      0    it fits a card
      1    it fits none
      2    not possible: wrong options, an unreadable file, no compiler, a kernel that
           is not torch's
      130  Ctrl-C
    """
    from mimose.bench.child import RunFailedError
    from mimose.bench.rehearse.batches import read_lengths
    from mimose.bench.rehearse.command import Settings, chosen, lines, run

    if not options.model:
        msg = "give --model, the function that makes the model to train"
        raise UsageError(msg)
    with _usage_errors(RunFailedError):
        settings = Settings(
            model=options.model,
            cards=chosen(options.cards, options.gib),
            lengths=options.lengths and read_lengths(options.lengths),
            budget=options.budget,
            ranks=options.ranks,
            steps=options.steps,
            dtype=options.dtype,
            optimizer=options.optimizer,
            seed=options.seed,
        )
        try:
            found = run(settings, options.save, options.out, show=True)
        except KeyboardInterrupt:
            sys.stderr.write("mimose rehearse: interrupted\n")
            return _INTERRUPTED
    if options.json:
        _write([json.dumps([asdict(each) for each in found])])
    else:
        _write(lines(found, terminal_width()))
    return _OK if any(each.fits for each in found) else _FAILED


def _bench(options: _Options) -> int:
    """Compare memory strategies on variable-size data, at several budgets.

    Every strategy trains on the same batches from the same weights, in its own process;
    the processes take turns. Peaks are measured, recomputation is counted. The command
    writes rows, a picture and a summary, and renames the rows of an earlier run. Ctrl-C
    keeps the steps that ran.

    A budget is a share, not bytes: 0 is what the longest batch needs if every layer is
    recomputed, 1 what it needs if every layer is kept.

    Examples:
      mimose bench --list
      mimose bench --workloads qa-bert --strategies none,full,static,mimose
      mimose bench --workloads tc-bert --lengths mine.csv --budgets 0.3,0.6
      mimose bench --model mypackage.models:small_one --lengths mine.csv
      mimose bench --show runs/bench/rows.csv

    MODULE:FUNCTION is a function without arguments that returns (model, make_batch,
    names of sizes). It needs --lengths.

    Exit status:
      0    success
      1    a workload could not be run
      2    not possible: wrong options, an unreadable file, a missing package
      130  Ctrl-C
    """
    need("bench", *_BENCH)
    from mimose.bench.grid.command import bench, put_aside, show_again

    if options.list:
        return _list()
    with _usage_errors(ValueError):
        if options.show:
            rows = options.show
            out = options.out or rows.parent
            return _shown(options, out, lambda: show_again(rows, out))
        settings = _grid(options)
        out = options.out or Path("runs/bench")
        put_aside(out)
    return _shown(options, out, lambda: bench(settings, out))


def _grid(options: _Options) -> GridSettings:
    """Return the settings of ``mimose bench``."""
    from mimose.bench.device import need_device
    from mimose.bench.grid.runner import GridSettings, raise_if_impossible
    from mimose.bench.grid.traces import from_file
    from mimose.bench.grid.workloads import DEFAULT, workload_named

    chosen = options.workloads or ([] if options.model else DEFAULT)
    workloads = tuple(dict.fromkeys([*chosen, *filter(None, [options.model])]))
    strategies = _strategies(options.strategies)
    need_device(options.device)
    sizes = [size for name in workloads for size in workload_named(name).sizes]
    given = options.lengths and from_file(options.lengths, [*dict.fromkeys(sizes)])
    trace = tuple(given or ())
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
        trace=trace,
    )
    if len(trace) > settings.n_batches:
        sys.stderr.write(
            f"mimose bench: only the first {settings.n_batches} of {len(trace)} given "
            f"batches are used: see --steps\n"
        )
    for name in workloads:
        raise_if_impossible(settings, name)
    return settings


def _strategies(chosen: Sequence[str] | None) -> tuple[str, ...]:
    """Return the strategies to compare, plain training first; by default all."""
    from mimose.bench.grid.strategies import STRATEGIES

    strategies = tuple(dict.fromkeys(["none", *(chosen or STRATEGIES)]))
    for name in set(strategies) - set(STRATEGIES):
        msg = f"no strategy is called {name}; choose from {', '.join(STRATEGIES)}"
        raise UsageError(msg)
    if not any(STRATEGIES[name].heeds_budget for name in strategies):
        msg = (
            f"{', '.join(strategies)}: none of these keeps a budget, so there is "
            f"nothing to compare; add another one, such as mimose"
        )
        raise UsageError(msg)
    return strategies


def _list() -> int:
    from mimose.bench.grid.strategies import STRATEGIES
    from mimose.bench.grid.workloads import WORKLOADS

    works = []
    for work in WORKLOADS.values():
        lengths = "generated" if work.is_synthetic else "of real text"
        works.append((work.name, f"{work.what}; lengths {lengths}"))
    chosen = [(each.name, each.what) for each in STRATEGIES.values()]
    width = terminal_width()
    _write(["workloads", *named(works, width), "strategies", *named(chosen, width)])
    return _OK


def _report(options: _Options) -> int:
    """Make a page of a run, and show its main numbers.

    The command reads the records that mimose.attach(model, budget,
    record_to='records.jsonl') writes. It makes one HTML page, which loads nothing,
    prints the main numbers, and writes them as JSON beside the page.

    Examples:
      mimose report run/                      reads run/records.jsonl
      mimose report records.jsonl --out report.html
      mimose report records.jsonl --json | jq .budget_use
      mimose report records.jsonl --tensorboard board/

    Exit status:
      0    no step whose peak was read was over the budget
      1    a step was over the budget; the page is written too
      2    not possible: wrong options, an unreadable file, a missing package
    """
    from mimose.report.page import figures, headline, verdict, write_page

    if options.tensorboard is not None:
        need("tensorboard", "tensorboard")
    path, records = _read(options.records)
    page = options.out or path.with_suffix(".html")
    if not page.name:
        msg = f"--out {page} is a folder: give a file, such as --out page.html"
        raise UsageError(msg)
    files = {"page": page, "numbers": page.with_suffix(".numbers.json")}
    if path.resolve() in (page.resolve(), files["numbers"].resolve()):
        msg = f"the page would overwrite the records in {path}: give it another name, "
        msg += f"such as --out {path.stem}-page.html"
        raise UsageError(msg)
    if options.tensorboard is not None:
        files["tensorboard"] = options.tensorboard
    numbers = headline(records)
    shown = asdict(numbers) | {"files": {name: str(f) for name, f in files.items()}}
    with _usage_errors():
        page.parent.mkdir(parents=True, exist_ok=True)
        write_page(records, page, title=f"mimose: {path}")
        files["numbers"].write_text(json.dumps(shown) + "\n", encoding="utf-8")
        if options.tensorboard is not None:
            from mimose.report.metrics import write_scalars

            write_scalars(records, options.tensorboard)
    lines = [json.dumps(shown)]
    if not options.json:
        width = terminal_width()
        rows = [
            (name, f"{number}{' ' if why.startswith('of ') else ', '}{why}")
            for name, number, why in figures(numbers)
        ]
        lines = [*wrapped(verdict(numbers), width), *named(rows, width)]
        lines += [f"{name}: {file}" for name, file in files.items()]
    _write(lines)
    return _FAILED if numbers.steps_over else _OK


def _read(path: Path) -> tuple[Path, list[StepRecord]]:
    """Return the file of records, from its path or its folder, and the records."""
    from mimose.records import read_records

    if path.is_dir():
        path /= "records.jsonl"
    with _usage_errors(MimoseError, UnicodeDecodeError):
        records = read_records(path)
    if not records:
        msg = f"{path} has no record of a complete step"
        raise UsageError(msg)
    return path, records


_DTYPES = ("float32", "bfloat16")
_SHARES = (0.35, 0.5, 0.7)
_COMMON: tuple[_Option, ...] = (
    ("--seed", seed, 0, "seed of the weights and of the order of batches"),
    ("--threads", at_least_one, 2, "threads of torch"),
    ("--json", bool, None, "print only JSON"),
)
_TRAINED: tuple[_Option, ...] = (
    ("--model MODULE:FUNCTION", None, None, "your own model; see above"),
    ("--device", None, "cpu", "device to train on, such as cuda"),
    ("--dtype", _DTYPES, "float32", "dtype of the layers; bfloat16 uses autocast"),
)
_COMMANDS: dict[Callable[[_Options], int], tuple[_Option, ...]] = {
    _demo: (
        ("--steps", at_least_one, 32, "steps of each strategy"),
        *_COMMON,
        ("--out", Path, Path("runs/demo"), "folder for the files"),
    ),
    _advise: (
        *_TRAINED,
        ("--budget", None, None, "as for mimose.attach: 8GiB, 80%%, +400MiB"),
        ("--minutes", positive, 5.0, "longest time to measure"),
        ("--methods A,B", names, None, "methods (default: all that are possible)"),
        ("--list", bool, None, "list the methods and exit"),
        ("--optimizer", ("adamw", "sgd"), "adamw", "optimizer to train with"),
        *_COMMON,
        ("--show MEASURED.json", Path, None, "measure nothing; use saved readings"),
        ("--out", Path, None, "folder (default: runs/advise, or that of --show)"),
    ),
    _rehearse: (
        ("--model MODULE:FUNCTION", None, None, "your own model; see above"),
        ("--cards A,B:GIB", names, ("h100",), "h200, h100, a100, rtx4090, a10"),
        ("--gib", positive, None, "memory of cards that do not say (default: theirs)"),
        ("--lengths FILE.json", Path, None, "the lengths of your batches"),
        ("--budget", None, None, "as for mimose.attach (default: what is free)"),
        ("--ranks", at_least_one, 1, "processes that train together"),
        ("--steps", at_least_one, 40, "steps to train"),
        ("--dtype", _DTYPES, "float32", "bfloat16 uses autocast"),
        ("--optimizer", ("adamw", "sgd"), "adamw", "if the function returns none"),
        ("--seed", seed, 0, "seed of the order of lengths"),
        ("--save STATE.json", Path, None, "what was learned, for load_state_dict"),
        ("--out PAGE.html", Path, None, "the page of the run"),
        ("--json", bool, None, "print only JSON"),
    ),
    _bench: (
        ("--list", bool, None, "list workloads and strategies and exit"),
        ("--workloads A,B", names, None, "workloads (default: the language tasks)"),
        ("--strategies A,B", names, None, "strategies (default: all)"),
        ("--budgets A,B", shares, _SHARES, "shares above 0 and up to 1; see above"),
        ("--steps", at_least_one, 60, "measured steps of each strategy and budget"),
        ("--warm-up", at_least_one, 12, "steps before them, which are not counted"),
        ("--scale", ("tiny", "small", "base"), "tiny", "size of the models"),
        *_TRAINED,
        ("--lengths FILE.csv", Path, None, "your batches: one size a column"),
        *_COMMON,
        ("--show ROWS.csv", Path, None, "run nothing; show saved rows"),
        ("--out", Path, None, "folder (default: runs/bench, or that of --show)"),
    ),
    _report: (
        ("records", Path, None, "the file of records, or its folder"),
        ("--out PAGE", Path, None, "the page (default: beside the records, as .html)"),
        ("--json", bool, None, "print only JSON"),
        ("--tensorboard DIR", Path, None, "also write metrics for TensorBoard there"),
    ),
}


if __name__ == "__main__":
    sys.exit(main())
