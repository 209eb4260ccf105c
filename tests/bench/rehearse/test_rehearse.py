"""A training on a card that is not there, in processes as a user has them."""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
from pathlib import Path

import pytest
import torch

import mimose
from mimose.cli.main import main
from mimose.exceptions import RehearsalError, StateMismatchError
from mimose.sim.build import build

pytestmark = pytest.mark.timeout(600)  # processes that import torch, on any machine
FIXTURES = str(Path(__file__).parents[2] / "fixtures")
BUDGET = "56MiB"
"""32 MiB of it are cuBLAS's workspace, which the device that computes has not."""
LENGTHS = random.Random(3).choices(range(16, 129), k=60)


@pytest.fixture(scope="module", autouse=True)
def toys():
    """Return the module of a user's, as its name finds it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FIXTURES)
        known = os.environ.get("PYTHONPATH", "")
        patch.setenv("PYTHONPATH", os.pathsep.join([FIXTURES, known]))
        yield importlib.import_module("rehearse_toys")


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """Return what a rehearsal of a small model says, and its folder."""
    out = tmp_path_factory.mktemp("rehearse")
    options = {"lengths": LENGTHS, "budget": BUDGET, "steps": 40, "progress": False}
    files = {"save": out / "state.json", "out": out / "page.html"}
    (found,) = mimose.rehearse("rehearse_toys:small", "h100", **options, **files)
    return found, out


def test_it_is_planned_within_the_budget(rehearsed):
    """Layers are kept as far as there is room, and bytes are predicted."""
    found, out = rehearsed
    planned = [step for step in found.steps if step["phase"] == "plan"]

    assert found.fits
    assert (0, 0) == (found.over, found.missing_bytes)
    assert found.peak_bytes <= found.budget_bytes == 56 * 2**20
    assert any(0 < step["recomputed"] < step["calls"] for step in planned)
    assert found.error_p99 < 0.01
    assert found.held["optimizer"] > found.held["weights"] > 2**20
    assert found.largest["ids.1"] >= max(LENGTHS)
    assert sum(found.holders.values()) <= found.peak_bytes
    parts = {"weights", "optimizer", "activations", "logits and loss", "fragmentation"}
    assert parts <= set(found.holders)
    table = found.holders["logits and loss"] / (8 * max(LENGTHS) * 100 * 4)
    assert 2 <= table <= 4  # logits, what the loss saves, their gradient
    assert found.items_per_second > 0
    assert "<html" in (out / "page.html").read_text("utf-8")
    assert "fits" in str(found)


@pytest.mark.sim
def test_what_it_learned_is_loaded_on_a_device_that_computes(sim, toys, rehearsed):
    """There it plans from the first step, and gradients are the bare model's."""
    _, out = rehearsed
    state = json.loads((out / "state.json").read_text("utf-8"))
    torch.manual_seed(0)
    model, bare = toys.Model().to("sim"), toys.Model().to("sim")
    bare.load_state_dict(model.state_dict())
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (model, bare)]
    with mimose.attach(model, "24MiB", refine=False) as session:
        session.load_state_dict(state)
        for length in (57, 101, 128, 23, 90, 119):
            batch = {k: v.to("sim") for k, v in toys.batch(8, length).items()}
            for each in (model, bare):
                each(**batch)["loss"].backward()
            pairs = zip(model.parameters(), bare.parameters(), strict=True)
            assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        phases = [record.phase for record in session.records]
        summary = session.summary()

    assert ["step_down", "step_down", "plan", "plan", "plan", "plan"] == phases
    assert 0 == summary.steps_over
    assert "h100" in summary.rehearsed
    assert "rehearsal on h100" in session.report()


def test_it_is_told_apart_from_another_torch_and_from_a_cpu(toys, rehearsed):
    """Bytes of another version, or of no accelerator, are refused."""
    _, out = rehearsed
    state = json.loads((out / "state.json").read_text("utf-8"))
    with (
        mimose.attach(toys.Model(), "8GiB") as session,
        pytest.raises(StateMismatchError, match="meter"),
    ):
        session.load_state_dict(state)
    state["of"]["settings"]["torch"] = "2.1.0"
    with (
        mimose.attach(toys.Model(), "8GiB") as session,
        pytest.raises(StateMismatchError, match=r"torch: '2\.1\.0' there"),
    ):
        session.load_state_dict(state)


@pytest.mark.parametrize(
    ("name", "share"), [("sharded", 1 / 16), ("replicated", 1.0), ("split", 0.3225)]
)
def test_one_rank_holds_its_share(toys, name, share):
    """Of 16 ranks each holds a sixteenth of what is sharded, and they exchange."""
    (found,) = mimose.rehearse(
        f"rehearse_toys:{name}", "a10:4", ranks=16, steps=14, progress=False
    )
    whole = sum(p.nbytes for p in toys.Model(512).parameters())

    assert found.fits
    assert found.held["weights"] == pytest.approx(share * whole, rel=0.02)
    assert found.collective_seconds > 0
    assert ("gathered weights" in found.holders) == (name == "sharded")


def test_cards_get_a_line_each(capsys, tmp_path):
    """The smallest that is enough is named; lengths come from a file."""
    lengths = tmp_path / "lengths.json"
    lengths.write_text(json.dumps({"ids.1": [128, 256]}), encoding="utf-8")
    options = ["--lengths", str(lengths), "--steps", "3", "--cards", "a10:0.5005,a10:2"]
    assert main(["rehearse", "--model", "rehearse_toys:small", *options]) == 0
    said = capsys.readouterr().out
    assert "a10 with 2 GiB is enough" in said

    options = ["--steps", "3", "--cards", "a10:0.5005", "--json"]
    assert main(["rehearse", "--model", "rehearse_toys:small", *options]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert not found["fits"]
    assert found["missing_bytes"] > 0


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("foreign", r"layers\.2 .*flash_attn.*sdpa"),
        ("on_cuda", r"get_default_device"),
        ("selects", r"index.*line \d+.*mask"),
        ("graphed", r"make_graphed_callables"),
        ("nested", r"ids .*nested.*pad"),
        ("nothing", r"nothing"),
    ],
)
def test_what_cannot_be_rehearsed_is_said(name, says):
    """The message says what is in the way, and what to do."""
    with pytest.raises(RehearsalError, match=says):
        mimose.rehearse(f"rehearse_toys:{name}", steps=12, progress=False)


def test_batches_of_ones_own(toys):
    """A function beside `make` yields them, and each is trained as it is."""
    (found,) = mimose.rehearse(
        "rehearse_batches:make", "a10:4", steps=9, progress=False
    )
    assert [32, 64, 96] * 3 == [step["shape"]["ids.1"] for step in found.steps]
    assert {8 * 32, 8 * 64, 8 * 96} == {step["items"] for step in found.steps}


def test_branches_on_values_are_told():
    """The line that reads a number is named, and the rehearsal goes on."""
    (found,) = mimose.rehearse("rehearse_toys:branches", steps=2, progress=False)
    (note,) = found.notes
    assert "rehearse_toys.py" in note


def test_without_a_compiler_there_is_a_remedy(monkeypatch, tmp_path):
    """A machine that cannot compile says what to install."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RehearsalError, match="install one"):
        mimose.rehearse("rehearse_toys:small")


def test_a_compiler_may_bring_arguments(monkeypatch, tmp_path):
    """As where CXX calls it through another program."""
    program = tmp_path / "fake.py"
    program.write_text(
        "import sys; open(sys.argv[sys.argv.index('-o') + 1], 'w').write(sys.argv[1])",
        encoding="utf-8",
    )
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", f"{sys.executable} {program} --flag")
    assert "--flag" == build().read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "lengths", [[], [0], ["a"], {"ids.1": [1], "labels.1": [1, 2]}]
)
def test_bad_lengths_are_refused(lengths):
    """Before anything runs."""
    with pytest.raises(RehearsalError, match="whole numbers"):
        mimose.rehearse("rehearse_toys:small", lengths=lengths)


def test_an_unknown_card_is_refused():
    """The message names those that there are."""
    with pytest.raises(RehearsalError, match="rtx4090"):
        mimose.rehearse("rehearse_toys:small", "tpu")
