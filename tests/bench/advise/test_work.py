"""What a process says of a model that cannot be measured."""

import pytest

from mimose.bench.advise.task import Task
from mimose.bench.advise.work import Worker


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("empty", "the sample is an empty batch"),
        ("frozen", "the model has no parameter that is trained"),
        ("weightless", "the model is on the meta device"),
        ("unreal", "the sample's tensors are on the meta device"),
        ("broken", "no such data"),
    ],
)
@pytest.mark.usefixtures("toys")
def test_a_model_that_cannot_be_trained_says_why(name, why):
    """In words, and not by the end of its process."""
    task = Task(
        source=f"advise_toys:{name}",
        method="none",
        device="cpu",
        dtype="float32",
        optimizer="adamw",
        threads=1,
        seed=0,
    )
    assert why in Worker(task).begin()["why_not"]


@pytest.mark.usefixtures("toys")
def test_what_fails_as_it_begins_says_how(monkeypatch):
    """A failure that nobody has thought of has a kind and a message."""

    def failing(*_):
        msg = "no room"
        raise RuntimeError(msg)

    monkeypatch.setattr("mimose.bench.advise.work.training_of", failing)
    task = Task(
        source="advise_toys:blocks",
        method="none",
        device="cpu",
        dtype="float32",
        optimizer="adamw",
        threads=1,
        seed=0,
    )
    assert Worker(task).begin() == {"why_not": "RuntimeError: no room"}
