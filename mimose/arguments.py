"""Checks the arguments of the public functions, once, where they come in."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from torch import distributed, nn

_GONE = {
    "round_to": "round the sizes of your batches where you make them",
    "max_records": "use record_to to write all records to a file",
    "max_error": "compare losses with and without lossy actions",
    "cost": "leave it out, plans always save the device's time",
    "hard_limit": "its name is wall now",
}
"""Arguments of earlier versions, and what to do instead."""


def raise_if_unknown(
    unknown: Mapping[str, Any], known: Sequence[str], caller: str = "attach"
) -> None:
    """Make sure that there are no arguments with other names.

    Args:
        unknown: The arguments with other names.
        known: The names of all arguments.
        caller: What the user called.

    Raises:
        TypeError: There is one; the message has the nearest name, and all.
    """
    for name in unknown:
        if name in _GONE:
            msg = f"{caller} no longer has an argument {name!r}: {_GONE[name]}"
            raise TypeError(msg)
        near = difflib.get_close_matches(name, known, n=1)
        meant = f": did you mean {near[0]!r}?" if near else "."
        msg = (
            f"{caller} has no argument {name!r}{meant} Its arguments are "
            f"{', '.join(known)}"
        )
        raise TypeError(msg)


def layers_of(layers: Any, units: Any, caller: str = "attach") -> Any:
    """Return the layers to plan for, given as ``layers`` or ``units``.

    Args:
        layers: The argument ``layers``.
        units: Its alias.
        caller: What the user called.

    Raises:
        TypeError: Both are given.
    """
    if layers is not None and units is not None:
        msg = f"{caller} got both layers and units, which mean the same: give one"
        raise TypeError(msg)
    return units if layers is None else layers


def check_choices(
    on_infeasible: str,
    cache_size: int,
    record_to: str | PathLike[str] | None,
    checks: str,
) -> None:
    """Make sure that arguments with plain values have allowed ones.

    Raises:
        ValueError: One has not; the message has the value, and what is allowed.
    """
    if on_infeasible not in ("raise", "warn"):
        msg = f"on_infeasible must be 'raise' or 'warn', got {on_infeasible!r}"
        raise ValueError(msg)
    if checks not in ("sampled", "all"):
        msg = f"checks must be 'sampled' or 'all', got {checks!r}"
        raise ValueError(msg)
    check_integer("cache_size", cache_size)
    is_path = isinstance(record_to, (str, PathLike))
    if record_to is not None and (not is_path or Path(record_to).is_dir()):
        msg = f"record_to must name a file, such as 'run.jsonl', got {record_to!r}"
        raise ValueError(msg)


def check_switches(**switches: object) -> None:
    """Make sure that switches are on or off: 0, 1 and NumPy's are, but no text.

    Raises:
        ValueError: One is neither.
    """
    for name, value in switches.items():
        if value not in (False, True):  # the text "false" would switch it on
            msg = f"{name} must be True or False, got {value!r}"
            raise ValueError(msg)


def check_integer(name: str, value: Any, least: int = 1) -> int:
    """Return an integer, also one of NumPy or torch, as Python's.

    Raises:
        ValueError: It is none, or too small.
    """
    try:
        found = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = least - 1
    if found < least:
        msg = f"{name} must be an integer of at least {least}, got {value!r}"
        raise ValueError(msg)
    return found


def check_number(byte_flops: Any) -> float:
    """Return `byte_flops` as a number.

    Raises:
        ValueError: It is none, or not above 0.
    """
    if isinstance(byte_flops, (int, float)) and 0 < byte_flops < math.inf:
        return float(byte_flops)
    msg = f"byte_flops must be a number above 0, got {byte_flops!r}"
    raise ValueError(msg)


def check_agree(agree: object) -> None:
    """Make sure that ranks can agree in the given way.

    Raises:
        ValueError: `agree` is something else, or a group that cannot carry tensors of
            the CPU.
    """
    if agree is None or agree == "auto":
        return
    if not isinstance(agree, distributed.ProcessGroup):
        msg = f"agree must be 'auto', None or a process group, got {agree!r}"
        raise ValueError(msg)
    config = str(distributed.get_backend_config(agree))
    if "cpu" not in config:
        msg = (
            f"agree: the group's backend is {config!r}, which cannot send tensors of "
            f"the CPU: give torch.distributed.new_group(backend='gloo')"
        )
        raise ValueError(msg)


def check_shapes(shapes: Iterable[Any]) -> list[Mapping[str, int]]:
    """Return shapes as a list of mappings.

    Raises:
        TypeError: They are not iterable, or one is not a mapping.
        ValueError: A size is not an integer of at least 1.
    """
    listed: list[Mapping[str, int]] = []
    for shape in shapes:
        check_shape("expect: a shape", shape)
        sizes = shape.items()
        listed.append({name: check_integer(f"expect: {name}", n) for name, n in sizes})
    return listed


def check_shape(what: str, shape: object) -> None:
    """Make sure that a shape maps names to sizes.

    Raises:
        TypeError: It is not a mapping.
    """
    if not isinstance(shape, Mapping):
        msg = (
            f"{what} must map names to sizes, such as {{'input_ids.1': 512}}, got "
            f"{shape!r}"
        )
        raise TypeError(msg)


def raise_if_no_model(model: object) -> None:
    """Make sure that a model is a module.

    Raises:
        TypeError: It is not.
    """
    if not isinstance(model, nn.Module):
        msg = f"model must be a torch.nn.Module, got {model!r}"
        raise TypeError(msg)
