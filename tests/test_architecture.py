"""Who may import whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mimose.planners
import mimose.predictors

PURE = {
    "planners": Path(mimose.planners.__file__).parent,
    "predictors": Path(mimose.predictors.__file__).parent,
}
ALLOWED = {"numpy", "scipy", "sklearn"} | sys.stdlib_module_names


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every import in a file as (leading dots, module)."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield 0, alias.name
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""


@pytest.mark.parametrize("folder", PURE)
def test_imports_no_torch_and_no_mimose(folder: str) -> None:
    """Planners and predictors know numpy, scikit-learn and scipy alone."""
    strangers = {
        (path.name, module)
        for path in PURE[folder].rglob("*.py")
        for dots, module in _imports(path)
        if dots == 0 and module.partition(".")[0] not in ALLOWED
    }

    assert set() == strangers


@pytest.mark.parametrize("folder", PURE)
def test_relative_imports_stay_inside(folder: str) -> None:
    """More than one dot would leave the folder, whose name differs once installed."""
    outside = {
        path.name
        for path in PURE[folder].rglob("*.py")
        for dots, _ in _imports(path)
        if dots > 1
    }

    assert set() == outside


@pytest.mark.parametrize(
    "statement",
    [
        "import mimose",
        "import mimose.planners, mimose.predictors",
        "import mimose.cli.main",
    ],
)
def test_torch_stays_out(statement: str) -> None:
    """The plain-data half of the library starts without torch."""
    code = f"import sys\n{statement}\nsys.exit('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], check=False)

    assert 0 == done.returncode
