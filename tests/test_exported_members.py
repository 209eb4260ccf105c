"""The public surface is what ``__all__`` says."""

import inspect
import pickle
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.slow
def test_a_users_program_is_typed():
    """Under `mypy --strict` it needs no stubs, and a wrong type is found."""
    pytest.importorskip("mypy")
    path = Path(__file__).parent / "fixtures" / "users_program.py"
    wrong = path.read_text(encoding="utf-8").replace("peak: int", "peak: str")
    for program, code, said in ((path, 0, "Success"), (wrong, 1, '"int", variable')):
        given = [str(program)] if code == 0 else ["-c", program]
        ran = subprocess.run(
            [sys.executable, "-m", "mypy", "--strict", *given],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (code, True) == (ran.returncode, said in ran.stdout), ran.stdout


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
