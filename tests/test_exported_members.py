"""The public surface is what ``__all__`` says."""

import inspect
import pickle

import pytest

import mimose


def test_all_is_sorted_and_importable():
    """Every name in ``__all__`` can be had, and the list is in order."""
    assert sorted(mimose.__all__) == mimose.__all__
    for name in mimose.__all__:
        assert getattr(mimose, name).__name__ == name


def test_every_exception_is_exported():
    """All errors of `mimose.exceptions` are public, below one base."""
    from mimose import exceptions

    public = {
        name
        for name, value in vars(exceptions).items()
        if inspect.isclass(value) and value.__module__ == "mimose.exceptions"
    }
    assert public <= set(mimose.__all__)
    assert all(issubclass(getattr(mimose, name), mimose.MimoseError) for name in public)


@pytest.mark.parametrize(
    "error",
    [
        mimose.NotRecomputableError({3: "layers.3", 4: "layers.4"}, "it draws lots"),
        mimose.LateChangeError("layers.3", [(1234, "seen")]),
        mimose.OtherRankError(1, "ValueError", "no such thing"),
        mimose.InfeasibleBudgetError(1.0, 2.0, {"parameters": 2.0}),
    ],
)
def test_exceptions_survive_a_process(error):
    """A data loader or a launcher hands errors on by pickling them."""
    again = pickle.loads(pickle.dumps(error))

    assert type(error) is type(again)
    assert str(error) == str(again)
    assert vars(error) == vars(again)
