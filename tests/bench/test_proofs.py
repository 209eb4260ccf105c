"""What the proofs print and write is what was measured."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks.proofs import common, models, numbers, soak
from benchmarks.proofs.__main__ import PROOFS, main
from benchmarks.proofs.common import Answer, Bar, Settings
from mimose.usage import UsageError


def _row(settings: Settings, **changes: object) -> soak.SoakRow:
    fields = {
        "model": "bert",
        "is_limited": False,
        "is_expandable": False,
        "step": 7,
        "sizes": "{}",
        "is_seen": True,
        "keep_all_growth_bytes": 150.0,
        "phase": "plan",
        "budget_bytes": 1100,
        "start_bytes": 1000,
        "peak_bytes": 1090,
        "observed_growth_bytes": 88,
        "predicted_growth_bytes": 80.0,
        "margin": 0.01,
        "cache_hit": True,
        "plan_seconds": 0.0,
        "seconds": 0.1,
        "recomputed_flops": 5,
        "retries": 0,
        "reason": "",
        "requested_peak_bytes": None,
        "alloc_retries": None,
        "fragmentation": None,
        "flushes": None,
        **changes,
    }
    return soak.SoakRow(**fields, **settings.provenance())


@pytest.mark.parametrize(
    ("bar", "expected"),
    [
        (Bar("over", 0, 0), True),
        (Bar("over", 1, 0), False),
        (Bar("planned", 0.8, at_least=0.8, is_share=True), True),
        (Bar("planned", 0.79, at_least=0.8, is_share=True), False),
        (Bar("planned", None, at_least=0.8), False),
    ],
)
def test_bar_holds(bar: Bar, expected: bool) -> None:
    """A bar is met at its very limit, and missed where nothing was measured."""
    assert expected == bar.holds
    assert ("holds" if expected else "MISSED") == str(bar).split()[0]


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1.0), (0.5, 2.0), (0.75, 3.0), (0.99, 4.0)]
)
def test_quantile_is_a_value_that_occurred(share: float, expected: float) -> None:
    """A percentile of few values is never flattered by interpolation."""
    assert expected == numbers.quantile([4.0, 2.0, 1.0, 3.0], share)


def test_quantile_of_nothing() -> None:
    """Nothing has no percentile."""
    assert numbers.quantile([], 0.5) is None


def test_publish(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows go to a CSV file, measurements first; the last line is the document."""
    answer = Answer(
        rows=[_row(Settings())],
        table=[{"model": "bert", "use": 0.123456}],
        bars=[Bar("over", 1, 0)],
        notes=["a note"],
    )

    common.publish("soak", answer, tmp_path)

    lines = capsys.readouterr().out.splitlines()
    document = json.loads(lines[-1])
    with (tmp_path / "soak.csv").open(encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert ["model", "bert"] == [line.split()[0] for line in lines[:2]]
    assert (False, 1) == (document["holds"], document["bars"][0]["value"])
    assert ("bert", "7", "") == (row["model"], row["step"], row["reason"])
    assert row["torch"] and row["device"] and row["date"]


def test_soak_row_reads_itself() -> None:
    """Growth is judged against what the budget left, errors against predictions."""
    row = _row(Settings())

    assert (True, False) == (row.needs_plan, row.is_over)
    assert pytest.approx(0.9) == row.use
    assert pytest.approx(0.1) == row.error


def test_sizes_are_drawn_within_a_part() -> None:
    """Sizes keep to their multiple and to the part of the range that was asked for."""
    torch = pytest.importorskip("torch")
    spec = models.ModelSpec(
        model="vit", sizes={"batch": (2, 3), "height": (32, 320)}, multiple=32
    )
    generator = torch.Generator().manual_seed(0)

    drawn = [spec.draw(generator, 0.0, 0.5) for _ in range(50)]

    assert {32, 64, 96, 128, 160} >= {sizes["height"] for sizes in drawn}
    assert {2, 3} >= {sizes["batch"] for sizes in drawn}


def test_unknown_model() -> None:
    """The error names the models that there are."""
    with pytest.raises(UsageError, match=r"--models lstm: choose among bert"):
        models.names_of(["bert"], ["lstm"])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["soak", "--models", "lstm"], "--models lstm: choose among bert"),
        (["hostcost", "--models", "lstm"], "--models lstm: choose among deep"),
        (["exact", "--device", "abacus"], "--device abacus: torch knows no such"),
        (["soak", "--expandable"], "--expandable is about an accelerator"),
    ],
)
def test_what_cannot_be_asked(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line and exit status 2, before anything is measured."""
    assert main([*arguments, "--out", str(tmp_path)]) == 2

    error = capsys.readouterr().err
    assert error.startswith(f"python -m benchmarks.proofs: {complaint}")
    assert 1 == error.count("\n")
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("held", "transformers", "bench"),
        ("hard", "peft", "dev"),
        ("trainer", "accelerate", "transformers"),
        ("plancost", "matplotlib", "bench"),
    ],
)
def test_a_package_that_a_proof_lacks(
    name: str,
    package: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The error is the command that helps."""
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda found: None if found == package else found
    )

    assert main([name]) == 2
    said = capsys.readouterr().err
    assert f"{package} is missing: pip install 'mimose[{extra}]'\n" in said


@pytest.mark.parametrize("name", PROOFS)
@pytest.mark.parametrize("option", ["--seed", "--threads", "--steps", "--pairs"])
def test_numbers_are_asked_for_in_words(
    name: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An option that is no number says what it has to be, and names no function."""
    with pytest.raises(SystemExit, match="2"):
        main([name, option, "x"])

    said = capsys.readouterr().err
    assert (
        "must be a whole number" in said or f"unrecognized arguments: {option}" in said
    )


@pytest.mark.parametrize("name", PROOFS)
def test_every_proof_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each proof says its question."""
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])

    assert "?" in capsys.readouterr().out


def test_a_walls_own_retries_count_for_nothing() -> None:
    """Behind it the allocator may give free blocks back; memory may not run out."""
    settings = Settings(device="sim")
    free = _row(settings, alloc_retries=3)
    behind = _row(settings, is_limited=True, alloc_retries=3)
    failed = _row(settings, is_limited=True, retries=1)
    assert not soak._retries_bar([free]).holds
    assert soak._retries_bar([behind]).holds
    assert not soak._retries_bar([behind, failed]).holds
