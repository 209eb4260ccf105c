"""Finds layers that run compiled or scripted code, and how to plan them.

Note: [Regional compilation]
A plan must not be part of compiled code: each new plan would cause a compilation, and
after a few `torch.compile` gives up. So a compiled layer is planned from the outside:
mimose replaces what the module's call runs, not the ``forward`` inside the compiled
code. A model that is compiled as a whole has no such place, so it is an error. Compiled
code does not run under a dispatch mode, so its held bytes are counted by the tensors
that it saves (`mimose.measure.gauges.by_saved`). Its recomputation runs to the end.

If several compiled graphs fit a call, torch tries the one used last first. So a
recomputation may use another graph than its forward, which saves other tensors
(pytorch#166926). So graphs are tried by their age while a session has a compiled layer,
in the whole process. If a graph for one size and one for all sizes fit a call, another
may run than without it: with inductor, the last bits of a loss can differ.

Note: [Scripted code]
TorchScript's executor profiles the first run of a function and rewrites it for later
runs, and again for other sizes. A recomputation runs later than its forward, so it may
save other tensors, in another order. Layers with scripted code are kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import CodeType, FunctionType

from torch import nn

from mimose.exceptions import MimoseError
from mimose.tensors import nodes_of
from mimose.torch_private import (
    COMPILED_CALL,
    COMPILED_FROM,
    COMPILED_MODULE,
    COMPILED_NODE,
    NOT_COMPILED,
    SCRIPTED_NODE,
    SCRIPTED_TYPES,
    submodules_of,
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
"""Packages whose functions run no code of the user that is not passed to them."""


def raise_if_compiled(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Check that no module around the layers is compiled.

    `torch.compile` of the whole model after `attach` does no harm, because it does not
    trace a session's steps.

    Args:
        model: The model, or its wrapper of `torch.compile`.
        layers: The layers.

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


def _is_compiled_itself(module: nn.Module) -> bool:
    return (
        _is_wrapper(module)
        or getattr(module, COMPILED_CALL, None) is not None
        or hasattr(vars(module).get("forward"), COMPILED_FROM)
    )


def _is_wrapper(module: nn.Module) -> bool:
    return COMPILED_MODULE in submodules_of(module)


def called_attribute(module: nn.Module) -> str:
    """Return the attribute that a module's call runs: Note: [Regional compilation].

    Args:
        module: The module.
    """
    is_in_place = getattr(module, COMPILED_CALL, None) is not None
    return COMPILED_CALL if is_in_place else "forward"


def wrappers(model: nn.Module) -> dict[int, tuple[str, nn.Module]]:
    """Return the wrappers of `torch.compile` in a model, by identity of their module.

    Args:
        model: The model.
    """
    return {
        id(submodules_of(module)[COMPILED_MODULE]): (name, module)
        for name, module in model.named_modules()
        if _is_wrapper(module)
    }


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside a wrapper of `torch.compile`; otherwise the module."""
    while _is_wrapper(module):
        module = module.get_submodule(COMPILED_MODULE)
    return module


def code_inside(root: nn.Module) -> tuple[bool, bool]:
    """Return whether a layer can run compiled, and whether scripted code.

    It searches the modules inside, their attributes, and the functions that methods of
    their classes name among globals and closures, recursively. Other code shows in the
    graph of the first call: see `code_in_graph`.

    Args:
        root: The layer.
    """
    has_compiled = any(map(_is_compiled_itself, root.modules()))
    has_scripted = False
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
    """Return whether compiled, and whether scripted code made nodes of a graph.

    Args:
        output: What a call returned.
        began: What `next_sequence_number` returned before the call.
    """
    names = {node.name() for node in nodes_of(output, began)}
    return (
        any(name.startswith(COMPILED_NODE) for name in names),
        any(name.endswith(SCRIPTED_NODE) for name in names),
    )
