"""The README's code runs, and what it points to is there."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

README = Path(__file__).resolve().parent.parent / "README.md"

pytestmark = pytest.mark.skipif(not README.exists(), reason="runs in a checkout")


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + torch.tanh(self.linear(states))


class _Model(nn.Module):
    """Two layers, and a loss in its output, as the README's model has one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Block(), _Block()])

    def forward(self, inputs: torch.Tensor) -> SimpleNamespace:
        for layer in self.layers:
            inputs = layer(inputs)
        return SimpleNamespace(loss=inputs.square().mean())


@pytest.fixture
def text() -> str:
    """The README."""
    return README.read_text(encoding="utf-8")


def _namespace(folder: Path) -> dict[str, object]:
    transformers = pytest.importorskip("transformers")
    model = _Model()
    return {
        "Trainer": transformers.Trainer,
        "args": transformers.TrainingArguments(str(folder), report_to=[], use_cpu=True),
        "data": [],
        "model": model,
        "loader": [{"inputs": torch.randn(2, length, 8)} for length in (3, 5, 3)],
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
    }


def test_every_python_block_runs(
    text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What a reader copies works, given a model, a loader and an optimizer."""
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)

    assert len(blocks) >= 2
    namespace: dict[str, object] = {}
    for block in blocks:
        namespace |= _namespace(tmp_path)
        exec(compile(block, str(README), "exec"), namespace)
    assert capsys.readouterr().out


def test_links_lead_somewhere(text: str) -> None:
    """Every relative link is a file of the repository."""
    links = re.findall(r"\]\(([^)#]+)\)", text)

    missing = [
        link
        for link in links
        if not link.startswith("https://") and not (README.parent / link).exists()
    ]
    assert links
    assert missing == []


def test_tree_names_what_is_there(text: str) -> None:
    """Every file and folder of the tree exists."""
    tree = text.partition("## Where things are")[2].split("```")[1]

    root = README.parent
    folder = root
    for line in tree.strip().splitlines():
        names = re.findall(r"[^\s,]+", re.split(r"\s{2,}(?=\S)", line.strip())[0])
        base = folder if line.startswith(" ") else root
        assert [name for name in names if not (base / name).exists()] == []
        if not line.startswith(" "):
            folder = root / names[0]


@pytest.mark.parametrize("script", ["demo", "test"])
def test_scripts_it_names_can_be_run(text: str, script: str) -> None:
    """The two commands are there, and executable."""
    path = README.parent / "scripts" / script

    assert f"scripts/{script}" in text
    assert path.stat().st_mode & 0o111
