"""Opens the one native CPU library that fits this machine's instruction set, and remembers why when there is none.
The instruction set is asked first: merely opening a library built for a newer CPU can trap. Torch is imported only to open it."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

ISA_VARIABLE = "GRISTMILL_KERNELS_ISA"
ISA_NAMES = ("amx", "avx512bf16", "avx512", "avx2", "generic")
NATIVE_DIR = Path(__file__).parent / "_native"
TORCH_TARGET = "2.10"  # TORCH_TARGET_VERSION of the stable ABI that the libraries are compiled for


@dataclass(frozen=True)
class NativeLibrary:
    """Outcome of looking for the native library: either `isa` and `path` are set, or `reason` says why it is not used."""

    isa: str | None
    path: Path | None
    reason: str | None
    usable: tuple[str, ...] = ()
    requested: bool = False


def usable_levels() -> tuple[str, ...]:
    """ISA levels whose libraries may be opened on this machine, best first. Raises ImportError when `_host` is missing."""
    from gristmill_kernels import _host

    return (*_host.isa_levels(), "generic")


def requested_isa() -> str | None:
    """Value of GRISTMILL_KERNELS_ISA, None when unset or empty. Raises ValueError for an unknown one."""
    value = os.environ.get(ISA_VARIABLE, "").strip() or None
    if value is not None and value not in (*ISA_NAMES, "reference"):
        raise ValueError(f"{ISA_VARIABLE} is {value!r}, but should be one of {', '.join(ISA_NAMES)} or reference")
    return value


def library_path(isa: str, directory: Path = NATIVE_DIR) -> Path:
    """Where the library of one ISA level lies in this package."""
    return directory / f"libgristmill_cpu_{isa}.so"


def find(directory: Path = NATIVE_DIR) -> NativeLibrary:
    """Choose a library without opening it. Raises ValueError when GRISTMILL_KERNELS_ISA asks for what cannot be had."""
    request = requested_isa()
    if request == "reference":
        return NativeLibrary(None, None, f"{ISA_VARIABLE}=reference", requested=True)
    try:
        usable = usable_levels()
    except ImportError as error:
        return NativeLibrary(
            None, None, f"the module gristmill_kernels._host, which tells the instruction set, cannot be imported: {error}"
        )
    if request is not None and request not in usable:
        raise ValueError(f"{ISA_VARIABLE} is {request!r}, which this CPU does not have; it can run {', '.join(usable)} or reference")
    for isa in (request,) if request is not None else usable:
        path = library_path(isa, directory)
        if path.is_file():
            return NativeLibrary(isa, path, None, usable, request is not None)
    if request is not None:
        raise ValueError(f"{ISA_VARIABLE} is {request!r}, but this build has no {library_path(request, directory).name}")
    return NativeLibrary(None, None, f"this build has no library for {', '.join(usable)} in {directory.name}/", usable)


def load_failure(error: str, path: Path, torch_version: str, built_with: str) -> str:
    """One sentence on why torch could not open the library."""
    first_line = error.strip().splitlines()[0] if error.strip() else "unknown error"
    if "undefined symbol" in error:
        return (
            f"{path.name} was built with torch {built_with} for torch >= {TORCH_TARGET}, but torch {torch_version} is installed, "
            f"which lacks a symbol it needs ({first_line}); install torch >= {TORCH_TARGET}"
        )
    return f"torch {torch_version} cannot open {path.name}: {first_line}"


def built_with_torch() -> str:
    """Torch version that the native libraries were compiled against, as the build wrote it down."""
    try:
        return str(import_module("gristmill_kernels._build_info").TORCH_BUILT_WITH)
    except (ImportError, AttributeError):
        return "of unknown version"


def open_library(found: NativeLibrary, open_function: Callable[[str], None] | None = None) -> NativeLibrary:
    """Open what `find` chose; the outcome carries a reason if that fails."""
    if found.path is None or found.isa is None:
        return found
    import torch

    try:
        (open_function or torch.ops.load_library)(str(found.path))
    except (OSError, RuntimeError) as error:
        reason = load_failure(str(error), found.path, torch.__version__, built_with_torch())
        return NativeLibrary(None, found.path, reason, found.usable, found.requested)
    return found


@functools.cache
def native_library() -> NativeLibrary:
    """The native library of this process, opened at the first call. A fall back that nobody asked for is announced by a warning."""
    state = open_library(find())
    if state.reason is not None and not state.requested:
        warnings.warn(f"gristmill_kernels computes in plain PyTorch, which is slow: {state.reason}", RuntimeWarning, stacklevel=2)
    return state
