"""Who may import whom."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parent.parent
_LIBRARY = [
    path
    for folder in ("mimose", "planners", "predictors")
    for path in (_ROOT / folder).rglob("*.py")
    if not path.is_relative_to(_ROOT / "mimose" / "bench")
]


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


def _foreign_writes(tree: ast.AST) -> Iterator[str]:
    """Yield the attributes that are set on another object than ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        else:
            continue
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                text = ast.unparse(each)
                if isinstance(each, ast.Attribute) and (
                    text.split(".")[0] not in ("self", "cls") or text.count(".") > 1
                ):
                    yield text


def test_objects_change_themselves() -> None:
    """Few lines set an attribute of another object: its owner has a method for that."""
    texts = [path.read_text(encoding="utf-8") for path in _LIBRARY]
    n_writes = sum(len(list(_foreign_writes(ast.parse(text)))) for text in texts)

    assert n_writes <= 2.8e-3 * sum(len(text.splitlines()) for text in texts)


def test_a_file_is_one_idea() -> None:
    """A file with many banners between its parts is several files."""
    banner = re.compile(r"^ *# -{10,}", re.MULTILINE)
    n_banners = {
        str(path.relative_to(_ROOT)): len(banner.findall(path.read_text("utf-8")))
        for path in _LIBRARY
    }

    assert max(n_banners.values()) <= 6, n_banners
    assert sum(n_banners.values()) <= 45, n_banners
