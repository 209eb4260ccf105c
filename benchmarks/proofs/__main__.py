"""The proofs' command line: ``python -m benchmarks.proofs soak --steps 100``."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.proofs import common
from benchmarks.proofs.common import Settings
from mimose.bench import usage
from mimose.bench.device import SIM, kind_of, need_device

PROOFS = tuple(
    sorted(
        path.stem
        for path in Path(__file__).parent.glob("*.py")
        if "\nQUESTION = " in path.read_text(encoding="utf-8")
    )
)
"""The modules here that ask a question."""
_RESULTS = Path("docs/results")
_PROGRAM = "python -m benchmarks.proofs"
_UNUSABLE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask one question.

    Returns:
        1 if a bar was missed; 2 where it cannot be asked.
    """
    try:
        return _ask(_parser().parse_args(arguments))
    except usage.UsageError as error:
        sys.stderr.write(f"{_PROGRAM}: {error}\n")
        return _UNUSABLE


def _ask(options: argparse.Namespace) -> int:
    proof = _module(options.proof)
    device = getattr(options, "device", "cpu")
    if kind_of(device) != SIM:  # that is the child's to load
        need_device(device)
    settings = Settings(
        seed=options.seed,
        threads=options.threads,
        device=device,
        models=tuple(options.models or ()),
        out=options.out or _RESULTS / kind_of(device),
    )
    answer = proof.ask(settings, options)
    common.publish(options.proof, answer, settings.out)
    return int(not all(bar.holds for bar in answer.bars))


def _module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.proofs.{name}")


def _parser() -> argparse.ArgumentParser:
    defaults = Settings()
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Measure whether the library keeps one of its promises.",
    )
    proofs = parser.add_subparsers(dest="proof", required=True)
    for name in PROOFS:
        module = _module(name)
        own = proofs.add_parser(name, help=module.QUESTION, description=module.QUESTION)
        own.add_argument("--seed", type=usage.seed, default=defaults.seed)
        own.add_argument("--threads", type=usage.at_least_one, default=defaults.threads)
        own.add_argument("--models", nargs="+", help="some of the zoo's only")
        own.add_argument("--out", type=Path, help=f"{_RESULTS}/DEVICE by default")
        for option, how in module.OPTIONS:
            own.add_argument(option, **how)
        own.set_defaults(**getattr(module, "DEFAULTS", {}))
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C does
    sys.exit(main())
