"""Where a model and its sample come from."""

from pathlib import Path

import pytest
import torch

from mimose.bench.advise.source import make, saved
from mimose.usage import UsageError

_HERE = "advise_toys"


def test_a_function_by_name(toys):
    """A function by name."""
    model, sample = make(f"{_HERE}:blocks")
    assert isinstance(model, toys.Blocks)
    assert sample.shape == (16, 128)


def test_a_model_that_was_saved_comes_back(toys):
    """A model that was saved comes back."""
    model, sample = toys.blocks()
    with saved(model, sample) as path:
        again, batch = make(path)
    assert torch.equal(batch, sample)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not Path(path).exists()


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("toys", "module:function"),
        (":x", "module:function"),
        (f"{_HERE}:nobody", "nobody"),
        (f"{_HERE}:broken", "RuntimeError: no such data .advise_toys.py, line"),
        (f"{_HERE}:nothing", r"must return \(model, sample\).*Blocks"),
    ],
)
@pytest.mark.usefixtures("toys")
def test_what_is_no_source(source, why):
    """What is no source."""
    with pytest.raises(UsageError, match=why):
        make(source)


def test_a_class_of_the_script_is_refused(toys, monkeypatch):
    """A class of the script is refused."""
    monkeypatch.setattr(toys.Blocks, "__module__", "__main__")
    with (
        pytest.raises(UsageError, match="defined in the script itself"),
        saved(toys.Blocks(), 1),
    ):
        pass


def test_what_cannot_be_saved_is_refused(toys):
    """What cannot be saved is refused."""
    model = toys.Blocks()
    model.hook = lambda: None
    with pytest.raises(UsageError, match="cannot be saved"), saved(model, 1):
        pass
