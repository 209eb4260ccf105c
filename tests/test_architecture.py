"""Who may import whom."""

from __future__ import annotations

import subprocess
import sys

import pytest


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
