"""Random programs train as they do without a session, to the last bit.

`scripts/random_programs --minutes 60` judges as many more as there is time for.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("hypothesis")

import programs
from fuzz import examples
from hypothesis import assume, given, note
from hypothesis import strategies as st

repeatable = examples(3)


def _holds(program: programs.Program, device: str) -> None:
    verdict = programs.judge(program, device)
    assume(not verdict.rejected)
    note(f"judge({program}, {device!r})")
    assert not verdict.found, verdict.found


@pytest.mark.slow
@pytest.mark.parametrize("session", programs.SESSIONS)
@repeatable
@given(data=st.data())
def test_equal_to_the_bare_twin(session: str, data: Any) -> None:
    """Gradients, buffers, attributes, random state and hooks are those of the twin."""
    program = data.draw(programs.programs())
    _holds(dataclasses.replace(program, session=session), "cpu")


@pytest.mark.sim
@pytest.mark.slow
@repeatable
@given(program=programs.programs())
def test_equal_on_an_accelerator(sim: Any, program: programs.Program) -> None:
    """The same of the simulated accelerator, whose readings are exact."""
    _holds(program, "sim")


def _rows() -> list[programs.Program]:
    """Make programs that have all parts, turns, traits and modes between them."""
    parts = sorted(programs.PARTS)
    # Around a backward, anomaly mode is as around a forward, and slow.
    turns = ["evaluation" if t == "anomaly_both" else t for t in sorted(programs.TURNS)]
    n = len(parts) // 2 + 1

    def row(i: int) -> programs.Program:
        def two(names: Any) -> tuple[str, ...]:
            return tuple(dict.fromkeys(names[at % len(names)] for at in (i + n, i)))

        return programs.Program(
            families=(two(parts),),
            layers=(0, 0),
            traits=(programs.TRAITS[i % len(programs.TRAITS)],),
            turns=tuple((name, 2 + at) for at, name in enumerate(two(turns))),
            mode=(programs.MODES[i % len(programs.MODES)], 2),
            session=list(programs.SESSIONS)[i % len(programs.SESSIONS)],
        )

    return [row(i) for i in range(n)]


@pytest.mark.parametrize("program", _rows(), ids=range(len(_rows())))
def test_every_part_turn_trait_and_mode(program: programs.Program) -> None:
    """Each is in some program, which the bare twin can run, and is equal to it."""
    verdict = programs.judge(program)
    assert ("", "") == (verdict.found, verdict.rejected)


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
    """A session that changes what is computed is found out."""

    def number(layer: Any, h: Any) -> Any:
        return h * (1.0 if programs.NOW.session is None else 1.01)

    monkeypatch.setitem(programs.PARTS, "number", number)
    program = programs.Program((("flag", "number"),), (0, 0, 0))
    assert programs.judge(program).found.startswith("grads differ: in step 0")
