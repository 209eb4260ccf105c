"""A run's records as TensorBoard reads them."""

import pytest

from mimose.records import StepRecord
from mimose.report.tensorboard import write_scalars

accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator",
    reason="needs mimose[tensorboard]",
)


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
    events = accumulator.EventAccumulator(str(folder)).Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def test_every_step_has_its_scalars(tmp_path):
    """Names are those of `mimose.report.metrics`, each at its own step."""
    write_scalars([_record(0, phase="collect"), _record(1)], tmp_path)
    assert _read(tmp_path) == {
        "mimose/peak_bytes": [(0, 400), (1, 401)],
        "mimose/budget_use": [(0, pytest.approx(0.4)), (1, pytest.approx(0.401))],
        "mimose/recompute_share": [(0, 0.25), (1, 0.25)],
        "mimose/cache_hit_rate": [(0, 0), (1, 1)],
        "mimose/phase": [(0, 0), (1, 2)],
        "mimose/plan_seconds": [(0, 0.25), (1, 0.25)],
        "mimose/predicted_peak_bytes": [(0, 350), (1, 350)],
    }


def test_what_is_not_known_is_left_out(tmp_path):
    """A step without a peak or a prediction has no point for it."""
    blind = {"observed_peak_bytes": None, "predicted_peak_bytes": None}
    write_scalars([_record(0, actions=(), **blind), _record(1)], tmp_path)
    read = _read(tmp_path)
    assert [(1, 401)] == read["mimose/peak_bytes"]
    assert [1] == [step for step, _ in read["mimose/predicted_peak_bytes"]]
    assert [(0, 0), (1, 0.25)] == read["mimose/recompute_share"]


def test_several_runs_go_to_a_folder_each(tmp_path):
    """Steps count anew in every run, and would be mixed up otherwise."""
    records = [_record(1), _record(0), _record(0, observed_peak_bytes=500)]
    write_scalars(records, tmp_path)
    assert ["run-1", "run-2"] == sorted(path.name for path in tmp_path.iterdir())
    assert [(0, 400), (1, 401)] == _read(tmp_path / "run-1")["mimose/peak_bytes"]
    assert [(0, 500)] == _read(tmp_path / "run-2")["mimose/peak_bytes"]


def test_writing_again_hides_what_was_there(tmp_path):
    """A run that went on is written once more without doubling its points."""
    write_scalars([_record(0), _record(1)], tmp_path)
    write_scalars([_record(0), _record(1), _record(2)], tmp_path)
    steps = [step for step, _ in _read(tmp_path)["mimose/peak_bytes"]]
    assert [0, 1, 2] == steps


def test_no_steps_write_nothing(tmp_path):
    """Without records there is nothing to tell TensorBoard."""
    write_scalars([], tmp_path)
    assert [] == list(tmp_path.iterdir())
