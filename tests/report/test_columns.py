"""Text of any width, and the session's report in it."""

from __future__ import annotations

import pytest

import mimose
from mimose.records import TRIED, StepRecord, Summary, kind_of
from mimose.report.columns import named, table, terminal_width, wrapped
from mimose.report.text import report

MIB = 2**20


def _records(n_steps, n_shapes, **changes):
    """Make planned steps of a model with long names."""
    return [
        StepRecord(
            **{
                "step": i,
                "shape": {
                    "attention_mask.1": 20 + i % n_shapes,
                    "labels.1": 5 + i % n_shapes,
                },
                "phase": "plan",
                "actions": ("recompute", *["keep"] * 23),
                "budget_bytes": 3 * 2**30,
                "start_bytes": 300 * MIB,
                "predicted_peak_bytes": 505.5 * MIB,
                "observed_peak_bytes": (305 + i % n_shapes) * MIB,
                "reason": f"forward of encoder.layer.0#0: {i} is beyond 40, the most",
                **changes,
            }
        )
        for i in range(n_steps)
    ]


def _summary(records):
    return Summary(
        steps=len(records),
        phases={"collect": 9, "step_down": 2, "plan": 98_000, "fallback": 3},
        steps_over=0,
        budget_bytes=3 * 2**30,
        peak_bytes=510 * MIB,
        units=24,
        shapes=700,
        cache_hits=99_000,
        cache_misses=1000,
        margin=0.01,
        error_p50=0.4,
        error_p99=1.01,
        recomputed_flops=10**12,
        collected_flops=10**10,
        plan_seconds=12.5,
        retries=3,
        kept_units={"encoder.layer.3": "it returned something else when run again"},
        inexact_units={"bert.encoder.layer.4": "its kernels are not deterministic"},
        fragmentation=1.2,
        flushes=4,
    )


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize(("n_steps", "n_shapes"), [(1, 1), (30, 3), (5000, 700)])
def test_a_report_fits_its_width(n_steps, n_shapes, width):
    """No line is longer, and every shape's peak is there."""
    records = _records(n_steps, n_shapes)
    text = report(_summary(records), records, width)
    assert max(map(len, text.splitlines())) <= width
    told = " ".join(text.split())
    highest = 304 + min(n_steps, n_shapes)
    assert f"{highest}.0 MiB" in told
    assert "1/24" in told
    assert "it returned something else when run again" in told
    assert len(text.splitlines()) < 70


def test_a_narrow_table_keeps_what_matters():
    """Shape, how much is recomputed and the peak are there at any width."""
    records = _records(30, 3)
    narrow, wide = (report(_summary(records), records, width) for width in (40, 80))
    assert "  shape   steps  recomputed   observed\n  22 × 7     10" in narrow
    assert "  phase  recomputed  predicted   observed\n" in wide


def test_a_report_counts_like_remarks_together():
    """Remarks that differ in numbers alone are one line."""
    records = _records(500, 3)
    text = report(_summary(records), records, 200)
    said = "500 × forward of encoder.layer.0#0: 499 is beyond 40, the most"
    assert f"  {said} (numbers differ)\n" in text
    assert "# is beyond #" == kind_of("1,180 is beyond 4.5")


def test_steps_that_try_actions_share_a_line():
    """It names all that they tried; others that differ in numbers share theirs."""
    tried = ("lean", "pool, pool4", "lean, quantize4", "lean")
    reasons = [
        *(f"{names} {TRIED}" for names in tried),
        "7 is beyond 5",
        "8 is beyond 5",
    ]
    records = [record for why in reasons for record in _records(1, 1, reason=why)]
    text = report(_summary(records), records, 120)
    _, listed = text.split("Steps out of the ordinary\n")
    assert [
        f"4 × lean, pool, pool4, quantize4 {TRIED}",
        "2 × 8 is beyond 5 (numbers differ)",
    ] == [line.strip() for line in listed.splitlines()[:2]]
    assert "not shown" not in listed


def test_a_first_step_is_of_the_shape_it_turns_out_to_have():
    """Sizes that never varied afterwards make no shape of their own."""
    first = {"ids.0": 4, "attention_mask.1": 20, "labels.1": 5}
    records = [*_records(1, 1, shape=first), *_records(5, 1)]
    lines = report(_summary(records), records, 80).splitlines()
    (title,) = [i for i, line in enumerate(lines) if line.startswith("Peaks")]
    assert ["20", "×", "5", "6"] == lines[title + 2].split()[:4]
    assert "" == lines[title + 3]


def _rows_of_shapes(records):
    """Return the title of the table of shapes, and its rows' shapes and steps."""
    lines = report(_summary(records), records, 100).splitlines()
    (title,) = [i for i, line in enumerate(lines) if line.startswith("Peaks")]
    rows = lines[title + 2 : lines.index("", title)]
    return lines[title], [" ".join(row.split("  ")[1:3]).strip() for row in rows]


def test_a_size_that_no_record_tells_is_not_shown():
    """Where the first record is not kept, nobody knows what was not named then."""
    sizes = [{"x.1": 8}, {"x.1": 9}, {"x.1": 8}, {"x.0": 3, "x.1": 8}]
    records = [_records(1, 1, shape=shape)[0] for shape in sizes]
    title, rows = _rows_of_shapes(records)
    assert "Peaks by shape, the largest growth first" == title
    assert {"x.1=8", "x.1=9", "x.0=3, x.1=8"} == {row.rstrip() for row in rows}


def test_kinds_of_inputs_stay_apart():
    """Each has names of its own, and its own first record, which names all."""
    sizes = [{"x.0": 2, "x.1": 8}, {"x.1": 9}, {"y.0": 2, "y.1": 8}, {"y.1": 9}]
    sizes += [{"x.0": 3, "x.1": 9}]
    records = [_records(1, 1, shape=shape)[0] for shape in sizes]
    _, rows = _rows_of_shapes(records)
    told = ["x.0=2, x.1=8", "x.0=2, x.1=9", "y.1=8", "y.1=9", "x.0=3, x.1=9"]
    assert set(told) == {row.rstrip() for row in rows}


def test_what_is_not_shown_is_counted():
    """The shapes listed are those of the largest growth."""
    records = _records(20, 20)
    text = report(_summary(records), records, 20)
    assert "(8 other shapes not\nshown)" in text
    told = " ".join(text.split())
    assert "324.0 MiB" in told
    assert "312.0 MiB" not in told


def test_a_report_asks_the_terminal(toys, monkeypatch):
    """Its width is the terminal's, or the one that was asked for."""
    with mimose.attach(toys.chain(2), "1TiB") as session:
        monkeypatch.setenv("COLUMNS", "40")
        narrow = session.report()
        assert 40 == terminal_width()
        assert max(map(len, narrow.splitlines())) <= 40
        assert max(map(len, session.report(100).splitlines())) > 40


def test_words_stay_whole():
    """A path or a layer's name is never broken."""
    name = "a" * 50
    assert ["  see", f"    {name}"] == wrapped(
        f"see {name}", 20, first="  ", rest="    "
    )


def test_names_stand_aside_where_there_is_room():
    """And before their texts where there is not."""
    rows = [("one", "first"), ("other", "second")]
    assert ["  one    first", "  other  second"] == named(rows, 60)
    assert ["  one: first", "  other: second"] == named(rows, 40)


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (30, ["  name    here  there", "  ab    123456   9876"]),
        (16, ["  name  there", "  ab     9876"]),
        (12, ["  ab", "    here", "    123456,", "    there", "    9876"]),
    ],
)
def test_a_table_gets_narrower(width, lines):
    """First it loses columns, then its rows are written below each other."""
    rows = [("name", "here", "there"), ("ab", "123456", "9876")]
    assert lines == table(rows, width, fewer=[(0, 2)])
