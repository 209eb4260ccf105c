"""The command line: ``mimose demo``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: What was written behind ``mimose``; None for the process's own.

    Returns:
        The process's exit status.
    """
    options = _parser().parse_args(arguments)
    return _demo(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mimose",
        description="Keep PyTorch training within a memory budget, with a plan for "
        "every input shape.",
    )
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    _add_demo(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="train the same batches four ways and show what each needs",
        description="Train the same batches of real text four ways (keep everything, "
        "recompute everything, one plan for the longest batch, mimose), then under a "
        "hard memory limit. Leaves a table, a picture and the rows behind them; the "
        "last line is JSON. Ctrl-C shows what there is so far.",
    )
    demo.add_argument(
        "--steps", type=_at_least_one, default=100, help="a strategy (default: 100)"
    )
    demo.add_argument("--seed", type=int, default=0, help="of weights, order, dropout")
    demo.add_argument(
        "--threads", type=_at_least_one, default=2, help="for torch (default: 2)"
    )
    demo.add_argument(
        "--out",
        type=Path,
        default=Path("runs/demo"),
        help="folder for rows.csv, demo.png and summary.json (default: runs/demo)",
    )


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        msg = f"must be at least 1, got {number}"
        raise argparse.ArgumentTypeError(msg)
    return number


def _demo(options: argparse.Namespace) -> int:
    from mimose.bench.experiment import ExperimentSettings
    from mimose.bench.tasks import Workload
    from mimose.demo import demo

    settings = ExperimentSettings(
        workload=Workload(seed=options.seed),
        steps=options.steps,
        threads=options.threads,
    )
    return demo(settings, options.out)


if __name__ == "__main__":
    sys.exit(main())
