"""The command line: ``mimose demo``, ``bench``, ``advise`` and ``report``.

Here it is read; what the commands do is in `mimose.cli.commands`. Another command is a
function there, and an ``_add`` function here that names it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from mimose.cli import commands
from mimose.usage import UsageError, at_least_one, names, positive, seed, shares

Commands: TypeAlias = "argparse._SubParsersAction[_Parser]"

_STATUS = """\
exit status:
  0  all went well
  1  what was run failed, or did not hold
"""
_UNUSABLE = """\
  2  it cannot be done: wrong options, an unreadable file, a missing package
"""


class _Parser(argparse.ArgumentParser):
    """Tells what is wrong in one line, not behind a list of all options."""

    def __init__(self, **texts: Any) -> None:
        keeps_lines = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=keeps_lines, **texts)

    def error(self, message: str) -> NoReturn:
        """Write the message, and end."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: What was written behind ``mimose``; None for the process's own.

    Returns:
        The process's exit status: 0; 1 where what was run failed or did not hold; 2
        where it cannot be done, as for wrong options; 141, as a shell says it, where
        nobody read on.
    """
    try:
        status = _run(arguments)
    except BrokenPipeError:
        commands.forget_output()
        status = commands.UNREAD
    finally:
        commands.flush_output()
    return status


def _run(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    try:
        status: int = options.do(options)
    except UsageError as error:
        sys.stderr.write(f"mimose {options.command}: {error}\n")
        status = commands.UNUSABLE
    return status


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mimose",
        description="Keep PyTorch training within a memory budget, with a plan for "
        "every\ninput shape.",
        epilog="examples:\n"
        "  mimose demo                        see what it does, on this machine\n"
        "  mimose advise --model mine:make --budget 8GiB\n"
        "                                     does saving memory pay for your model?\n"
        "  mimose bench --list                what can be compared\n"
        "  mimose report run/records.jsonl    see what it did in a run of yours\n\n"
        "mimose COMMAND --help tells more.\n\n" + _STATUS + _UNUSABLE,
    )
    parser.add_argument("--version", action="version", version=f"mimose {_version()}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_demo(subparsers)
    _add_advise(subparsers)
    _add_bench(subparsers)
    _add_report(subparsers)
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("mimose")
    except importlib.metadata.PackageNotFoundError:
        return "(a checkout that is not installed)"


def _add_demo(subparsers: Commands) -> None:
    demo = subparsers.add_parser(
        "demo",
        help="train the same batches four ways and show what each needs",
        description="Train the same batches of real text four ways (keep everything, "
        "recompute\neverything, one plan for the longest batch, mimose), then under a "
        "hard memory\nlimit. Leaves a table, a picture and the rows behind them. "
        "Ctrl-C shows what\nthere is so far.",
        epilog="examples:\n"
        "  mimose demo\n"
        "  mimose demo --steps 20 --out elsewhere\n\n"
        "exit status:\n"
        "  0    all went well\n"
        "  1    a strategy failed that should not have\n"
        + _UNUSABLE
        + "  130  Ctrl-C\n",
    )
    demo.add_argument(
        "--steps",
        type=at_least_one,
        default=100,
        help="for each strategy (default: 100)",
    )
    demo.add_argument("--seed", type=seed, default=0, help="of weights, order, dropout")
    _add_threads(demo)
    demo.add_argument(
        "--out",
        type=Path,
        default=Path("runs/demo"),
        help="folder for rows.csv, demo.png and summary.json (default: runs/demo)",
    )
    demo.set_defaults(do=commands.demo)


def _add_advise(subparsers: Commands) -> None:
    advise = subparsers.add_parser(
        "advise",
        help="tell whether saving memory pays for a model, and with which method",
        description="Does saving memory pay for your model at a budget, and with which "
        "method? Plain\ntraining and each method are measured at a few batch sizes, in "
        "processes of their\nown that take turns: bytes, then seconds. Says what each "
        "does to the largest\nbatch, the longest input and throughput, and what it "
        "cannot say. Leaves a page,\nthe answer as JSON and the readings, from which "
        "--show answers for another budget.\nCtrl-C keeps what was measured.",
        epilog="examples:\n"
        "  mimose advise --model mypackage.train:make --budget 8GiB\n"
        "  mimose advise --model mypackage.train:make --budget 80% --device cuda\n"
        "  mimose advise --model mypackage.train:make --budget +2GiB --minutes 10 \\\n"
        "    --lengths mine.csv\n"
        "  mimose advise --show runs/advise/measured.json --budget 6GiB\n\n"
        "MODULE:FUNCTION takes nothing and returns (model, sample): the model on the "
        "CPU, and\none batch as it is called with: keyword arguments as a mapping, "
        "arguments as a tuple,\nor the one tensor. Batches of other sizes repeat its "
        "rows and tokens.\n\n"
        "exit status:\n"
        "  0    all went well\n" + _UNUSABLE + "  130  Ctrl-C\n",
    )
    advise.add_argument(
        "--model", metavar="MODULE:FUNCTION", help="what is to be trained; see below"
    )
    advise.add_argument(
        "--budget",
        help="the memory that training may use, as mimose.attach takes it: 8GiB, 80%%, "
        "+400MiB (with --show: default the one that was measured)",
    )
    advise.add_argument(
        "--minutes",
        type=positive,
        default=5.0,
        help="that measuring may take (default: 5)",
    )
    advise.add_argument(
        "--methods", type=names, metavar="A,B", help="which (default: all that can be)"
    )
    advise.add_argument("--list", action="store_true", help="name the methods, and end")
    advise.add_argument("--device", default="cpu", help="such as cuda (default: cpu)")
    advise.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    advise.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    advise.add_argument("--seed", type=seed, default=0, help="of weights and turns")
    _add_threads(advise)
    _add_lengths(advise, texts=None, default="as many as the sample has")
    advise.add_argument(
        "--show",
        type=Path,
        metavar="MEASURED.json",
        help="measure nothing: answer from the readings of a run that is over",
    )
    advise.add_argument(
        "--json", action="store_true", help="print the answer as JSON alone"
    )
    advise.add_argument(
        "--out",
        type=Path,
        help="folder for the files (default: runs/advise; that of --show)",
    )
    advise.set_defaults(do=commands.advise, default_of=advise.get_default)


def _add_bench(subparsers: Commands) -> None:
    bench = subparsers.add_parser(
        "bench",
        help="compare memory strategies on variable-size data, at several budgets",
        description="Which memory strategy should a model be trained with, at a "
        "budget? Every strategy\ntrains on the same batches from the same weights, in "
        "a process of its own; they\ntake turns. Peaks are physical, recomputation is "
        "counted. Leaves the rows, a\npicture and a summary. Ctrl-C keeps the steps "
        "that ran.",
        epilog="examples:\n"
        "  mimose bench --list\n"
        "  mimose bench --workloads qa-bert --strategies none,full,static,mimose\n"
        "  mimose bench --workloads tc-bert --lengths mine.csv --budgets 0.3,0.6\n"
        "  mimose bench --model mypackage.models:small_one --lengths mine.csv\n"
        "  mimose bench --resume --out runs/bench\n"
        "  mimose bench --show runs/bench/rows.csv\n\n"
        "exit status:\n"
        "  0    all went well\n"
        "  1    a workload could not be run\n" + _UNUSABLE + "  130  Ctrl-C\n",
    )
    bench.add_argument(
        "--list", action="store_true", help="name workloads and strategies, and end"
    )
    bench.add_argument(
        "--workloads",
        type=names,
        metavar="A,B",
        help="which (default: the Mimose paper's four language tasks)",
    )
    bench.add_argument(
        "--strategies", type=names, metavar="A,B", help="which (default: all)"
    )
    bench.add_argument(
        "--budgets",
        type=shares,
        default=(0.35, 0.5, 0.7),
        metavar="A,B",
        help="over 0, what the longest batch needs when everything is recomputed, "
        "up to 1, when everything is kept (default: 0.35,0.5,0.7)",
    )
    bench.add_argument(
        "--steps",
        type=at_least_one,
        default=60,
        help="measured for each strategy and budget (default: 60)",
    )
    bench.add_argument(
        "--warm-up",
        type=at_least_one,
        default=12,
        help="steps before them, told apart (default: 12)",
    )
    bench.add_argument(
        "--scale",
        choices=("tiny", "small", "base"),
        default="tiny",
        help="of the models",
    )
    bench.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="a model of your own: a function that returns (model, make_batch, names "
        "of sizes); needs --lengths or --dataset",
    )
    _add_lengths(bench)
    bench.add_argument("--device", default="cpu", help="such as cuda (default: cpu)")
    bench.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    bench.add_argument("--seed", type=seed, default=0, help="of weights and batches")
    _add_threads(bench)
    bench.add_argument(
        "--resume",
        action="store_true",
        help="leave out workloads that a run with the same settings has done",
    )
    bench.add_argument(
        "--out",
        type=Path,
        help="folder for the files (default: runs/bench; that of the rows with --show)",
    )
    bench.add_argument(
        "--show",
        type=Path,
        metavar="ROWS.csv",
        help="run nothing: show the rows of a run that is over",
    )
    bench.set_defaults(do=commands.bench)


def _add_lengths(parser: _Parser, texts: int | None = 8, default: str = "8") -> None:
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE.csv",
        help="sizes of your own batches: a column for each size, a line for each batch",
    )
    lengths.add_argument(
        "--dataset",
        metavar="NAME",
        help="lengths of a data set's texts: a csv, json, jsonl, parquet or txt file, "
        "or a name that datasets knows",
    )
    parser.add_argument(
        "--column", default="text", help="of the data set (default: text)"
    )
    parser.add_argument(
        "--texts",
        type=at_least_one,
        default=texts,
        help="of the data set whose longest gives a batch its length (default: "
        f"{default})",
    )
    parser.add_argument(
        "--longest",
        type=at_least_one,
        default=512,
        help="tokens, to which the data set's texts are cut (default: 512)",
    )


def _add_threads(parser: _Parser) -> None:
    parser.add_argument(
        "--threads", type=at_least_one, default=2, help="for torch (default: 2)"
    )


def _add_report(subparsers: Commands) -> None:
    report = subparsers.add_parser(
        "report",
        help="make a page of a run, and show its numbers",
        description="Make one HTML page of a run from its records, which "
        "mimose.attach(model, budget,\nrecord_to='records.jsonl') writes, and print "
        "the most important numbers. The page\nneeds nothing but a browser, and loads "
        "nothing from anywhere.",
        epilog="examples:\n"
        "  mimose report run/                      reads run/records.jsonl\n"
        "  mimose report records.jsonl --out report.html\n"
        "  mimose report records.jsonl --json | jq .budget_use\n"
        "  mimose report records.jsonl --tensorboard board/\n\n"
        "exit status:\n"
        "  0  every step whose peak was read stayed within the budget\n"
        "  1  a step went over it; the page is written all the same\n" + _UNUSABLE,
    )
    report.add_argument(
        "records",
        metavar="RUN",
        type=Path,
        help="the file of records, or the folder that holds it as records.jsonl",
    )
    report.add_argument(
        "--out",
        type=Path,
        metavar="PAGE",
        help="where to write the page (default: beside the records, as .html)",
    )
    report.add_argument(
        "--json",
        action="store_true",
        help="print the numbers as one JSON object in place of the table",
    )
    report.add_argument(
        "--tensorboard",
        type=Path,
        metavar="DIR",
        help="also write each step's numbers there, for tensorboard --logdir DIR",
    )
    report.set_defaults(do=commands.report)


if __name__ == "__main__":
    sys.exit(main())
