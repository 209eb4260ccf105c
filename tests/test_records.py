"""Records of steps: derived numbers, bounds, and the file."""

import json
from dataclasses import asdict
from resource import RLIMIT_FSIZE, getrlimit, setrlimit

import pytest

from mimose.exceptions import MimoseError
from mimose.records import Records, StepRecord, read_records


def _record(step=0, **fields):
    return StepRecord(
        **{
            "step": step,
            "shape": {"ids.1": 12},
            "phase": "plan",
            "actions": ("keep",),
            "budget_bytes": 1000,
            "start_bytes": 100,
            "predicted_peak_bytes": 350.0,
            **fields,
        }
    )


def test_what_is_dropped_stays_in_the_totals(monkeypatch):
    """A long run's sums are those of all its steps."""
    all_ = Records()
    monkeypatch.setattr("mimose.records._MOST_KEPT", 3)
    few = Records()
    for step in range(20):
        for records in (few, all_):
            record = _record(
                step,
                phase="collect" if step < 6 else "plan",
                observed_peak_bytes=950 + 10 * step,
                recomputed_flops=step,
                plan_seconds=0.25,
                retries=step % 2,
            )
            records.close(record)
    assert 3 == len(few)
    assert few.totals() == all_.totals() == few.totals()
    assert (20, 14, 15) == (
        few.totals().steps,
        few.totals().steps_over,
        few.totals().collected_flops,
    )


def test_closed_records_are_lines_of_json(tmp_path):
    """Records are appended, and can be read while the file is open."""
    path, record = (
        tmp_path / "records.jsonl",
        _record(7, reason="text", events=("a#0",)),
    )
    path.write_text('{"step": -1}\n')
    records = Records(path)
    records.close(record)
    first, line = path.read_text().splitlines()
    assert (-1, 7) == (json.loads(first)["step"], json.loads(line)["step"])
    (tmp_path / "one.jsonl").write_text(line)
    assert [record] == read_records(tmp_path / "one.jsonl")
    records.close_file()
    records.close_file()
    records.close(_record(8))
    assert 2 == len(path.read_text().splitlines())


def test_a_full_disk_ends_the_file_and_not_the_training(tmp_path, caplog):
    """It is said once; what was written is read."""
    path, (_, most) = tmp_path / "records.jsonl", getrlimit(RLIMIT_FSIZE)
    records = Records(path)
    records.close(_record(0))
    setrlimit(RLIMIT_FSIZE, (path.stat().st_size + 40, most))
    try:
        for step in range(1, 4):
            records.close(_record(step))
        records.close_file()
    finally:
        setrlimit(RLIMIT_FSIZE, (most, most))
    (said,) = caplog.messages
    assert "could not be written" in said
    assert 4 == records.totals().steps
    assert [0] == [record.step for record in read_records(path)]


def test_a_line_that_was_cut_short_is_left_out(tmp_path):
    """A killed run's last line may be half a line."""
    path = tmp_path / "records.jsonl"
    records = Records(path)
    records.close(_record(0))
    records.close_file()
    path.write_text(path.read_text() + '{"step": 1, "sha')
    assert [0] == [record.step for record in read_records(path)]


_WHOLE = asdict(_record())


@pytest.mark.parametrize(
    "line",
    [
        "text",
        '{"step": 1}',
        "[" * 100_000,
        *(
            json.dumps({**_WHOLE, name: value})
            for name, value in (
                ("budget_bytes", 0),
                ("shape", {"x.1": None}),
                ("observed_peak_bytes", "text"),
                ("phase", "text"),
                ("recomputed_flops", float("nan")),
                ("reason", None),
                ("actions", [["keep"]]),
                ("retries", 10**400),
            )
        ),
    ],
    ids=range(11),
)
def test_a_file_of_something_else(tmp_path, line):
    """The error names the line."""
    path = tmp_path / "other.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(MimoseError, match=r"other.jsonl, line 1: not a step's record"):
        read_records(path)
