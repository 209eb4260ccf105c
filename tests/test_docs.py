"""The docs and the README: links lead somewhere, code runs, commands exist."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toys import Residual

import mimose
from mimose import planners, predictors
from mimose.cli import main as cli

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
WRITTEN = [*PAGES, *sorted(DOCS.glob("results/*.md")), ROOT / "README.md"]
_FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)

pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="runs in a checkout")


def _prose(path: Path) -> str:
    """Return a page without its blocks of code."""
    return _FENCE.sub("", path.read_text(encoding="utf-8"))


def _blocks(path: Path, language: str) -> list[str]:
    found = _FENCE.findall(path.read_text(encoding="utf-8"))
    return [code for name, code in found if name == language]


def _anchors(path: Path) -> set[str]:
    """Return what a link may name behind ``#``: headings, and targets ``(name)=``."""
    text = _prose(path)
    named = set(re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE))
    for title in re.findall(r"^#{1,3} (.+)$", text, re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", title.lower())
        named.add(plain.strip().replace(" ", "-"))
    return named


# ---------------------------------------------------------------------------- links


@pytest.mark.parametrize("page", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Every link to a file, and every anchor in it, is there."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        if link.startswith(("https://", "http://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)

    assert broken == []


# ---------------------------------------------------------------------------- code


class _Output(dict):
    """What a model of transformers returns: a mapping with attributes."""

    @property
    def loss(self) -> torch.Tensor:
        """The loss."""
        loss: torch.Tensor = self["loss"]
        return loss


class _Model(nn.Module):
    """Two layers, and a loss in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual(8, 8) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> _Output:
        states = input_ids
        for layer in self.layers:
            states = layer(states)
        return _Output(loss=states.square().mean())


def _batches() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": torch.randn(2, length, 8)} for length in (3, 5, 3)]


def _given(code: str, tmp_path: Path) -> dict[str, Any]:
    """Make what a block takes for granted."""
    model = _Model()
    batches = _batches()
    given: dict[str, Any] = {
        "mimose": mimose,
        "model": model,
        "loader": batches,
        "batch": batches[0],
        "largest_batch": batches[1],
        "data": [batch["input_ids"][0] for batch in batches],
        "lengths": [batch["input_ids"].shape[1] for batch in batches],
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
    }
    if "transformers" in code:
        given |= _given_to_a_trainer(tmp_path)
    if "lightning" in code:
        given["lightning_module"] = _lightning_module()
        given["loader"] = torch.utils.data.DataLoader(batches, batch_size=None)
    return given


def _given_to_a_trainer(tmp_path: Path) -> dict[str, Any]:
    pytest.importorskip("transformers")
    from trainer_toys import arguments

    args = arguments(tmp_path, per_device_train_batch_size=1, max_steps=3)
    return {
        "args": args,
        "data": [{"input_ids": b["input_ids"][0]} for b in _batches()],
    }


def _lightning_module() -> Any:
    lightning: Any = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = _Model()

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Module()


@pytest.fixture
def trained() -> Iterator[mimose.Session]:
    """Hand out a session with a few steps behind it, for blocks that only read one."""
    model = _Model()
    with mimose.attach(model, budget="6GiB") as session:
        for batch in _batches() * 2:
            model(**batch).loss.backward()
        yield session


PAGES_WITH_CODE = [page for page in WRITTEN if _blocks(page, "python")]


@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda path: path.stem)
def test_every_python_block_runs(
    page: Path, trained: mimose.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a reader copies works, given a model, batches and an optimizer."""
    monkeypatch.chdir(tmp_path)
    for code in _blocks(page, "python"):
        namespace = {"session": trained, **_given(code, tmp_path)}
        with warnings.catch_warnings():
            if "Trainer" in code:  # trainers warn of settings that save time here
                warnings.simplefilter("ignore")
            if ".compile(" in code:  # no compiler for C++, and torch's own warnings
                warnings.simplefilter("ignore")
                quick = functools.partialmethod(nn.Module.compile, backend="aot_eager")
                monkeypatch.setattr(nn.Module, "compile", quick)
            exec(compile(code, str(page), "exec"), namespace)
        session = namespace["session"]
        if session is not trained:
            session.detach()
            assert len(session.records) >= 2


# ---------------------------------------------------------------------------- messages


def _text(node: ast.expr | None) -> str:
    """Return a string as a page quotes it, with an ellipsis for what varies."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%\w", "…", node.value)
    return "…"


def _strings() -> Iterator[str]:
    parts = mimose, planners, predictors
    folders = [Path(str(part.__file__)).resolve().parent for part in parts]
    for path in {path for folder in folders for path in folder.rglob("*.py")}:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr | ast.Constant):
                yield _text(node)


def _messages() -> Iterator[str]:
    """Yield what is raised or logged where a user trains."""
    package = Path(mimose.__file__).parent
    for path in package.rglob("*.py"):
        if path.relative_to(package).parts[0] in ("__init__.py", "bench", "cli", "sim"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Assign(targets=[ast.Name("msg")], value=value):
                    yield _text(value)
                case ast.Raise(exc=ast.Call(args=[ast.JoinedStr() as value, *_])):
                    yield _text(value)
                case ast.Call(func=ast.Attribute(ast.Name("_log")), args=[value, *_]):
                    yield _text(value)


def _quoted() -> list[list[str]]:
    """Return the messages of the page, each in pieces between what varies."""
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`.*?) \| ", text, re.MULTILINE)
    quoted = [message for cell in cells for message in re.findall("`([^`]+)`", cell)]
    foreign = "OutOfMemoryError"
    return [
        [piece.strip() for piece in message.split("…") if len(piece.strip()) > 2]
        for message in quoted
        if not message.startswith(foreign)
    ]


def test_messages_of_the_page_are_those_of_the_library() -> None:
    """Whoever searches for a message finds it, and no row is of one that is gone."""
    strings = list(_strings())
    gone = [
        pieces
        for pieces in _quoted()
        if not all(any(piece in string for string in strings) for piece in pieces)
    ]

    assert len(strings) > 500
    assert gone == []


def test_every_message_is_on_the_page() -> None:
    """Troubleshooting says what to do for each error and each warning."""
    quoted = [pieces for pieces in _quoted() if len("".join(pieces)) > 5]
    found = [message for message in _messages() if len(message) > 20]
    unknown = [
        message
        for message in found
        if not any(all(piece in message for piece in pieces) for pieces in quoted)
    ]

    assert len(found) > 100
    assert unknown == []


# ---------------------------------------------------------------------------- commands


def _commands() -> list[str]:
    """Return every command line of ``mimose`` that a page names."""
    lines = []
    for page in WRITTEN:
        for code in _blocks(page, "sh"):
            lines += [line.partition("#")[0] for line in code.splitlines()]
        lines += re.findall(r"`([^`]+)`", _prose(page).replace("\n", " "))
    return sorted({line.strip() for line in lines if line.startswith("mimose ")})


@pytest.mark.parametrize("line", _commands())
def test_command_lines_exist(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command is one of mimose's, and every option is in its help."""
    name, *arguments = shlex.split(line)[1:]

    with pytest.raises(SystemExit) as raised:
        cli.main([name, "--help"])

    assert raised.value.code == 0
    known = capsys.readouterr().out
    options = [text for text in arguments if text.startswith("-")]
    assert [option for option in options if option not in known] == []


# ---------------------------------------------------------------------------- the site


@pytest.mark.parametrize("name", ["house", "step"])
def test_drawing_is_what_its_script_draws(name: str) -> None:
    """Each picture is what its script draws by now."""
    drawn = runpy.run_path(str(DOCS / "images" / f"draw_{name}.py"))["drawing"]()

    assert (DOCS / "images" / f"{name}.svg").read_text(encoding="utf-8") == drawn


def test_files_that_how_it_works_names_are_there() -> None:
    """Whoever looks for a task finds its file."""
    text = _prose(DOCS / "how_it_works.md")
    homes = [ROOT, *(ROOT / "mimose" / n for n in (".", "actions", "planners"))]
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", text))

    assert len(named) > 50
    assert [n for n in named if not any((home / n).exists() for home in homes)] == []


_NEEDED = ("sphinx", "myst_parser", "furo", "transformers", "lightning")
_MISSING = [name for name in _NEEDED if importlib.util.find_spec(name) is None]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(_MISSING), reason=f"missing: {', '.join(_MISSING)}")
def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Every reference of every page and docstring is resolved."""
    options = ["-W", "--keep-going", "-n", "-q", "-b", "html"]
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, str(DOCS), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )

    assert built.stderr == ""
    assert built.returncode == 0
    assert (tmp_path / "api.html").exists()
