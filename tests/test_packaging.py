"""What setup.cfg promises is what the checkout holds."""

from __future__ import annotations

import configparser
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("planners", "predictors")

pytestmark = pytest.mark.skipif(
    not (ROOT / "setup.cfg").exists(), reason="runs in a checkout"
)


@pytest.fixture
def options() -> configparser.ConfigParser:
    """The parsed setup.cfg."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def _packages_in_checkout() -> set[str]:
    found = set()
    for top, prefix in [("mimose", ""), *((name, "mimose.") for name in LINKED)]:
        for init in (ROOT / top).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT).parts
            if top == "mimose" and len(parts) > 1 and parts[1] in LINKED:
                continue  # seen through a link
            found.add(prefix + ".".join(parts))
    return found


def test_packages_are_complete(options: configparser.ConfigParser) -> None:
    """Each folder with code is listed."""
    listed = _lines(options["options"]["packages"])

    assert sorted(_packages_in_checkout()) == sorted(listed)


def test_benchmarks_are_not_in_the_wheel(options: configparser.ConfigParser) -> None:
    """Neither modules nor sources are installed; the sdist has both."""
    packages = _lines(options["options"]["packages"])

    assert not [name for name in packages if name.startswith("benchmarks")]
    assert not options["options"].getboolean("include_package_data")
    assert "graft benchmarks" in _lines(
        (ROOT / "MANIFEST.in").read_text(encoding="utf-8")
    )


def test_constraints_name_no_local_version() -> None:
    """A pin such as 2.13.0+cpu could be met by no package index."""
    pins = _lines((ROOT / "constraints.txt").read_text(encoding="utf-8"))

    assert [] == [pin for pin in pins if "+" in pin or "@" in pin]


_SMOKE = """
import importlib, json, pathlib, sys
import torch
import mimose
target, packages = pathlib.Path(sys.argv[1]), sys.argv[2:]
assert target in pathlib.Path(mimose.__file__).parents, mimose.__file__
for package in packages:
    importlib.import_module(package)
layers = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in "abcd"]
model = torch.nn.Sequential(*layers)
with mimose.attach(model, "1TiB") as session:
    for n in (8, 24, 16, 32, 8, 16):
        model(torch.randn(n, 32)).sum().backward()
print(json.dumps([session.summary().steps, sorted(mimose.__all__) != []]))
"""


def test_a_wheel_is_whole(tmp_path: Path) -> None:
    """Built from the sources and put elsewhere, it imports and trains from there."""
    sources, target = tmp_path / "sources", tmp_path / "target"
    sources.mkdir()
    for name in ("mimose", *LINKED):
        no_caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, sources / name, symlinks=True, ignore=no_caches)
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, sources)
    options = configparser.ConfigParser()
    options.read(ROOT / "setup.cfg", encoding="utf-8")
    packages = _lines(options["options"]["packages"])
    quietly = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    install = ["install", *quietly, "--target", str(target), str(sources)]

    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    done = subprocess.run(
        [sys.executable, "-c", _SMOKE, str(target), *packages],
        env={**os.environ, "PYTHONPATH": str(target)},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )

    assert [6, True] == json.loads(done.stdout.splitlines()[-1])
    assert (target / "mimose" / "sim" / "native" / "library.cpp").is_file()
    assert (target / "mimose" / "py.typed").is_file()
