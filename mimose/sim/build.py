"""Compiles the simulated accelerator, once for each version of torch and sources.

`torch.utils.cpp_extension` would need ninja besides a compiler.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

import torch

_SOURCES = Path(__file__).resolve().parent / "native"


class SimUnavailableError(RuntimeError):
    """The simulated device cannot be compiled on this machine."""


def why_not() -> str:
    """Return why it cannot be built here; "" if it can, or is built already."""
    program = _compiler()[0]
    if library_path().exists() or shutil.which(program) is not None:
        return ""
    return (
        f"the simulated device is compiled on its first use, which needs a C++ "
        f"compiler of C++20, and there is no {program}: install one (apt-get "
        f"install g++, conda install gxx, module load gcc), or name yours in CXX"
    )


def library_path() -> Path:
    """Return where the library for this torch and these sources is, or will be."""
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    version = f"{torch.__version__}-{platform.machine()}-{digest.hexdigest()[:12]}"
    return _cache() / "mimose_sim" / version / "libsim.so"


def _cache() -> Path:
    """Return the folder in which torch keeps compiled extensions, too."""
    own = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    named = os.environ.get("TORCH_EXTENSIONS_DIR", f"{own}/torch_extensions")
    return Path(named).expanduser()


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
        *(*_compiler(), "-std=c++20", "-O1", "-fPIC", "-shared", "-w"),
        *(str(_SOURCES / "library.cpp"), "-o", str(made)),
        *(f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"),
        *(f"-L{root}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root}/lib"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        name = " ".join(_compiler())
        msg = f"{name} could not compile the simulated device:\n{done.stderr}"
        raise SimUnavailableError(msg)
    made.replace(path)


def _compiler() -> list[str]:
    """Return the compiler and its own arguments, as in ``CXX="ccache g++"``."""
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]
