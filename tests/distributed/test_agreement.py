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
    "sends": {"kind": "sends", "steps": 12},
    "parallel": {"kind": "parallel", "steps": 8},
    "cold": {"kind": "groups", "steps": 8, "warm": 0},
    "cold sends": {"kind": "sends", "steps": 9, "warm": 1},
    "measures": {"kind": "sends", "steps": 10, "measures": 0},
    "over": {"kind": "groups", "steps": 10, "over": 0},
    "fine": {"kind": "groups", "steps": 6, "actions": "lean"},
    "fixed": {"kind": "groups", "steps": 4, "planner": "every-2"},
}


_IMPURE: dict[str, dict[str, Any]] = {
    "on one rank": {"kind": "fsdp", "block": "Grows"},
    "on one rank of those that agree": {"kind": "groups", "block": "Grows"},
    "on all ranks": {"kind": "fsdp", "block": "Counts"},
    "in the middle of a forward": {"kind": "sends", "block": "Edits"},
}
_REFUSED_IMPURE: dict[str, dict[str, Any]] = {
    "an edited batch": {"kind": "fsdp", "block": "Grows", "late": "edits"},
    "later": {"kind": "fsdp", "block": "CountsLate", "late": "context", "steps": 9},
}
_TOLD = {
    "groups": "blocks.0",
    "sends": "attach(agree=...)",
}
_SILENT = ("fsdp", "ddp")
_REFUSED = ("attach", "unreadable", "budget", "an odd thing", "judged", "unlike")
_MET = ("twice", "arguments", "units", "in a group", "free", "late")
_LATER = ("groups", "in between")
_OUT_OF_MEMORY: dict[str, dict[str, Any]] = {
    "sharded": {"kind": "fsdp", "way": "loop"},
    "wrapped": {"kind": "ddp", "way": "step"},
    "inside of a wrapper": {"kind": "ddp", "way": "inner"},
    "by step": {"kind": "groups", "way": "step"},
    "nobody": {"kind": "plain", "way": "loop"},
    "one rank": {"kind": "groups", "way": "loop", "ranks": [1]},
}


@pytest.fixture(scope="module")
def trained(launch: Callable[..., Any]) -> Any:
    """Run all cases in one launch; last the one that ends a rank."""
    cases = {
        **{name: {"do": "train", **case} for name, case in _CASES.items()},
        **{
            f"impure {n}": {"do": "impure", **case}
            for n, case in (_IMPURE | _REFUSED_IMPURE).items()
        },
        "norms": {"do": "norms"},
        **{f"told {kind}": {"do": "told", "kind": kind} for kind in _TOLD},
        **{f"silent {kind}": {"do": "silent", "kind": kind} for kind in _SILENT},
        **{f"refused {how}": {"do": "refused", "how": how} for how in _REFUSED},
        **{f"met {how}": {"do": "meet", "how": how} for how in _MET},
        **{f"later {kind}": {"do": "later", "kind": kind} for kind in _LATER},
        "timeout": {"do": "side_timeout"},
        "bad": {"do": "bad_agree"},
        "gone": {"do": "group_gone"},
        **{n: {"do": "out_of_memory", **c} for n, c in _OUT_OF_MEMORY.items()},
    }
    return launch("agreement_cases:call", cases, limit_seconds=_LIMIT_SECONDS)


@pytest.mark.parametrize("case", _CASES)
def test_gradients_are_those_of_the_bare_model(trained: Any, case: str) -> None:
    """Each gradient of each step is, on each rank; and both ran the same actions."""
    ranks = trained[case]
    assert [[], []] == [rank["differ in steps"] for rank in ranks]
    assert ranks[0]["actions"] == ranks[1]["actions"]


def test_running_statistics_over_all_ranks(trained: Any) -> None:
    """Gradients, buffers and random state are the bare model's, with no rows, too."""
    for rank in trained["norms"]:
        assert [] == rank["differences"]
        assert ["buffer", "gradient", "loss", "random"] == rank["compared"]
        assert "rk" == rank["actions"][-1]


@pytest.mark.parametrize("kind", ["groups", "sends", "parallel"])
def test_the_safest_of_differing_plans_runs(trained: Any, kind: str) -> None:
    """One rank would keep all, the other half: all run the half that holds less."""
    first, second = trained[kind]
    assert ["rk", "rk"] == [rank["actions"][-1] for rank in (first, second)]
    assert ["plan", "plan"] == [rank["phases"][-1] for rank in (first, second)]
    assert first["changed"] > second["changed"]


@pytest.mark.parametrize("case", ["cold", "cold sends"])
def test_a_rank_that_knows_all_waits_for_one_that_learns(
    trained: Any, case: str
) -> None:
    """Where one has no plan, all recompute everything, though the other has one."""
    warm = _CASES[case]["warm"]
    known, learning = trained[case][warm], trained[case][1 - warm]
    assert ("fallback", "collect") == (known["phases"][0], learning["phases"][0])
    assert any("another rank has no plan" in reason for reason in known["reasons"])
    assert "rr" == known["actions"][0]
    assert "rk" == known["actions"][-1]


def test_a_plan_that_is_over_one_ranks_budget_is_no_ranks(trained: Any) -> None:
    """The second exchange tells, and all recompute everything, under a plan."""
    for rank in trained["over"]:
        assert "rr" == rank["actions"][-1]
        assert rank["phases"][-1] in ("plan", "step_down")  # not an unplanned one


def test_layers_that_wait_are_planned_as_a_whole(trained: Any) -> None:
    """Finer actions settle call by call what runs again, each rank for itself."""
    for rank in trained["fine"]:
        assert [["keep", "recompute"]] * 2 == rank["menus"]


def test_each_forward_exchanges(trained: Any) -> None:
    """Once to meet, once a forward, and behind the first; again where plans differ."""
    n_meetings = 2
    for rank in trained["fixed"]:
        assert n_meetings + 4 == rank["exchanges"]
        assert ["rk"] * 4 == rank["actions"]
    for rank in trained["groups"]:
        planned = sum(phase in ("plan", "step_down") for phase in rank["phases"])
        assert planned > 0
        assert n_meetings + 8 + planned == rank["exchanges"]


def test_nothing_is_sent_where_layers_do_not_wait(trained: Any) -> None:
    """No group is made; under FSDP2 ranks exchange once, behind the first forward."""
    for kind in _SILENT:
        sent = ["all_reduce"] if kind == "fsdp" else []
        assert [{"steps": 3, "sent": sent}] * 2 == trained[f"silent {kind}"]


@pytest.mark.parametrize("kind", _TOLD)
def test_that_ranks_agree_is_told(trained: Any, kind: str) -> None:
    """A line in the log says why, and a row in the report what it took."""
    for rank in trained[f"told {kind}"]:
        (line,) = rank["lines"]
        assert "2 ranks" in line
        assert _TOLD[kind] in line
        (row,) = rank["report"]
        assert "2 agree" in row
        assert {"n_ranks": 2, "n_exchanges": 4, "n_changed": 0}.items() <= (
            rank["use"].items()
        )


@pytest.mark.parametrize("case", _IMPURE)
def test_all_keep_what_one_finds_in_the_first_forward(trained: Any, case: str) -> None:
    """All ranks run it again, and gradients are those of the bare model."""
    for rank in trained[f"impure {case}"]:
        assert ["nothing", ""] == rank["said"]
        assert [True] * 4 == rank["equal"]
        assert [1, 0, 0, 0] == rank["retries"]
        assert ["0", "1"] == sorted(name.split(".")[-1] for name in rank["kept"])


def test_no_rank_runs_again_what_another_cannot(trained: Any) -> None:
    """Where one has edited its batch all raise, and keep the layers from then on."""
    for rank in trained["impure an edited batch"]:
        assert "NotRecomputableError" == rank["said"][0]
        assert [0] == rank["retries"]
        assert ["blocks.0", "blocks.1"] == sorted(rank["kept"])


def test_what_is_found_later_is_an_error(trained: Any) -> None:
    """No rank can know what others find, though layers are looked at anew."""
    for rank in trained["impure later"]:
        name, said = rank["said"]
        assert "NotRecomputableError" == name
        assert all(word in said for word in ("blocks.0, blocks.1", "step 9"))
        assert [0] * 10 == rank["retries"]


def test_what_one_rank_refuses_all_refuse(trained: Any) -> None:
    """The error names the rank, and says what its own said; all can go on after it."""
    found = {how: trained[f"refused {how}"] for how in _REFUSED}
    for how, words in (("attach", "1.0 MiB"), ("budget", "7 bytes")):
        first, second = found[how]
        assert "InfeasibleBudgetError" == first[0] == second[0]
        assert "rank 1" in first[1]
        assert words in first[1]
        assert words in second[1]
    first, second = found["unreadable"]
    assert ("OtherRankError", "BudgetError") == (first[0], second[0])
    assert "'a lot'" in first[1]
    for how in ("an odd thing", "judged"):
        first, second = found[how]
        assert ("OtherRankError", "ValueError") == (first[0], second[0])
        assert "rank 1" in first[1]
        assert f"ValueError: {how}" in first[1]
    for how in ("budget", "an odd thing", "judged"):
        assert ["nothing", "nothing"] == [rank[2] for rank in found[how]]
    assert ["MimoseError"] * 2 == [name for name, *_ in found["unlike"]]


def test_no_rank_waits_for_one_that_cannot_attach(trained: Any) -> None:
    """What it failed with before it had looked at its layers is an error of all."""
    words = {
        "twice": ("AlreadyAttachedError", "session"),
        "arguments": ("ValueError", "cache_size"),
        "units": ("NoUnitsError", "nothing of that name"),
        "in a group": ("ValueError", "cache_size"),
    }
    for how, (kind, said) in words.items():
        waits, failed = trained[f"met {how}"]
        assert [kind, "OtherRankError"] == [failed["found"][0], waits["found"][0]]
        assert said in failed["found"][1]
        assert "rank 1" in waits["found"][1]
        assert f"{kind}: " in waits["found"][1]
        assert said in waits["found"][1]
        assert waits["then"] and failed["then"]


def test_no_rank_waits_for_one_that_has_no_need_to(trained: Any) -> None:
    """Where layers of some ranks alone wait, these say so, and what to do."""
    waits, free = trained["met free"]
    assert ["MimoseError", "nothing"] == [waits["found"][0], free["found"][0]]
    for word in ("'blocks.0'", "rank 1", "attach(agree=...)"):
        assert word in waits["found"][1]
    assert waits["then"] and free["then"]


def test_no_rank_waits_for_ever_for_one_that_does_not_attach(trained: Any) -> None:
    """It is named as missing; if it comes after all, it does not wait, either."""
    waits, late = trained["met late"]
    assert "[1]" in waits["found"][1]
    assert "OtherRankError" == late["found"][0]
    assert "rank 0" in late["found"][1]
    assert waits["then"] and late["then"]


@pytest.mark.parametrize("kind", _LATER)
def test_layers_that_come_to_wait_are_refused(trained: Any, kind: str) -> None:
    """All ranks raise before a forward, each time, and can attach anew."""
    for rank in trained[f"later {kind}"]:
        for name, said in rank["found"]:
            assert "MimoseError" == name
            assert "'blocks.0'" in said
        assert "nothing" == rank["again"]


def test_ranks_that_agree_wait_as_long_as_the_user_lets_them(trained: Any) -> None:
    """Their group has the default group's timeout, not torch's."""
    assert [7200.0, 7200.0] == trained["timeout"]


def test_nothing_is_run_again_where_others_wait(trained: Any) -> None:
    """Out of memory is an error that says so; where nobody waits it is survived."""
    found = {case: trained[case] for case in _OUT_OF_MEMORY}
    for case in ("sharded", "wrapped", "inside of a wrapper", "by step"):
        for name, said, retries in found[case]:
            assert ("OutOfMemoryError", "0") == (name, retries)
            assert said.startswith("CUDA out of memory")
            assert "1024.00 GiB" in said
    assert [["nothing", "", "1"]] * 2 == found["nobody"]
    other, failed = found["one rank"]
    assert failed[1].startswith("CUDA out of memory")
    assert "closed by peer" in other[1] or "reset by peer" in other[1]


def test_a_group_that_is_gone_is_told_of(trained: Any) -> None:
    """A forward says what to do, and detaching is no error."""
    for forward, detach in trained["gone"]:
        assert "MimoseError" == forward[0]
        assert "destroy_process_group()" in forward[1]
        assert ["nothing", ""] == detach


def test_agree_is_checked_at_the_door(trained: Any) -> None:
    """Another word, and what is no group, say what may be given."""
    for found in trained["bad"]:
        assert ["ValueError", "TypeError"] == [name for name, _ in found[:2]]
        assert "'always'" in found[0][1]
