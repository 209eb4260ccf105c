"""Keep PyTorch training within a memory budget, with a plan for every input shape.

Examples:
  mimose demo                        see what it does, on this machine
  mimose advise --model mine:make --budget 8GiB
                                     does saving memory pay for your model?
  mimose bench --list                what can be compared
  mimose report run/records.jsonl    see what it did in a run of yours

mimose COMMAND --help tells more.

Exit status:
  0    all went well
  1    what was run failed, or did not hold
  2    it cannot be done: wrong options, an unreadable file, a missing package
  130  Ctrl-C
  141  the reader closed the pipe before the end
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.metadata
import inspect
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from mimose.exceptions import MimoseError
from mimose.report.columns import named, terminal_width, wrapped
from mimose.usage import UsageError, at_least_one, names, need, positive, seed, shares

if TYPE_CHECKING:
    from mimose.bench.grid.runner import GridSettings
    from mimose.records import StepRecord

_Options: TypeAlias = argparse.Namespace
_Option: TypeAlias = tuple[str, Any, Any, str]
"""Flag and what stands for its value; type, choices or `bool`; default; help."""

_OK, _FAILED, _UNUSABLE, _INTERRUPTED = 0, 1, 2, 130
_UNREAD = 141
"""The output was closed before all of it was written (128 + SIGPIPE)."""
_BENCH = ("filelock", "matplotlib", "rich", "tokenizers", "transformers")
"""Packages that a grid needs."""


class _Parser(argparse.ArgumentParser):
    """Tells what is wrong in one line, not behind a list of all options."""

    def __init__(self, **texts: Any) -> None:
        keeps_lines = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=keeps_lines, **texts)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; what a command does not know is its error, and not its parent's."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Write the message with the nearest option or choice there is, and end."""
        wrong = re.search(r"(?:arguments: |choice: ')([-\w]+)", message)
        _, _, choices = message.partition("choose from")
        known = [*self._option_string_actions, *re.findall(r"[-\w]+", choices)]
        near = difflib.get_close_matches(wrong[1], known, 1) if wrong else []
        hint = "".join(f"; did you mean {name}?" for name in near)
        self.exit(2, f"{self.prog}: {message}{hint}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: What was written behind ``mimose``; None for the process's own.

    Returns:
        The process's exit status.
    """
    status = _UNREAD
    try:
        with contextlib.suppress(BrokenPipeError):
            status = _run(arguments)
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # what is in the buffer would fail at the end again
            status = _UNREAD
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
    return status


def _run(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    try:
        status: int = options.do(options)
    except UsageError as error:
        sys.stderr.write(f"mimose {options.command}: {error}\n")
        status = _UNUSABLE
    return status


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="mimose", description=__doc__)
    try:
        version = importlib.metadata.version("mimose")
    except importlib.metadata.PackageNotFoundError:
        version = "(a checkout that is not installed)"
    parser.add_argument("--version", action="version", version=f"mimose {version}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for do, options in _COMMANDS.items():
        text = inspect.getdoc(do) or ""
        first = text.partition(".\n")[0]
        command = commands.add_parser(
            do.__name__.strip("_"),
            help=first[0].lower() + first[1:],
            description=text,
        )
        for option in options:
            _add(command, *option)
        command.set_defaults(do=do, default_of=command.get_default)
    return parser


def _add(parser: _Parser, flag: str, kind: Any, default: Any, text: str) -> None:
    flag, _, metavar = flag.partition(" ")
    if kind is bool:
        parser.add_argument(flag, action="store_true", help=text)
        return
    how: dict[str, Any] = {"choices" if isinstance(kind, tuple) else "type": kind}
    if flag.startswith("--"):
        how["default"] = default
    if default is not None:
        shown = (
            default if not isinstance(default, tuple) else ",".join(map(str, default))
        )
        text += f" (default: {shown})"
    parser.add_argument(flag, metavar=metavar or None, help=text, **how)


def _write(lines: Sequence[str]) -> None:
    """Write to the standard output; who reads no further has had enough of it."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write("\n".join(lines) + "\n")


def _shown(options: _Options, out: Path, do: Callable[[], int]) -> int:
    """Run what prints words and leaves ``summary.json``; with --json print that alone.

    Args:
        options: Whose `json` says which.
        out: The folder of the summary.
        do: Returns the exit status.
    """
    if not options.json:
        return do()
    summary = out / "summary.json"
    with _told_as_usage():  # of a run before, should this one leave none
        summary.unlink(missing_ok=True)
    with contextlib.redirect_stdout(io.StringIO()):
        status = do()
    if summary.exists():
        _write([summary.read_text(encoding="utf-8").rstrip()])
    return status


@contextlib.contextmanager
def _told_as_usage(*kinds: type[Exception]) -> Iterator[None]:
    """Tell which file cannot be read or written in one line, and errors of some kinds.

    Raises:
        UsageError: In place of these.
    """
    try:
        yield
    except OSError as error:
        name = error.filename or "a file"  # a full disk names none
        msg = f"cannot read or write {name}: {error.strerror or error}"
        raise UsageError(msg) from error
    except kinds as error:
        raise UsageError(str(error)) from error


def _demo(options: _Options) -> int:
    """Train the same batches four ways and show what each needs.

    Keep everything, recompute everything, one plan for the longest batch, mimose: on
    real text, then under a hard memory limit. Leaves a table, a picture and the rows
    behind them. Ctrl-C shows what there is so far.

    Examples:
      mimose demo
      mimose demo --steps 20 --out elsewhere

    Exit status:
      0    all went well
      1    a strategy failed that should not have
      2    it cannot be done: wrong options, a missing package
      130  Ctrl-C
    """
    need("bench", *_BENCH)
    from mimose.bench.grid.demo import SETTINGS, demo

    settings = replace(
        SETTINGS, seed=options.seed, steps=options.steps, threads=options.threads
    )
    return _shown(options, options.out, lambda: demo(settings, options.out))


def _advise(options: _Options) -> int:
    """Tell whether saving memory pays for a model, and with which method.

    Plain training and each method are measured at a few batch sizes, in processes of
    their own that take turns: bytes, then seconds. Says whether a batch as large as the
    sample fits, what each method does to the largest batch and to throughput, and what
    it cannot say. Leaves the answer as JSON and the readings, from which --show answers
    for another budget. Ctrl-C keeps what was measured. To compare methods on batches
    of many lengths: mimose bench --model.

    Examples:
      mimose advise --model mypackage.train:make --budget 8GiB
      mimose advise --model mypackage.train:make --budget 80% --device cuda
      mimose advise --show runs/advise/measured.json --budget 6GiB

    MODULE:FUNCTION takes nothing and returns (model, sample): the model on the CPU, and
    one batch as it is called with: keyword arguments as a mapping, arguments as a
    tuple, or the one tensor. Batches of other sizes repeat its rows. Give the longest
    batch that you want to train on.

    Exit status:
      0    all went well
      2    it cannot be done: wrong options, an unreadable file, a missing package
      130  Ctrl-C
    """
    from mimose.bench.advise.command import again, ask
    from mimose.bench.advise.methods import METHODS
    from mimose.bench.advise.settings import Settings
    from mimose.bench.device import need_device

    if options.list:
        told = [(each.name, each.what) for each in METHODS.values()]
        _write(named(told, terminal_width()))
        return _OK
    try:
        with _told_as_usage():
            if options.show:
                _need_none_for_measuring(options)
                out = options.out or options.show.parent
                status, lines = again(options.show, out, options.budget, options.json)
            else:
                missing = [
                    f"--{n}" for n in ("model", "budget") if not vars(options)[n]
                ]
                if missing:
                    msg = f"give {' and '.join(missing)}: what is to be trained, and "
                    msg += "in how much memory"
                    raise UsageError(msg)
                need_device(options.device)
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
        sys.stderr.write("mimose advise: interrupted before there was an answer\n")
        return _INTERRUPTED
    _write(lines)
    return status


def _need_none_for_measuring(options: _Options) -> None:
    used = {"command", "do", "default_of", "list", "budget", "show", "json", "out"}
    given = [
        f"--{name}"
        for name, value in vars(options).items()
        if name not in used and value != options.default_of(name)
    ]
    if given:
        msg = (
            f"--show answers from readings that are there: leave out "
            f"{', '.join(given)}, or measure anew with --model"
        )
        raise UsageError(msg)


def _bench(options: _Options) -> int:
    """Compare memory strategies on variable-size data, at several budgets.

    Which one should a model be trained with? Every strategy trains on the same batches
    from the same weights, each in its process; they take turns. Peaks are physical,
    recomputation is counted. Leaves the rows, a picture and a summary; rows of a run
    before are put aside. Ctrl-C keeps the steps that ran.

    A budget is a share, not bytes: 0 is what the longest batch needs when every layer
    is recomputed, 1 what it needs when every layer is kept.

    Examples:
      mimose bench --list
      mimose bench --workloads qa-bert --strategies none,full,static,mimose
      mimose bench --workloads tc-bert --lengths mine.csv --budgets 0.3,0.6
      mimose bench --model mypackage.models:small_one --lengths mine.csv
      mimose bench --show runs/bench/rows.csv

    MODULE:FUNCTION takes nothing and returns (model, make_batch, names of sizes); it
    needs --lengths.

    Exit status:
      0    all went well
      1    a workload could not be run
      2    it cannot be done: wrong options, an unreadable file, a missing package
      130  Ctrl-C
    """
    need("bench", *_BENCH)
    from mimose.bench.grid.command import bench, put_aside, show_again

    if options.list:
        return _list()
    with _told_as_usage(ValueError):
        if options.show:
            rows = options.show
            out = options.out or rows.parent
            return _shown(options, out, lambda: show_again(rows, out))
        settings = _grid(options)
        out = options.out or Path("runs/bench")
        put_aside(out)
    return _shown(options, out, lambda: bench(settings, out))


def _grid(options: _Options) -> GridSettings:
    """Return what ``mimose bench`` was asked to compare."""
    from mimose.bench.device import need_device
    from mimose.bench.grid.runner import GridSettings, raise_if_impossible
    from mimose.bench.grid.traces import from_file
    from mimose.bench.grid.workloads import workload_named

    if options.model and ":" not in options.model:
        msg = f"--model {options.model}: give it as module:function"
        raise UsageError(msg)
    chosen = options.workloads or ([] if options.model else _by_default(options))
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
            f"mimose bench: {settings.n_batches} of the {len(trace)} batches that were "
            f"given are used, the first: see --steps\n"
        )
    for name in workloads:
        raise_if_impossible(settings, name)
    return settings


def _strategies(chosen: Sequence[str] | None) -> tuple[str, ...]:
    """Return the strategies to compare, all by default, behind plain training."""
    from mimose.bench.grid.strategies import STRATEGIES

    strategies = tuple(dict.fromkeys(["none", *(chosen or STRATEGIES)]))
    unknown = [name for name in strategies if name not in STRATEGIES]
    if unknown:
        meant = [
            near
            for name in unknown
            for near in difflib.get_close_matches(name, STRATEGIES)
        ]
        advice = f"choose of {', '.join(STRATEGIES)}"
        if meant:
            advice = f"did you mean {', '.join(meant)}?"
        msg = f"no strategy is called {', '.join(unknown)}; {advice}"
        raise UsageError(msg)
    if not any(STRATEGIES[name].heeds_budget for name in strategies):
        msg = f"{', '.join(strategies)}: none of these heeds a budget; add mimose, say"
        raise UsageError(msg)
    return strategies


def _by_default(options: _Options) -> list[str]:
    """Return the workloads to run: with lengths given, those that they are for."""
    from mimose.bench.grid.traces import columns_of
    from mimose.bench.grid.workloads import DEFAULT, WORKLOADS

    if not options.lengths:
        return list(DEFAULT)
    given = columns_of(options.lengths)
    found = [name for name in DEFAULT if set(WORKLOADS[name].sizes) <= set(given)]
    if not found:
        msg = (
            f"{options.lengths} has columns {', '.join(given)}: no workload of the "
            f"default has these; name one with --workloads"
        )
        raise UsageError(msg)
    return found


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
    """Make a page of a run, and show its numbers.

    One HTML page from the records that mimose.attach(model, budget,
    record_to='records.jsonl') writes; the most important numbers are printed, and left
    as JSON beside the page. It needs nothing but a browser, and loads nothing.

    Examples:
      mimose report run/                      reads run/records.jsonl
      mimose report records.jsonl --out report.html
      mimose report records.jsonl --json | jq .budget_use
      mimose report records.jsonl --tensorboard board/

    Exit status:
      0    every step whose peak was read stayed within the budget
      1    a step went over it; the page is written all the same
      2    it cannot be done: wrong options, an unreadable file, a missing package
    """
    from mimose.report.headline import figures, headline, verdict
    from mimose.report.page import write_page

    if options.tensorboard is not None:
        need("tensorboard", "tensorboard")
    path, records = _read(options.records)
    page = options.out or path.with_suffix(".html")
    if not page.name:
        msg = f"cannot write {page}, a folder: give a file, such as --out page.html"
        raise UsageError(msg)
    files = {"page": page, "numbers": page.with_suffix(".numbers.json")}
    if path.resolve() in (page.resolve(), files["numbers"].resolve()):
        msg = f"{path} is the file of the records itself: give the page another name, "
        msg += f"such as --out {path.stem}-page.html"
        raise UsageError(msg)
    if options.tensorboard is not None:
        files["tensorboard"] = options.tensorboard
    numbers = headline(records)
    told = asdict(numbers) | {"files": {name: str(f) for name, f in files.items()}}
    with _told_as_usage():
        page.parent.mkdir(parents=True, exist_ok=True)
        write_page(records, page, title=f"mimose: {path}")
        files["numbers"].write_text(json.dumps(told) + "\n", encoding="utf-8")
        if options.tensorboard is not None:
            from mimose.report.metrics import write_scalars

            write_scalars(records, options.tensorboard)
    lines = [json.dumps(told)]
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
    """Return a run's file, given it or its folder, and the records in it."""
    from mimose.records import read_records

    if path.is_dir():
        path /= "records.jsonl"
        if not path.exists():
            msg = f"{path.parent} holds no {path.name}: give the file that "
            msg += "attach(record_to=...) wrote"
            raise UsageError(msg)
    try:
        with _told_as_usage(MimoseError):
            records = read_records(path)
    except UnicodeDecodeError as error:
        msg = f"cannot read {path}: it is no text"
        raise UsageError(msg) from error
    if not records:
        msg = f"{path} holds no step that was run to its end"
        raise UsageError(msg)
    return path, records


_DTYPES = ("float32", "bfloat16")
_SCALES = ("tiny", "small", "base")
_SHARES = (0.35, 0.5, 0.7)
_COMMON: tuple[_Option, ...] = (
    ("--seed", seed, 0, "of weights, order and what is drawn"),
    ("--threads", at_least_one, 2, "for torch"),
    ("--json", bool, None, "print JSON alone"),
)
_TRAINED: tuple[_Option, ...] = (
    ("--model MODULE:FUNCTION", None, None, "a model of your own; see above"),
    ("--device", None, "cpu", "such as cuda"),
    ("--dtype", _DTYPES, "float32", "that layers compute in; bfloat16 by autocast"),
)
_COMMANDS: dict[Callable[[_Options], int], tuple[_Option, ...]] = {
    _demo: (
        ("--steps", at_least_one, 100, "for each strategy"),
        *_COMMON,
        ("--out", Path, Path("runs/demo"), "folder for the files"),
    ),
    _advise: (
        *_TRAINED,
        ("--budget", None, None, "as of mimose.attach: 8GiB, 80%%, +400MiB"),
        ("--minutes", positive, 5.0, "that measuring may take"),
        ("--methods A,B", names, None, "which (default: all that can be)"),
        ("--list", bool, None, "name the methods, and end"),
        ("--optimizer", ("adamw", "sgd"), "adamw", "which"),
        *_COMMON,
        ("--show MEASURED.json", Path, None, "answer from readings that are there"),
        ("--out", Path, None, "folder (default: runs/advise, or that of --show)"),
    ),
    _bench: (
        ("--list", bool, None, "name workloads and strategies, and end"),
        ("--workloads A,B", names, None, "which (default: the paper's language tasks)"),
        ("--strategies A,B", names, None, "which (default: all)"),
        ("--budgets A,B", shares, _SHARES, "over 0 and up to 1; see above"),
        ("--steps", at_least_one, 60, "measured for each strategy and budget"),
        ("--warm-up", at_least_one, 12, "steps before them, apart"),
        ("--scale", _SCALES, "tiny", "of the models"),
        *_TRAINED,
        ("--lengths FILE.csv", Path, None, "your batches: sizes by column, one a line"),
        *_COMMON,
        ("--show ROWS.csv", Path, None, "run nothing: show rows that are there"),
        ("--out", Path, None, "folder (default: runs/bench, or that of --show)"),
    ),
    _report: (
        ("records", Path, None, "the file of records, or its folder"),
        ("--out PAGE", Path, None, "the page (default: beside the records, as .html)"),
        ("--json", bool, None, "print JSON alone"),
        ("--tensorboard DIR", Path, None, "write each step's numbers there as well"),
    ),
}


if __name__ == "__main__":
    sys.exit(main())
