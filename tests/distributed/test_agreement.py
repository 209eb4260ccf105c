"""Ranks whose layers wait for each other train as without the library, or all stop.

Each launch has a hard limit: a deadlock is a test that fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
"""Of the time most goes by beside other programs, for ranks take turns."""

_LIMIT_SECONDS = 280.0
_CASES = {
    "groups": {"kind": "groups", "steps": 8},
    "sends": {"kind": "sends", "steps": 9},
    "parallel": {"kind": "parallel", "steps": 8},
    "cold": {"kind": "groups", "steps": 8, "warm": 0},
}
_SILENT = ("fsdp", "ddp")
_REFUSED = ("attach", "planner", "unlike")
_OUT_OF_MEMORY: dict[str, dict[str, Any]] = {
    "sharded": {"kind": "fsdp", "way": "loop"},
    "by step": {"kind": "groups", "way": "step"},
    "nobody": {"kind": "plain", "way": "loop"},
}


@pytest.fixture(scope="module")
def trained(launch: Callable[..., Any]) -> Any:
    """Run all cases in one launch; last the one that ends a rank."""
    cases = {
        **{name: {"do": "train", **case} for name, case in _CASES.items()},
        **{f"silent {kind}": {"do": "silent", "kind": kind} for kind in _SILENT},
        **{f"refused {how}": {"do": "refused", "how": how} for how in _REFUSED},
        "later": {"do": "later", "kind": "groups"},
        **{n: {"do": "out_of_memory", **c} for n, c in _OUT_OF_MEMORY.items()},
        "impure": {"do": "impure"},
    }
    return launch("agreement_cases:", cases, limit_seconds=_LIMIT_SECONDS)


@pytest.mark.parametrize("case", _CASES)
def test_gradients_are_those_of_the_bare_model(trained: Any, case: str) -> None:
    """So is the random state, on each rank; and both ran the same actions."""
    ranks = trained[case]
    assert [[], []] == [rank["differences"] for rank in ranks]
    assert ranks[0]["n_gradients"] > 20
    assert ranks[0]["actions"] == ranks[1]["actions"]


@pytest.mark.parametrize("kind", ["groups", "sends", "parallel"])
def test_the_safest_of_differing_plans_runs(trained: Any, kind: str) -> None:
    """One rank would keep all, the other half: all run the half that holds less."""
    first, second = trained[kind]
    assert ["rk", "rk"] == [rank["actions"][-1] for rank in (first, second)]
    assert ["plan", "plan"] == [rank["phases"][-1] for rank in (first, second)]
    assert first["changed"] > second["changed"]


def test_a_rank_that_knows_all_waits_for_one_that_learns(trained: Any) -> None:
    """Where one has no plan, all recompute everything, though the other has one."""
    known, learning = trained["cold"]
    assert ("fallback", "collect") == (known["phases"][0], learning["phases"][0])
    assert any("another rank has no plan" in reason for reason in known["reasons"])
    assert "rr" == known["actions"][0]
    assert "rk" == known["actions"][-1]


def test_each_forward_exchanges_once(trained: Any) -> None:
    """And once to meet; layers that wait run under keep and recompute alone."""
    for rank in trained["groups"]:
        assert 1 + len(rank["phases"]) == rank["exchanges"]
        assert {"r", "k"} >= set("".join(rank["actions"]))


def test_nothing_is_sent_where_layers_do_not_wait(trained: Any) -> None:
    """No group is made."""
    for kind in _SILENT:
        assert [{"steps": 3, "sent": 0}] * 2 == trained[f"silent {kind}"]


def test_a_layer_that_cannot_be_recomputed_is_an_error_where_others_wait(
    trained: Any,
) -> None:
    """It names the layer, and what to do; the other rank does not wait for ever."""
    first, second = trained["impure"]
    assert "NotRecomputableError" == first[0]
    assert "layers.0" in first[1]
    assert "attach(layers=...)" in first[1]
    assert second[0] != "nothing"


def test_what_one_rank_refuses_all_refuse(trained: Any) -> None:
    """The error names the rank, and says what its own said; all can go on after it."""
    first, second = trained["refused attach"]
    assert "InfeasibleBudgetError" == first[0] == second[0]
    assert "rank 1" in first[1]
    first, second = trained["refused planner"]
    assert ("OtherRankError", "ValueError") == (first[0], second[0])
    assert "rank 1" in first[1]
    assert "an odd thing" in first[1]
    assert ["nothing", "nothing"] == [first[2], second[2]]
    assert ["MimoseError"] * 2 == [name for name, *_ in trained["refused unlike"]]


def test_layers_that_come_to_wait_are_refused(trained: Any) -> None:
    """All ranks raise before a forward, each time, and can attach anew."""
    for rank in trained["later"]:
        for name, said in rank["found"]:
            assert "MimoseError" == name
            assert "'layers.0'" in said
        assert "nothing" == rank["again"]


def test_nothing_is_run_again_where_others_wait(trained: Any) -> None:
    """Out of memory is an error that says so; where nobody waits it is survived."""
    found = {case: trained[case] for case in _OUT_OF_MEMORY}
    for case in ("sharded", "by step"):
        for name, said, retries in found[case]:
            assert ("OutOfMemoryError", "0") == (name, retries)
            assert said.startswith("CUDA out of memory")
            assert "1024.00 GiB" in said
    assert [["nothing", "", "1"]] * 2 == found["nobody"]
