"""Compiles the simulated accelerator, once for each version of torch and sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch

_SOURCES = Path(__file__).resolve().parent / "native"
_CACHE = Path(__file__).resolve().parents[2] / ".cache" / "sim"


class SimUnavailableError(RuntimeError):
    """The simulated accelerator cannot be built on this machine."""


def why_not() -> str:
    """Return why it cannot be built here; "" if it can, or is built already."""
    if library_path().exists() or shutil.which(_compiler()) is not None:
        return ""
    return (
        f"the simulated accelerator needs a C++ compiler, and there is no {_compiler()}"
    )


def library_path() -> Path:
    """Return where the library for this torch and these sources is, or will be."""
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    version = f"{torch.__version__}-{platform.machine()}-{digest.hexdigest()[:12]}"
    return _CACHE / version / "libsim.so"


def build() -> Path:
    """Return the library, compiled first where it is not there yet.

    Raises:
        SimUnavailableError: There is no compiler, or it refuses the sources.
    """
    path = library_path()
    if path.exists():
        return path
    reason = why_not()
    if reason:
        raise SimUnavailableError(reason)
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes may ask at once
        if not path.exists():
            _compile(path)
    return path


def _compile(path: Path) -> None:
    root = Path(torch.__file__).resolve().parent
    made = path.with_suffix(".tmp")
    command = [
        *(_compiler(), "-std=c++20", "-O1", "-fPIC", "-shared", "-w"),
        *(str(_SOURCES / "library.cpp"), "-o", str(made)),
        *(f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"),
        *(f"-L{root}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root}/lib"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        msg = (
            f"{command[0]} could not compile the simulated accelerator:\n{done.stderr}"
        )
        raise SimUnavailableError(msg)
    made.replace(path)


def _compiler() -> str:
    return os.environ.get("CXX", "g++")
