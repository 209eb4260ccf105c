"""Private parts of torch are named in one module."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import mimose

CORE = Path(mimose.__file__).parent
ONE = CORE / "torch_private.py"
FILES = sorted(
    path
    for path in CORE.rglob("*.py")
    if path != ONE and path.relative_to(CORE).parts[0] not in ("bench", "planners")
)
OWN = ("self", "cls")


@functools.cache
def _names_of_torch() -> set[str]:
    """Private attributes of what models are made of, and those the module names."""
    leaf = torch.zeros(1, requires_grad=True)
    objects = [
        leaf,
        (leaf * 1).grad_fn,
        leaf.untyped_storage(),
        nn.Linear(1, 1),
        torch.nn.modules.conv,
        torch.optim.SGD([leaf]),
        torch.optim.Optimizer,
        torch.utils.checkpoint,
        torch.autograd.Variable,
        torch.ops.aten.add.Tensor,
    ]
    found = {name for one in objects for name in dir(one)}
    for node in ast.walk(ast.parse(ONE.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return {name for name in found if _is_private(name)}


def _slots(node: ast.AST) -> Iterator[ast.AST]:
    """Everything that an assignment to `__slots__` says: names of our own."""
    if isinstance(node, ast.Assign) and "__slots__" in ast.unparse(node.targets[0]):
        yield from ast.walk(node.value)


def _is_private(name: str) -> bool:
    return name.isidentifier() and name.startswith("_") and not name.startswith("__")


def _private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """What a file says of torch that has an underscore, by line."""
    names = _names_of_torch()
    slots = {id(part) for node in ast.walk(tree) for part in _slots(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            # `self._modules` is ours; `module._modules` is torch's.
            if not (isinstance(node.value, ast.Name) and node.value.id in OWN):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and node.value in names:
            if id(node) in slots:
                continue
            yield node.lineno, node.value
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", "") or ""
            for alias in node.names:
                path = f"{module}.{alias.name}".strip(".").split(".")
                if path[0] == "torch" and any(map(_is_private, path)):
                    yield node.lineno, ".".join(path)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(CORE)))
def test_no_private_torch_elsewhere(path: Path) -> None:
    """No other module of the library names a private part of torch."""
    found = list(_private_names(ast.parse(path.read_text(encoding="utf-8"))))

    assert [] == found
