"""A session's numbers for loggers."""

import pytest

from mimose.report.metrics import MetricsReader


def test_metrics_of_the_steps_since_the_last_reading(toys, meter):
    """Every number follows from the records; without new steps there is none."""
    model = toys.zoo_model("bert")
    lengths = [20, 33, 9, 26, 14, 38, 30, 12, 23, 17, 35, 28]
    _, session = toys.compare(model, toys.text_batches(lengths), meter=meter)
    reader = MetricsReader(session)
    read = reader.read()
    records = list(session.records)
    actions = [action for record in records for action in record.actions]
    peak = max(record.observed_peak_bytes for record in records)
    assert read == {
        "mimose/peak_bytes": peak,
        "mimose/budget_use": pytest.approx(peak / session.budget_bytes),
        "mimose/recompute_share": actions.count("recompute") / len(actions),
        "mimose/cache_hit_rate": 0.0,
        "mimose/phase": 2.0,
    }
    assert {} == reader.read()


def test_a_meter_without_peaks(toys):
    """Where no peak can be read there is none to log."""
    meter = toys.BlindMeter()
    meter.reads_peak = False
    _, session = toys.compare(toys.chain(2), [toys.inputs()] * 3, meter=meter)
    read = MetricsReader(session).read()
    assert "mimose/peak_bytes" not in read
    assert "mimose/budget_use" not in read
    assert read["mimose/recompute_share"] > 0
