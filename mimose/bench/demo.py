"""``mimose demo``: the same batches four ways, then under a hard memory limit.

The measuring is `mimose.bench.experiment`; here its results become a table, a picture,
a few sentences, and one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mimose.bench.corpus import encode_corpus, load_corpus
from mimose.bench.experiment import Experiment, ExperimentResult, ExperimentSettings
from mimose.bench.figure import draw
from mimose.bench.process import Runner, StrategyFailedError, StrategyProcess
from mimose.bench.rows import write_rows
from mimose.bench.summary import StrategySummary, summarise
from mimose.bench.tasks import LIMITED, STRATEGIES, Task
from mimose.usage import UsageError, need

if TYPE_CHECKING:
    from rich.table import Table

_INTERRUPTED = 130
_MIB = 2**20
_GIGA = 10**9
_DOING = {"probe": "finding the budget", "compare": "four ways", "limit": "hard limit"}


def demo(
    settings: ExperimentSettings,
    out: Path,
    launch: Callable[[Task], Runner] = StrategyProcess,
) -> int:
    """Run the demonstration, show its results and write them down.

    Args:
        settings: What to train.
        out: Folder for ``rows.csv``, ``demo.png`` and ``summary.json``.
        launch: Starts a strategy; in a process of its own, if nothing else is said.

    Returns:
        The exit status: 0; 1 where something failed that should not have; 130, as a
        shell expects, after Ctrl-C.

    Raises:
        UsageError: A package is missing, or the folder cannot be made.
    """
    need("bench", "matplotlib", "rich", "tokenizers", "transformers")
    try:  # before minutes of measuring, not behind them
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        msg = f"--out {out}: it cannot be a folder: {error.strerror}"
        raise UsageError(msg) from error
    result, status = _measure(settings, launch)
    _show(settings, result, out)
    unexpected = [key for key in result.failures if key != "limit/none"]
    return status or int(bool(unexpected))


def _measure(
    settings: ExperimentSettings, launch: Callable[[Task], Runner]
) -> tuple[ExperimentResult, int]:
    with tempfile.TemporaryDirectory() as folder, _progress(settings) as on_step:
        corpus = Path(folder) / "corpus.json"
        experiment = Experiment(settings, corpus, launch, on_step)
        status = 0
        try:
            encode_corpus(load_corpus(), settings.workload.max_tokens).save(corpus)
            experiment.run()
        except KeyboardInterrupt:
            status = _INTERRUPTED
        except StrategyFailedError as error:
            experiment.result.failures["probe/none"] = str(error)
    return experiment.result, status


@contextlib.contextmanager
def _progress(
    settings: ExperimentSettings,
) -> Iterator[Callable[[str, str, int], None]]:
    """Show one bar for everything; yield what moves it."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        total = 2 + (len(STRATEGIES) + len(LIMITED)) * settings.steps
        line = bar.add_task("reading the corpus", total=total)

        def on_step(run: str, strategy: str, step: int) -> None:
            bar.update(
                line,
                completed=_position(run, strategy, step, settings.steps),
                description=f"{_DOING[run]}, step {step + 1}: {strategy}",
            )

        yield on_step


def _position(run: str, strategy: str, step: int, steps: int) -> int:
    """Return how many steps lie before this one if nothing fails."""
    if run == "probe":
        return step
    if run == "compare":
        return 2 + len(STRATEGIES) * step + STRATEGIES.index(strategy)
    return 2 + (len(STRATEGIES) + LIMITED.index(strategy)) * steps + step


def _show(settings: ExperimentSettings, result: ExperimentResult, out: Path) -> None:
    """Write the files and print what they say; JSON is the last line."""
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False)
    files = {"rows": out / "rows.csv", "summary": out / "summary.json"}
    write_rows(files["rows"], result.rows)
    summaries = summarise(result.of("compare"))
    if not result.is_complete:
        console.print("Cut short: this is what was measured until then.")
    if summaries:
        files["picture"] = out / "demo.png"
        draw(files["rows"], files["picture"])
        console.print(_table(summaries))
    for sentence in _sentences(result, settings.steps):
        console.print(sentence, markup=False)
    console.print("\n".join(f"{name}: {path}" for name, path in files.items()))
    document = json.dumps(_as_json(result, summaries, files))
    files["summary"].write_text(f"{document}\n", encoding="utf-8")
    sys.stdout.write(f"{document}\n")


def _table(summaries: Sequence[StrategySummary]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("strategy", no_wrap=True)
    for title in (
        "growth\n(MiB)",
        "over\nbudget",
        "texts/s",
        "time",
        "redone\n(GFLOP)",
        "loss",
        "accuracy",
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for summary in summaries:
        table.add_row(*_cells(summary))
    return table


def _cells(summary: StrategySummary) -> tuple[str, ...]:
    return (
        summary.strategy,
        f"{summary.largest_growth_bytes / _MIB:.0f}",
        f"{summary.steps_over} of {summary.steps}",
        f"{summary.texts_per_second:.1f}",
        "" if summary.seconds_ratio is None else f"{summary.seconds_ratio:.2f}×",
        f"{summary.recomputed_flops / _GIGA:.0f}",
        f"{summary.loss:.4f}",
        "" if summary.accuracy is None else f"{summary.accuracy:.1%}",
    )


def _sentences(result: ExperimentResult, steps: int) -> Iterator[str]:
    """Say what the table means, and what the hard limit showed."""
    probe = result.of("probe")[-1:]
    if probe and result.budget_bytes is not None:
        room = result.budget_bytes - probe[0].start_bytes
        yield (
            f"Budget: {result.budget_bytes / _MIB:.0f} MiB resident, of which "
            f"{room / _MIB:.0f} MiB for the step's growth; plain training grows by "
            f"{probe[0].growth_bytes / _MIB:.0f} MiB on the longest batch."
        )
    for key, error in result.failures.items():
        if not key.startswith("limit/"):
            yield f"{key} failed: {error}"
    for strategy in LIMITED:
        taken = len([row for row in result.of("limit") if row.strategy == strategy])
        failure = result.failures.get(f"limit/{strategy}")
        if failure is not None:
            yield (
                f"Hard limit: {strategy} failed at step {taken + 1} of {steps}: "
                f"{failure}"
            )
        elif taken:
            verb = "finished" if taken == steps else "took"
            yield f"Hard limit: {strategy} {verb} {taken} of {steps} steps."


def _as_json(
    result: ExperimentResult,
    summaries: Sequence[StrategySummary],
    files: Mapping[str, Path],
) -> dict[str, Any]:
    limited = summarise(result.of("limit"))
    return {
        "is_complete": result.is_complete,
        "budget_bytes": result.budget_bytes,
        "strategies": [asdict(summary) for summary in summaries],
        "limit": [asdict(summary) for summary in limited],
        "failures": result.failures,
        "files": {name: str(path) for name, path in files.items()},
    }
