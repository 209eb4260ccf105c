"""Running a grid, with processes that only say that they train."""

import contextlib

import pytest

pytest.importorskip("transformers")

from mimose.bench.child import RunFailedError
from mimose.bench.grid.runner import INTERRUPTED, GridSettings, WorkloadRun

MIB = 2**20


_LENGTHS = tuple({"length": n} for n in range(40, 10, -1))


@pytest.fixture
def run(children):
    """Run a grid of tc-bert; return its rows by strategy."""

    def run(*strategies, on_step=lambda _: None, **settings):
        grid = WorkloadRun(
            GridSettings(
                workloads=("tc-bert",),
                strategies=("none", *strategies),
                budgets=(0.5,),
                **{"steps": 5, "warm_up": 1, **settings},
            ),
            "tc-bert",
            on_step,
        )
        with contextlib.suppress(KeyboardInterrupt):
            grid.run()
        rows = grid.rows
        assert all(child.is_closed for child in children.made)
        return {
            name: [row for row in rows if row.strategy == name]
            for name in ("none", *strategies)
        }

    return run


def test_flops_are_counted_on_a_few_sizes(run, children):
    """Less those of plain training; where a strategy tells its own, nothing is."""
    rows = run("full", "mimose", "selective", trace=_LENGTHS, steps=29)
    lengths = [each["length"] for each in _LENGTHS]
    assert [row.recomputed_flops for row in rows["none"]] == [0] * 30
    assert [row.recomputed_flops for row in rows["mimose"]] == [5] * 30
    selective = [row.recomputed_flops for row in rows["selective"]]
    assert selective == [3 * length**2 for length in lengths]
    for name, times in {"none": 6, "selective": 6, "mimose": 0}.items():
        assert len(_counts(children, name)) == times


def test_flops_are_counted_by_plan(run, children):
    """Steps under one plan are taken together, however they alternate by size."""
    rows = run("mimose-paper", trace=_LENGTHS, steps=29)["mimose-paper"]
    assert [row.recomputed_flops for row in rows] == [
        2 * each["length"] ** 2 for each in _LENGTHS
    ]
    assert len(_counts(children, "mimose-paper")) <= 12
    assert {phase for _, _, phase in _counts(children, "mimose-paper")} == {"plan"}


def _counts(children, name):
    return [asked for asked in children.of(name).asked if asked[0] == "count"]


def test_what_cannot_be_counted_is_not_known(run):
    """And it stops nothing else."""
    rows = run("full", "hf-full", "selective")
    assert {row.recomputed_flops for row in rows["hf-full"]} == {None}
    assert None not in {row.recomputed_flops for row in rows["selective"]}


def test_the_longest_batch_is_measured(run, children):
    """Plain training finds it, and everybody else is told; so is the budget."""
    run("full", "mimose")
    longest = children.of("none").first["sizes"][0]
    assert children.of("none").first["longest"] is None
    assert children.of("full").first["longest"] == longest
    assert children.of("mimose").first["longest"] == longest
    assert children.of("mimose").first["headroom_bytes"] == 200 * MIB


def test_a_strategy_that_fails_says_so_in_a_row(run):
    """And the others go on."""
    rows = run("static", "mimose")
    assert [row.problem for row in rows["static"]] == ["", "", "memory ran out"]
    assert len(rows["mimose"]) == 6


@pytest.mark.parametrize(("device", "times"), [("cpu", 0), ("cpu:0", 0), ("cuda", 2)])
def test_turns_end_with_a_rest(run, children, device, times):
    """Where processes share a device's memory: here after four steps and two."""
    run("mimose", device=device)
    rests = [asked for asked in children.of("mimose").asked if asked[0] == "rest"]
    assert len(rests) == times


def test_there_has_to_be_something_to_plan(run, children, monkeypatch):
    """Where keeping everything takes no more, the numbers are told."""
    monkeypatch.setattr(children, "plain_growth", 5)
    with pytest.raises(RunFailedError, match="grows by 5 bytes"):
        run("mimose")


def test_where_plain_training_does_not_fit(run, children, monkeypatch):
    """A budget of 1 is what the device has; its rows end where it failed."""
    monkeypatch.setattr(children, "plain_growth", None)
    monkeypatch.setattr(children, "fails", {"none": 3})
    monkeypatch.setattr(children, "rooms", {"none": 520 * MIB, "full": 510 * MIB})
    rows = run("full", "mimose", "hf-full", device="cuda")
    room = 510 - 2 * 10  # two more processes take what the second one took
    assert (
        children.of("mimose").first["headroom_bytes"] == (100 + (room - 100) // 2) * MIB
    )
    assert {row.recomputed_flops for row in rows["hf-full"]} == {None}
    assert [row.problem for row in rows["none"]] == ["", "", "", "memory ran out"]
    assert len(rows["mimose"]) == len(rows["full"]) == 6
    with pytest.raises(RunFailedError, match="add full to the strategies"):
        run("mimose", device="cuda")


def test_processes_have_to_fit_beside_each_other(run, children, monkeypatch):
    """Before the kernel ends one of them, or somebody else's."""
    monkeypatch.setattr(children, "private_bytes", 2**60)
    with pytest.raises(RunFailedError, match=r"1 more processes of 10\d+\.\d GiB"):
        run("mimose")


def test_an_interrupted_run_keeps_its_steps(run):
    """As Ctrl-C does, in the middle of a strategy's turn."""
    seen = []

    def on_step(cell):
        seen.append(cell)
        if len(seen) == 6:
            raise KeyboardInterrupt

    rows = run("mimose", "static", on_step=on_step)
    assert [row.problem for row in rows["none"]] == [""] * 4 + [INTERRUPTED]
    assert [row.problem for row in rows["mimose"]] == ["", INTERRUPTED]
    assert [row.problem for row in rows["static"]] == [INTERRUPTED]


def test_interrupted_while_flops_are_counted(run, children, monkeypatch):
    """All steps ran, and still it has to run again."""

    def count(self, index, phase):
        raise KeyboardInterrupt

    monkeypatch.setattr(children, "count", count)
    rows = run("selective")
    assert len(rows["none"]) == 7
    settings = GridSettings(
        workloads=("tc-bert",), strategies=("none", "selective"), budgets=(0.5,),
        steps=5, warm_up=1,
    )  # fmt: skip
    every = [row for own in rows.values() for row in own]
    assert not settings.is_complete(every)
    assert settings.is_complete([row for row in every if not row.problem])


def test_what_tells_its_flops_is_not_counted(run, children):
    """Nor is plain training, where nobody asks."""
    rows = run("full", "mimose")
    assert {row.recomputed_flops for row in rows["none"]} == {0}
    assert [asked for child in children.made for asked in child.counts] == []


def test_limits_come_last_each_alone(run, children):
    """Plain training fails where it needs more; rows say which is which."""
    rows = run("full", "mimose", limited=("none", "mimose"), trace=_LENGTHS)
    limited = [row for row in rows["none"] if row.is_limited]
    assert [row.problem for row in limited] == ["can't allocate memory"]
    assert len([row for row in rows["mimose"] if row.is_limited]) == 6
    first, second = children.made[-2:]
    assert (first.name, second.name) == ("none", "mimose")
    assert first.first["headroom_bytes"] == 200 * MIB
    assert first.n_others_open == second.n_others_open == 0
    assert not any(child.first["is_limited"] for child in children.made[:-2])
