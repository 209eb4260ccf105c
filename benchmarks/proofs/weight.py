"""What does the library itself hold of the memory that it is there to save?

A small model is trained in a process of its own, without and with a session. The
resident set is read before the session is made, after it, and after some steps. In
these a session's process grows less, for on a CPU freed blocks go back to the system at
once. A BERT brings transformers, and with it SciPy; the blocks bring torch alone. An
optimizer, which is made before, brings ``torch.compile`` and with it SymPy.

    python -m benchmarks.proofs weight
    python -m benchmarks.proofs weight --models bert --repeats 1
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.proofs.common import Answer, Bar, Settings, count, progress
from benchmarks.proofs.models import names_of
from benchmarks.proofs.numbers import MIB
from mimose.bench.machine import worker_environment
from mimose.bench.rows import Row

QUESTION = "What does the library itself hold, before it saves anything?"
OPTIONS = (count("--repeats", 3),)

_MODELS = ("bert", "blocks")
_STEPS = (1, 10, 30)
"""After how many steps the resident set is read."""
_MOST_MIB = 30.0
_HEAVY = ("pandas", "scipy", "sklearn", "sympy")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightRow(Row):
    """One reading."""

    model: str
    has_session: bool
    repeat: int
    at: str
    """``attach``, or ``step`` and how many were done."""
    added_bytes: int
    """Resident set now, less that of the process with its model, before `attach`."""
    loaded: str
    """Heavy packages that came with the session or later, by name."""


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Read each model's process without and with a session, by turns."""
    rows: list[WeightRow] = []
    for model in names_of(_MODELS, settings.models):
        for repeat in range(options.repeats):
            for has_session in (False, True):
                rows += [
                    WeightRow(
                        model=model,
                        has_session=has_session,
                        repeat=repeat,
                        **reading,
                        **settings.provenance(),
                    )
                    for reading in _run(model, has_session, settings)
                ]
        progress(f"weight: {model}")
    table = _summarise(rows)
    return Answer(rows=[*rows], table=[*table], bars=list(_judge(table)))


def _run(model: str, has_session: bool, settings: Settings) -> list[dict[str, Any]]:
    task = [model, str(int(has_session)), str(settings.seed)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.proofs.weight", *task],
        env=worker_environment(settings.threads),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def _summarise(rows: Sequence[WeightRow]) -> list[dict[str, Any]]:
    table = []
    for model, at in dict.fromkeys((row.model, row.at) for row in rows):
        own = [row for row in rows if (row.model, row.at) == (model, at)]
        without, with_session = (
            statistics.median(r.added_bytes for r in own if r.has_session == has) / MIB
            for has in (False, True)
        )
        loaded = {r.loaded for r in own if r.has_session}
        table.append(
            {
                "model": model,
                "at": at,
                "without MiB": without,
                "with MiB": with_session,
                "loaded": " ".join(sorted(loaded)),
            }
        )
    return table


def _judge(table: Sequence[dict[str, Any]]) -> Iterator[Bar]:
    for line in table:
        if line["at"] == "attach":
            what = f"{line['model']}: MiB that attach adds"
            yield Bar(what, line["with MiB"] - line["without MiB"], _MOST_MIB)


def _work(model_name: str, has_session: bool, seed: int) -> None:
    """Train, and print what the process holds more than before `attach`.

    Nothing of the library is imported that `attach` does not import.
    """
    import torch

    torch.manual_seed(seed)
    model, batch = _bert() if model_name == "bert" else _blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before, loaded = resident_bytes(), set(sys.modules)

    def tell(at: str) -> None:
        new = [m for m in _HEAVY if m in sys.modules and m not in loaded]
        said = {"at": at, "added_bytes": resident_bytes() - before}
        sys.stdout.write(json.dumps({**said, "loaded": " ".join(new)}) + "\n")

    if has_session:
        import mimose

        mimose.attach(model, budget="+1GiB")
    tell("attach")
    lengths = torch.randint(16, 128, (max(_STEPS),)).tolist()
    for n_done, length in enumerate(lengths, start=1):
        model(**batch(length))[0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if n_done in _STEPS:
            tell(f"step {n_done}")


def _bert() -> tuple[Any, Any]:
    import torch
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=1000,
        hidden_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=512,
        use_cache=False,
    )

    def batch(length: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.randint(0, 1000, (4, length))}

    return BertModel(config).train(), batch


def _blocks() -> tuple[Any, Any]:
    import torch
    from torch import nn

    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(128, 4, 512, batch_first=True), num_layers=6
    )
    return encoder, lambda length: {"src": torch.randn(4, length, 128)}


def resident_bytes() -> int:
    """Return the process's resident set."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    _work(sys.argv[1], bool(int(sys.argv[2])), int(sys.argv[3]))
