"""Compiled models are refused."""

from __future__ import annotations

from torch import nn

from mimose.exceptions import MimoseError

WHY = (
    "what a compiled layer holds cannot be measured: run again under the tracker it "
    "saves other tensors than the compiled code did. Train without torch.compile, or "
    "without mimose (torch's own activation_memory_budget chooses inside a graph)"
)


def refuse_compiled(model: nn.Module) -> None:
    """Make sure that no part of a model was compiled.

    `torch.compile` of the whole model after `attach` does no harm: a session's steps
    are not traced into.

    Args:
        model: The model, or what `torch.compile` made of it.

    Raises:
        MimoseError: The model or a module in it is compiled.
    """
    for name, module in model.named_modules():
        is_wrapped = "_orig_mod" in module._modules
        if is_wrapped or getattr(module, "_compiled_call_impl", None) is not None:
            what = f"{name or 'the model'} ({type(module).__name__})"
            msg = f"{what} is compiled, and {WHY}"
            raise MimoseError(msg)
