"""Layers that `torch.compile` made code of, one by one.

Note: [Regional compilation]
A plan must not be part of what is compiled: each new one would be compiled anew, and
after a few `torch.compile` gives up. So a compiled layer is planned from the outside:
what is replaced is not its ``forward`` but what its call runs, the compiled code in
it. A whole model has no outside of its layers, and is refused.

Under a dispatch mode compiled code does not run, so what it holds is counted where it
saves it (`saved_storages`), and its FLOPs are estimated from its weights. The early
stop of a recomputation is left out, so that it costs a whole forward. The same holds of
a layer that runs compiled code without being compiled itself (see
`mimose.inputs.code_inside`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from mimose.exceptions import MimoseError
from mimose.torch_private import (
    COMPILED_CALL,
    COMPILED_FROM,
    COMPILED_MODULE,
    pop_saved_hooks,
    push_saved_hooks,
    set_graphs_by_use,
    storage_key,
    submodules_of,
    top_saved_hooks,
)

WHY_NOT_WHOLE = (
    "a plan decides layer by layer, and inside of one compiled graph there are no "
    "layers. Compile the layers instead, before attaching: `for layer in layers: "
    "layer.compile()` (accelerate: use_regional_compilation=True), or train without "
    "torch.compile"
)


def refuse_compiled(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """Make sure that nothing around the units was compiled.

    `torch.compile` of the whole model after `attach` does no harm: a session's steps
    are not traced into.

    Args:
        model: The model, or what `torch.compile` made of it.
        units: The layers that are planned for.

    Raises:
        MimoseError: The model is compiled, or a part of it that holds units.
    """
    planned = {id(unit) for unit in units}
    for name, module in model.named_modules():
        if not _is_compiled_itself(module):
            continue
        holds = any(id(m) in planned for m in module.modules() if m is not module)
        if module is model or (holds and id(module) not in planned):
            what = f"{name or 'the model'} ({type(module).__name__})"
            msg = f"{what} is compiled as a whole: {WHY_NOT_WHOLE}"
            raise MimoseError(msg)


def refuse_scripted(model: nn.Module) -> None:
    """Make sure that TorchScript does not run the model as a whole.

    Args:
        model: The model.

    Raises:
        MimoseError: It does.
    """
    if isinstance(model, torch.jit.ScriptModule):
        msg = (
            "the model is scripted as a whole: no layer of it runs by itself, so that "
            "nothing can be planned. Train it without torch.jit, or script parts of it"
        )
        raise MimoseError(msg)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module, or any in it, is compiled."""
    return any(map(_is_compiled_itself, module.modules()))


def plain_modules(module: nn.Module) -> list[nn.Module]:
    """Return the modules in a module, and itself, that no compiled code runs."""
    compiled = filter(_is_compiled_itself, module.modules())
    inside = {inner for each in compiled for inner in each.modules()}
    return [each for each in module.modules() if each not in inside]


def _is_compiled_itself(module: nn.Module) -> bool:
    return (
        _is_wrapper(module)
        or _is_compiled_in_place(module)
        or forward_is_compiled(module)
    )


def forward_is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` made a module's ``forward``."""
    return hasattr(vars(module).get("forward"), COMPILED_FROM)


def _is_wrapper(module: nn.Module) -> bool:
    return COMPILED_MODULE in submodules_of(module)


def _is_compiled_in_place(module: nn.Module) -> bool:
    return getattr(module, COMPILED_CALL, None) is not None


def called_attribute(module: nn.Module) -> str:
    """Name the attribute that a module's call runs: see Note: [Regional compilation].

    Args:
        module: The module.
    """
    return COMPILED_CALL if _is_compiled_in_place(module) else "forward"


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


class OneGraph(contextlib.AbstractContextManager[None]):
    """While entered, a call that several graphs would serve gets the same each time.

    Otherwise the one used last comes first, and a recomputation may find another than
    its forward did, which saves other tensors (pytorch#166926). It holds for the whole
    process. Where a graph for one size and one for all sizes serve a call, another may
    run than without: with inductor the last bits of a loss can differ by that.
    """

    _n_entered: ClassVar[int] = 0

    def __enter__(self) -> None:
        self._add(1)

    def __exit__(self, *_: object) -> None:
        self._add(-1)

    @classmethod
    def _add(cls, n: int) -> None:
        cls._n_entered += n
        set_graphs_by_use(cls._n_entered == 0)


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
