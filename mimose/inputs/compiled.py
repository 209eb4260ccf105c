"""Layers that run compiled or scripted code, and how they are planned all the same.

Note: [Regional compilation]
A plan must not be part of what is compiled: each new one would be compiled anew, and
after a few `torch.compile` gives up. So a compiled layer is planned from the outside:
what is replaced is not its ``forward`` but what its call runs, the compiled code in
it. A whole model has no outside of its layers, and is refused. Under a dispatch mode
compiled code does not run, so what it holds is counted where it saves it
(`saved_storages`). The early stop of a recomputation is left out.

Note: [Scripted code]
TorchScript's executor watches the first run of a function and rewrites it for later
ones, and again for other sizes. A recomputation is a later run than its forward, and
may save other tensors, in another order: a layer that runs it is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from mimose.exceptions import MimoseError
from mimose.tensors import operators_of
from mimose.torch_private import (
    COMPILED_CALL,
    COMPILED_FROM,
    COMPILED_MODULE,
    COMPILED_NODE,
    NOT_COMPILED,
    SCRIPTED_NODE,
    SCRIPTED_TYPES,
    pop_saved_hooks,
    push_saved_hooks,
    set_graphs_by_use,
    storage_key,
    submodules_of,
    top_saved_hooks,
)

WHY_NOT_WHOLE = (
    "mimose plans layer by layer, and a single compiled graph has no layers. Compile "
    "the layers instead, before you attach: `for layer in layers: layer.compile()` "
    "(accelerate: use_regional_compilation=True), or train without torch.compile"
)
SCRIPTED = (
    "it runs TorchScript, which may save different tensors in each run; without "
    "torch.jit mimose can recompute it"
)
_FROM_TORCH = ("torch", "mimose")
"""Packages whose functions run no code of the user's that they are not given."""


def raise_if_compiled(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Make sure that nothing around the layers was compiled.

    `torch.compile` of the whole model after `attach` does no harm: a session's steps
    are not traced into.

    Args:
        model: The model, or what `torch.compile` made of it.
        layers: The layers that are planned for.

    Raises:
        MimoseError: The model is compiled, or a part of it that holds layers.
    """
    planned = {id(layer) for layer in layers}
    for name, module in model.named_modules():
        if not _is_compiled_itself(module):
            continue
        holds = any(id(m) in planned for m in module.modules() if m is not module)
        if module is model or (holds and id(module) not in planned):
            what = f"{name or 'the model'} ({type(module).__name__})"
            msg = f"{what} is compiled as a whole: {WHY_NOT_WHOLE}"
            raise MimoseError(msg)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module, or any in it, is compiled."""
    return any(map(_is_compiled_itself, module.modules()))


def _is_compiled_itself(module: nn.Module) -> bool:
    return (
        _is_wrapper(module)
        or getattr(module, COMPILED_CALL, None) is not None
        or hasattr(vars(module).get("forward"), COMPILED_FROM)
    )


def _is_wrapper(module: nn.Module) -> bool:
    return COMPILED_MODULE in submodules_of(module)


def called_attribute(module: nn.Module) -> str:
    """Name the attribute that a module's call runs: see Note: [Regional compilation].

    Args:
        module: The module.
    """
    is_in_place = getattr(module, COMPILED_CALL, None) is not None
    return COMPILED_CALL if is_in_place else "forward"


def wrappers(model: nn.Module) -> dict[int, tuple[str, nn.Module]]:
    """Return, by identity of the module inside, the wrappers of `torch.compile`.

    Args:
        model: Where to look.
    """
    return {
        id(submodules_of(module)[COMPILED_MODULE]): (name, module)
        for name, module in model.named_modules()
        if _is_wrapper(module)
    }


def unwrapped(module: nn.Module) -> nn.Module:
    """Return what is inside of a wrapper of `torch.compile`; else the module."""
    while _is_wrapper(module):
        module = module.get_submodule(COMPILED_MODULE)
    return module


def code_inside(root: nn.Module) -> tuple[bool, bool]:
    """Return whether a layer runs compiled, and whether scripted code, by its names.

    Looked at are the modules inside, their attributes, and the functions that their
    classes' methods name among globals and closures, and so on. What a forward finds
    in other ways shows in the graph of its first call: see `code_in_graph`.

    Args:
        root: The layer.
    """
    has_compiled, has_scripted = is_compiled(root), False
    left: list[object] = list(root.modules())
    seen: set[int] = set()
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, SCRIPTED_TYPES):
            has_scripted = True
        elif isinstance(value, nn.Module):
            left += [v for v in vars(value).values() if callable(v)]
            left += [
                vars(cls)[name]
                for cls in type(value).__mro__
                if not _is_from_torch(cls.__module__)
                for name in vars(cls)
            ]
        elif isinstance(value, (staticmethod, classmethod)):
            left.append(value.__func__)
        elif isinstance(value, FunctionType):
            own = vars(value)
            has_compiled |= COMPILED_FROM in own and NOT_COMPILED not in own
            left += _named_by(value)
    return has_compiled, has_scripted


def _named_by(function: FunctionType) -> list[object]:
    """Return the functions that a function names, in globals and closures."""
    found: list[object] = [vars(function).get(COMPILED_FROM)]
    found.append(vars(function).get("__wrapped__"))
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty
            found.append(cell.cell_contents)
    if not _is_from_torch(function.__module__):
        codes: list[object] = [function.__code__]
        while codes:
            code = codes.pop()
            if isinstance(code, CodeType):
                known = function.__globals__
                found += [known[name] for name in code.co_names if name in known]
                codes += code.co_consts
    kinds = (FunctionType, *SCRIPTED_TYPES)
    return [each for each in found if isinstance(each, kinds)]


def _is_from_torch(package: str | None) -> bool:
    return (package or "").partition(".")[0] in _FROM_TORCH


def code_in_graph(output: object, began: int) -> tuple[bool, bool]:
    """Return whether compiled, and whether scripted code made a part of a graph.

    Args:
        output: What a call has returned.
        began: What `next_sequence_number` said before.
    """
    names = operators_of(output, began)
    return (
        any(name.startswith(COMPILED_NODE) for name in names),
        any(name.endswith(SCRIPTED_NODE) for name in names),
    )


_n_one_graph = 0
"""How often `one_graph` is entered just now."""


@contextlib.contextmanager
def one_graph() -> Iterator[None]:
    """While entered, a call that several graphs would serve gets the same each time.

    Otherwise the one used last comes first, and a recomputation may find another than
    its forward did, which saves other tensors (pytorch#166926). It holds for the whole
    process. Where a graph for one size and one for all sizes serve a call, another may
    run than without: with inductor the last bits of a loss can differ by that.
    """
    global _n_one_graph
    _n_one_graph += 1
    set_graphs_by_use(False)
    try:
        yield
    finally:
        _n_one_graph -= 1
        set_graphs_by_use(_n_one_graph == 0)


@contextlib.contextmanager
def saved_storages() -> Iterator[dict[int, torch.UntypedStorage]]:
    """Collect, by identity, the storages of the tensors saved for a backward meanwhile.

    Whoever else watches what is saved, such as `torch.utils.checkpoint`, does so still.
    Read it before the end: it is empty then, and holds no storage.
    """
    outer = top_saved_hooks(False)
    pack, unpack = outer if outer is not None else (_same, _same)
    found: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> Any:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            found[storage_key(storage)] = storage
        return pack(tensor)

    disable: Any = torch.compiler.disable
    push_saved_hooks(disable(note), unpack)
    try:
        yield found
    finally:
        pop_saved_hooks()
        found.clear()  # the hook may live on, in a cycle


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
