"""What `attach` is given, checked once, at the door."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import distributed, nn

_GONE = {
    "round_to": "round the sizes of your batches where they are made",
    "max_records": "name a file for all records with record_to",
    "max_error": "compare losses with and without lossy actions",
    "cost": "plans save the device's seconds as they are",
    "hard_limit": "it is called wall now",
}
"""Arguments of earlier versions, and what to do in their place."""


def layers_of(
    attach: Callable[..., Any], layers: Any, others: Mapping[str, Any]
) -> Any:
    """Return the layers to plan for, which may be given as ``units``.

    Args:
        attach: `mimose.attach`, which lists the arguments that there are.
        layers: As ``layers``.
        others: Arguments by names that `mimose.attach` does not list.

    Raises:
        TypeError: It has no such argument, or has both.
    """
    for name in others:
        if name in _GONE:
            msg = f"attach has no argument {name!r} any more: {_GONE[name]}"
            raise TypeError(msg)
        if name != "units":
            known = set(inspect.signature(attach).parameters)
            near = difflib.get_close_matches(name, known - {"others"})
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            msg = f"attach has no argument {name!r}{hint}"
            raise TypeError(msg)
    if layers is not None and "units" in others:
        msg = "attach was given layers and units, which are the same: give one"
        raise TypeError(msg)
    return others.get("units", layers)


def check_choices(on_infeasible: str, cache_size: int) -> None:
    """Make sure that the arguments that are plain values can be used.

    Raises:
        ValueError: One cannot; the message has it, and what it may be.
    """
    if on_infeasible not in ("raise", "warn"):
        msg = f"on_infeasible must be 'raise' or 'warn', got {on_infeasible!r}"
        raise ValueError(msg)
    is_count = isinstance(cache_size, int) and not isinstance(cache_size, bool)
    if not is_count or cache_size < 1:
        msg = f"cache_size must be an integer of at least 1, got {cache_size!r}"
        raise ValueError(msg)


def check_agree(agree: object) -> None:
    """Make sure that ranks can agree as they are asked to.

    Raises:
        TypeError: It is neither a word nor a group.
        ValueError: It is another word, or a group that cannot carry the CPU's tensors,
            or that this rank is no part of.
    """
    if agree is None or agree == "auto":
        return
    if not (distributed.is_available() and distributed.is_initialized()):
        msg = (
            f"agree must be 'auto' or None as long as torch.distributed is not "
            f"initialised, got {agree!r}"
        )
        raise ValueError(msg)
    if isinstance(agree, str) or not isinstance(agree, distributed.ProcessGroup):
        msg = f"agree must be 'auto', None or a process group, got {agree!r}"
        raise ValueError(msg) if isinstance(agree, str) else TypeError(msg)
    if distributed.get_rank(agree) < 0:
        msg = (
            f"agree: rank {distributed.get_rank()} is no part of the group that it was "
            f"given; give each rank a group that it is in"
        )
        raise ValueError(msg)
    config = str(distributed.get_backend_config(agree))
    if "cpu" not in config:
        msg = (
            f"agree: the group is one of {config!r}, which carries no tensors of the "
            f"CPU: give torch.distributed.new_group(backend='gloo')"
        )
        raise ValueError(msg)


def check_watched(loader: object) -> None:
    """Make sure that batches can be taken from a loader.

    Raises:
        TypeError: It cannot be iterated over.
    """
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        msg = f"watch needs an iterable of batches, got {loader!r}"
        raise TypeError(msg)


def check_shapes(shapes: Iterable[Mapping[str, int]]) -> list[Mapping[str, int]]:
    """Return shapes that are given by name, as a list.

    Raises:
        TypeError: One is no mapping, or is not iterable.
        ValueError: A size is no integer of at least 1.
    """
    if isinstance(shapes, Mapping):
        msg = f"expect needs several shapes, such as [{dict(shapes)!r}], got one"
        raise TypeError(msg)
    listed: list[Any] = list(shapes)
    for shape in listed:
        if not isinstance(shape, Mapping):
            msg = (
                f"expect needs shapes as mappings of names to sizes, such as "
                f"{{'input_ids.1': 512}}, got {shape!r}"
            )
            raise TypeError(msg)
        for name, size in shape.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                msg = f"expect: {name} must be an integer of at least 1, got {size!r}"
                raise ValueError(msg)
    return listed


def raise_if_no_model(model: object) -> None:
    """Make sure that there is a model.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(model, nn.Module):
        msg = f"a session needs a model, a torch.nn.Module, got {model!r}"
        raise TypeError(msg)
