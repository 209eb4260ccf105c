"""A session's numbers for loggers, and a run's for TensorBoard."""

import pytest

from mimose.records import StepRecord
from mimose.report.metrics import MetricsReader, write_scalars


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
        "mimose/budget_use": pytest.approx(peak / session.budget),
        "mimose/recompute_share": actions.count("recompute") / len(actions),
        "mimose/cache_hit_rate": 0.0,
        "mimose/phase": 2.0,
    }
    assert {} == reader.read()


def _record(step, **changes):
    return StepRecord(
        **{
            "step": step,
            "shape": {"ids.1": 12},
            "phase": "plan",
            "actions": ("keep", "recompute", "keep", "keep"),
            "budget_bytes": 1000,
            "start_bytes": 100,
            "predicted_peak_bytes": 350.0,
            "observed_peak_bytes": 400 + step,
            "cache_hit": step > 0,
            "plan_seconds": 0.25,
            **changes,
        }
    )


def _read(folder):
    """Return (step, value) pairs by name."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="needs mimose[tensorboard]",
    )
    events = accumulator.EventAccumulator(str(folder)).Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def test_every_step_has_its_scalars(tmp_path):
    """What is not known of a step is left out; writing again doubles no point."""
    pytest.importorskip("tensorboard", reason="needs mimose[tensorboard]")
    blind = {"observed_peak_bytes": None, "predicted_peak_bytes": None}
    records = [_record(0, phase="collect", **blind), _record(1)]
    for _ in range(2):
        write_scalars(records, tmp_path)
    assert _read(tmp_path) == {
        "mimose/peak_bytes": [(1, 401)],
        "mimose/budget_use": [(1, pytest.approx(0.401))],
        "mimose/recompute_share": [(0, 0.25), (1, 0.25)],
        "mimose/cache_hit_rate": [(0, 0), (1, 1)],
        "mimose/phase": [(0, 0), (1, 2)],
        "mimose/plan_seconds": [(0, 0.25), (1, 0.25)],
        "mimose/predicted_peak_bytes": [(1, 350)],
    }
