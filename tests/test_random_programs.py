"""Random programs train as they do without a session, to the last bit."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, Phase, assume, given, note, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent / "fixtures"))
import programs

WITHOUT = frozenset(programs.SLOW)

repeatable = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=6,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def _holds(program: programs.Program, device: str) -> None:
    verdict = programs.judge(program, device)
    assume(not verdict.rejected)
    note(f"judge({program}, {device!r})")
    assert not verdict.found, verdict.found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("session", programs.SESSIONS)
@repeatable
@given(data=st.data())
def test_equal_to_the_bare_twin(session: str, data: Any) -> None:
    """Gradients, buffers, attributes, random state and hooks are those of the twin."""
    program = data.draw(programs.programs(WITHOUT))
    _holds(dataclasses.replace(program, session=session), "cpu")


@pytest.mark.sim
@pytest.mark.slow
@pytest.mark.timeout(300)
@repeatable
@given(program=programs.programs(WITHOUT))
def test_equal_on_an_accelerator(sim: Any, program: programs.Program) -> None:
    """The same of the simulated accelerator, whose readings are exact."""
    _holds(program, "sim")


def _once_wrong(
    family: tuple[str, ...], traits: tuple[str, ...], turn: str, session: str
) -> programs.Verdict:
    turns = ((turn, 0),)
    program = programs.Program((family,), (0, 0), traits, turns, session=session)
    return programs.judge(program, "cpu" if session == "full" else "sim")


def test_a_graph_that_held_itself() -> None:
    """A tensor that an operator had edited was saved as it is, by a hook of ours."""
    family = ("rrelu_in_place", "gradient_inside")
    verdict = _once_wrong(family, (), "wrapped_forward", "full")
    assert ("", "") == (verdict.found, verdict.rejected)


@pytest.mark.sim
def test_what_autocast_had_cast_in_a_forward_that_failed(sim: Any) -> None:
    """It was older than its users, and gradients were added in another order."""
    traits = ("collects", "input_grad")
    verdict = _once_wrong(("growing_table",), traits, "autocast_both", "tight fine")
    assert ("", "") == (verdict.found, verdict.rejected)


def test_says_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that changes what is computed is found out, and the program shrinks."""
    changed = programs.MAKES["number"]

    def number(layer: Any, h: Any) -> Any:
        return h * (1.0 if programs.NOW.session is None else 1.01)

    monkeypatch.setitem(programs.PARTS, "number", number)
    program = programs.Program(
        (("flag", "number"),), (0, 0, 0), ("input_grad",), (("evaluation", 2),)
    )
    found = programs.judge(program).kind

    least = programs.smaller(program, lambda p: programs.judge(p).kind == found)

    assert changed is programs.MAKES["number"]
    assert "grads differ" == found
    assert programs.Program((("number",),), (0, 0)) == least
