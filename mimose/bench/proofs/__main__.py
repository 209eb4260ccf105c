"""The proofs' command line: ``python -m mimose.bench.proofs soak --steps 100``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mimose.bench.proofs.common import Settings, publish

PROOFS = (
    "check",
    "collection",
    "exact",
    "falls",
    "fragmentation",
    "hard",
    "held",
    "hostcost",
    "optimum",
    "plancost",
    "prediction",
    "settings",
    "soak",
    "stepcost",
    "tight",
    "trainer",
)

_RESULTS = Path("docs/results")


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask one question; return 1 if a bar was missed."""
    options = _parser().parse_args(arguments)
    device = getattr(options, "device", "cpu")
    settings = Settings(
        seed=options.seed,
        threads=options.threads,
        device=device,
        models=tuple(options.models or ()),
        out=options.out or _RESULTS / device.partition(":")[0],
    )
    answer = _proof(options.proof).ask(settings, options)
    publish(options.proof, answer, settings.out)
    return int(not all(bar.holds for bar in answer.bars))


def _proof(name: str) -> Any:
    return importlib.import_module(f"mimose.bench.proofs.{name}")


def _parser() -> argparse.ArgumentParser:
    defaults = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m mimose.bench.proofs",
        description="Measure whether the library keeps one of its promises.",
    )
    proofs = parser.add_subparsers(dest="proof", required=True)
    for name in PROOFS:
        module = _proof(name)
        own = proofs.add_parser(name, help=module.QUESTION, description=module.QUESTION)
        own.add_argument("--seed", type=int, default=defaults.seed)
        own.add_argument("--threads", type=int, default=defaults.threads)
        own.add_argument("--models", nargs="+", help="some of the zoo's only")
        own.add_argument("--out", type=Path, help=f"{_RESULTS}/DEVICE by default")
        module.add_options(own)
    return parser


if __name__ == "__main__":
    sys.exit(main())
