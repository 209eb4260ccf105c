"""Running a grid, with processes that only say that they train."""

import contextlib
import json
from typing import ClassVar

import pytest

pytest.importorskip("transformers")

from mimose.bench.grid import runner
from mimose.bench.grid.rows import INTERRUPTED
from mimose.bench.grid.runner import GridSettings, WorkloadRun, is_complete
from mimose.bench.process import StrategyFailedError

MIB = 2**20


_LENGTHS = tuple({"length": n} for n in range(40, 10, -1))
_MORE = {"selective": 3, "mimose-paper": 2}


class _FakeChild:
    """Answers as a `Trainer` would, and keeps what it was told and asked."""

    made: ClassVar[list["_FakeChild"]] = []
    plain_growth: ClassVar[int | None] = 300 * MIB
    private_bytes: ClassVar[int] = MIB
    rooms: ClassVar[dict[str, int | None]] = {"none": None, "full": None}
    fails: ClassVar[dict[str, int]] = {"static": 2}

    def __init__(self, name, module, threads, first):
        self.name, self.first = name, first
        self.asked = []
        self.is_closed = False
        self.made.append(self)

    def receive(self):
        return {"ready": True}

    def ask(self, message):
        command, arguments = message
        self.asked.append((command, *arguments.values()))
        return getattr(self, command)(**arguments)

    def probe(self):
        growth = {"none": self.plain_growth, "full": 100 * MIB}[self.name]
        longest = self.first["longest"] or self.first["sizes"][0]
        return {
            "growth_bytes": growth,
            "longest": longest,
            "room_bytes": self.rooms[self.name],
            "private_bytes": self.private_bytes,
        }

    def step(self, index):
        if self.fails.get(self.name) == index:
            msg = "memory ran out"
            raise StrategyFailedError(msg)
        known = {"full": 7, "mimose": 5}.get(self.name)
        return {
            "sizes": json.dumps(self.first["sizes"][index]),
            "phase": "plan" if self.name in ("mimose", "mimose-paper") else "",
            "plan": "kr"[index % 2] if self.name == "mimose-paper" else "",
            "base_bytes": 0,
            "start_bytes": 0,
            "peak_bytes": 1,
            "reserved_bytes": 1,
            "host_bytes": 0,
            "predicted_growth_bytes": None,
            "seconds": 0.1,
            "plan_seconds": 0.0,
            "cache_hit": False,
            "recomputed_flops": known,
            "retries": 0,
            "loss": 1.0,
            "load_average": 0.0,
        }

    def count(self, index, phase):
        if self.name == "hf-full":
            msg = "it fails when it is counted"
            raise StrategyFailedError(msg)
        length = self.first["sizes"][index]["length"]
        return {"flops": 100 + length + _MORE.get(self.name, 0) * length**2}

    def rest(self):
        return {}

    def close(self):
        self.is_closed = True


@pytest.fixture
def run(monkeypatch):
    """Run a grid of tc-bert; return its rows by strategy."""
    monkeypatch.setattr(_FakeChild, "made", [])
    monkeypatch.setattr(runner, "Child", _FakeChild)
    machine = dict.fromkeys(("device", "python", "torch", "transformers", "mimose"), "")
    monkeypatch.setattr(runner, "describe_machine", lambda device: machine)

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
        assert all(child.is_closed for child in _FakeChild.made)
        return {
            name: [row for row in rows if row.strategy == name]
            for name in ("none", *strategies)
        }

    return run


def _child(name):
    return next(child for child in _FakeChild.made if child.name == name)


def test_flops_are_counted_on_a_few_sizes(run):
    """Less those of plain training; where a strategy tells its own, nothing is."""
    rows = run("full", "mimose", "selective", trace=_LENGTHS, steps=29)
    lengths = [each["length"] for each in _LENGTHS]
    assert [row.recomputed_flops for row in rows["none"]] == [0] * 30
    assert [row.recomputed_flops for row in rows["mimose"]] == [5] * 30
    selective = [row.recomputed_flops for row in rows["selective"]]
    assert selective == [3 * length**2 for length in lengths]
    for name, times in {"none": 6, "selective": 6, "mimose": 0}.items():
        assert len(_counts(name)) == times


def test_flops_are_counted_by_plan(run):
    """Steps under one plan are taken together, however they alternate by size."""
    rows = run("mimose-paper", trace=_LENGTHS, steps=29)["mimose-paper"]
    assert [row.recomputed_flops for row in rows] == [
        2 * each["length"] ** 2 for each in _LENGTHS
    ]
    assert len(_counts("mimose-paper")) <= 12
    assert {phase for _, _, phase in _counts("mimose-paper")} == {"plan"}


def _counts(name):
    return [asked for asked in _child(name).asked if asked[0] == "count"]


def test_what_cannot_be_counted_is_not_known(run):
    """And it stops nothing else."""
    rows = run("full", "hf-full", "selective")
    assert {row.recomputed_flops for row in rows["hf-full"]} == {None}
    assert None not in {row.recomputed_flops for row in rows["selective"]}


def test_the_longest_batch_is_measured(run):
    """Plain training finds it, and everybody else is told; so is the budget."""
    run("full", "mimose")
    longest = _child("none").first["sizes"][0]
    assert _child("none").first["longest"] is None
    assert _child("full").first["longest"] == longest
    assert _child("mimose").first["longest"] == longest
    assert _child("mimose").first["headroom_bytes"] == 200 * MIB


def test_a_strategy_that_fails_says_so_in_a_row(run):
    """And the others go on."""
    rows = run("static", "mimose")
    assert [row.problem for row in rows["static"]] == ["", "", "memory ran out"]
    assert len(rows["mimose"]) == 6


@pytest.mark.parametrize(("device", "times"), [("cpu", 0), ("cpu:0", 0), ("cuda", 2)])
def test_turns_end_with_a_rest(run, device, times):
    """Where processes share a device's memory: here after four steps and two."""
    run("mimose", device=device)
    rests = [asked for asked in _child("mimose").asked if asked[0] == "rest"]
    assert len(rests) == times


def test_there_has_to_be_something_to_plan(run, monkeypatch):
    """Where keeping everything takes no more, the numbers are told."""
    monkeypatch.setattr(_FakeChild, "plain_growth", 5)
    with pytest.raises(StrategyFailedError, match="grows by 5 bytes"):
        run("mimose")


def test_where_plain_training_does_not_fit(run, monkeypatch):
    """A budget of 1 is what the device has; its rows end where it failed."""
    monkeypatch.setattr(_FakeChild, "plain_growth", None)
    monkeypatch.setattr(_FakeChild, "fails", {"none": 3})
    monkeypatch.setattr(_FakeChild, "rooms", {"none": 520 * MIB, "full": 510 * MIB})
    rows = run("full", "mimose", "hf-full", device="cuda")
    room = 510 - 2 * 10  # two more processes take what the second one took
    assert _child("mimose").first["headroom_bytes"] == (100 + (room - 100) // 2) * MIB
    assert {row.recomputed_flops for row in rows["hf-full"]} == {None}
    assert [row.problem for row in rows["none"]] == ["", "", "", "memory ran out"]
    assert len(rows["mimose"]) == len(rows["full"]) == 6
    with pytest.raises(StrategyFailedError, match="add full to the strategies"):
        run("mimose", device="cuda")


def test_processes_have_to_fit_beside_each_other(run, monkeypatch):
    """Before the kernel ends one of them, or somebody else's."""
    monkeypatch.setattr(_FakeChild, "private_bytes", 2**60)
    with pytest.raises(StrategyFailedError, match=r"1 more processes of 10\d+\.\d GiB"):
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


def test_interrupted_while_flops_are_counted(run, monkeypatch):
    """All steps ran, and still it has to run again."""

    def count(self, index, phase):
        raise KeyboardInterrupt

    monkeypatch.setattr(_FakeChild, "count", count)
    rows = run("mimose")
    assert len(rows["none"]) == 7
    settings = GridSettings(
        workloads=("tc-bert",), strategies=("none", "mimose"), budgets=(0.5,),
        steps=5, warm_up=1,
    )  # fmt: skip
    every = [row for own in rows.values() for row in own]
    assert not is_complete(settings, every)
    assert is_complete(settings, [row for row in every if not row.problem])
