"""Records of steps: derived numbers, bounds, and the file."""

import json
from dataclasses import asdict, replace

import pytest

from mimose.exceptions import MimoseError
from mimose.record_file import read_records
from mimose.records import Records, StepRecord


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


def test_what_is_not_kept_is_counted_as_recomputed():
    """Whatever an action is called that is not the first of the menu."""
    record = _record(actions=("keep", "recompute", "keep", "another", "recompute"))
    assert 3 == record.n_recomputed


def test_growths_are_over_the_start():
    """Predicted and observed growth leave out what was held before."""
    record = _record(observed_peak_bytes=400)
    assert (250.0, 300) == (
        record.predicted_growth_bytes,
        record.observed_growth_bytes,
    )


def test_unknown_peaks_have_no_growth():
    """Where no peak was predicted or observed, there is no growth either."""
    record = _record(predicted_peak_bytes=None)
    assert record.predicted_growth_bytes is None
    assert record.observed_growth_bytes is None


def test_the_oldest_records_go():
    """Only so many are kept, the last ones."""
    records = Records(3)
    for step in range(5):
        records.put(_record(step))
    assert [2, 3, 4] == [record.step for record in records]


def test_what_is_dropped_stays_in_the_totals():
    """A long run's sums are those of all its steps."""
    few, all_ = Records(3), Records(50)
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
            records.put(record)
            records.close(record)
    assert few.totals() == all_.totals() == few.totals()
    assert (20, 14, 15) == (
        few.totals().steps,
        few.totals().steps_over,
        few.totals().collected_flops,
    )


def test_a_step_that_ends_after_it_was_dropped_counts_whole():
    """Several forwards before one backward, and few records."""
    records = Records(1)
    first = _record(0)
    records.put(first)
    records.put(_record(1))
    first = replace(first, recomputed_flops=7)
    records.close(first)
    assert (2, 7) == (records.totals().steps, records.totals().recomputed_flops)


def test_equal_parts_of_records_are_one_object():
    """A shape that comes again takes no memory of its own."""
    records = Records(10)
    for step in range(4):
        length = str(12 + step % 2)  # made anew each time
        record = _record(
            step, shape={"ids.1": int(length)}, actions=("keep", *("recompute",) * 2)
        )
        names = tuple(f"layer.{i}#0" for i in range(int(length)))
        record = replace(record, events=names)
        records.put(record)
        records.close(record)
    first, second, again, _ = records
    assert first.shape is again.shape
    assert first.shape is not second.shape
    assert first.actions is second.actions
    assert first.events is again.events


def test_a_folder_that_is_not_there_is_made(tmp_path):
    """A run does not end at its first line because of a missing folder."""
    path = tmp_path / "runs" / "today" / "records.jsonl"
    records = Records(3, path)
    records.close(_record())
    records.close_file()
    assert 1 == len(read_records(path))


def test_closed_records_are_lines_of_json(tmp_path):
    """Records are appended, and can be read while the file is open."""
    path = tmp_path / "records.jsonl"
    path.write_text('{"step": -1}\n')
    records = Records(3, path)
    records.close(_record(7, observed_peak_bytes=400, reason="text"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [-1, 7] == [line["step"] for line in lines]
    assert ({"ids.1": 12}, ["keep"], 400, "text") == tuple(
        lines[1][name] for name in ("shape", "actions", "observed_peak_bytes", "reason")
    )
    records.close_file()
    records.close_file()
    records.close(_record(8))
    assert 2 == len(path.read_text().splitlines())


def test_a_file_that_cannot_be_opened(tmp_path):
    """A folder is no file to append to."""
    with pytest.raises(OSError, match=tmp_path.name):
        Records(3, tmp_path)


def test_records_are_read_back(tmp_path):
    """What was written is read again, the events filled in."""
    path = tmp_path / "records.jsonl"
    events = ("a#0", "b#0")
    written = [_record(step, events=events, actions=("keep",) * 2) for step in range(3)]
    records = Records(3, path)
    for record in written:
        records.close(record)
    records.close_file()
    assert written == read_records(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [list(events), [], []] == [line["events"] for line in lines]


def test_a_line_that_was_cut_short_is_left_out(tmp_path):
    """A killed run's last line may be half a line."""
    path = tmp_path / "records.jsonl"
    records = Records(3, path)
    records.close(_record(0))
    records.close_file()
    path.write_text(path.read_text() + '{"step": 1, "sha')
    assert [0] == [record.step for record in read_records(path)]


def test_a_killed_run_that_is_appended_to(tmp_path, caplog):
    """The half line is left out, with a warning, and the new run's first is whole."""
    path = tmp_path / "records.jsonl"
    path.write_text('{"step": 1, "sha')
    records = Records(3, path)
    records.close(_record(7))
    records.close_file()
    assert [7] == [record.step for record in read_records(path)]
    assert "1 broken lines" in caplog.text


def test_numbers_that_are_none(tmp_path):
    """What is not a finite number was not measured."""
    path = tmp_path / "records.jsonl"
    records = Records(3, path)
    records.close(_record(predicted_peak_bytes=float("nan"), seconds=float("inf")))
    records.close_file()
    (record,) = read_records(path)
    assert (None, None) == (record.predicted_peak_bytes, record.seconds)


_WHOLE = asdict(_record())


@pytest.mark.parametrize(
    "line",
    [
        "text",
        "[1]",
        '{"step": 1}',
        "null",
        "[" * 100_000,
        *(
            json.dumps({**_WHOLE, name: value})
            for name, value in (
                ("budget_bytes", 0),
                ("actions", None),
                ("shape", [1]),
                ("shape", {"x.1": None}),
                ("observed_peak_bytes", "text"),
                ("step", None),
                ("phase", "text"),
                ("retries", None),
                ("plan_seconds", None),
                ("cache_hit", None),
                ("recomputed_flops", float("nan")),
                ("reason", 5),
                ("reason", None),
                ("actions", [["keep"]]),
                ("events", [1]),
                ("retries", 10**400),
                ("observed_peak_bytes", 10**400),
            )
        ),
    ],
    ids=range(22),
)
def test_a_file_of_something_else(tmp_path, line):
    """The error names the line."""
    path = tmp_path / "other.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(MimoseError, match=r"other.jsonl, line 1: not a step's record"):
        read_records(path)


def test_an_empty_file_does_not_stay(tmp_path):
    """A session that is refused, or runs no step, leaves no file of its own."""
    new, old = tmp_path / "new.jsonl", tmp_path / "old.jsonl"
    old.touch()
    for path in (new, old):
        records = Records(3, path)
        assert path.exists()
        records.close_file()
        records.close_file()

    assert (False, True) == (new.exists(), old.exists())


def test_a_file_that_somebody_removed_is_not_missed(tmp_path):
    """Closing is harmless then."""
    path = tmp_path / "records.jsonl"
    records = Records(3, path)
    path.unlink()
    records.close_file()
