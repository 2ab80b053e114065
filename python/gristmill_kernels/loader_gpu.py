"""Opens the native GPU library of this build, and remembers why when it is not used: no library, no CUDA in torch, no driver or one that is
too old, no device, or a device that the library was not compiled for. What it was compiled for stands in a JSON file beside it."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from gristmill_kernels.loader import NATIVE_DIR, built_with_torch, load_failure

LIBRARY = "libgristmill_cuda.so"
# First drivers of a CUDA major version, for the advice of a sentence.
_DRIVER_OF = {11: "450", 12: "525", 13: "580"}
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_INVALID_DEVICE = 101  # what CUDA_VISIBLE_DEVICES with a wrong number can give


@dataclass(frozen=True)
class GpuLibrary:
    """Outcome of looking for the GPU library. It is open and used where `reason` is None. `archs` are the images inside: `sm_90a` runs on
    that device, `compute_100` is code that the driver compiles for any newer one."""

    path: Path | None
    archs: tuple[str, ...] = ()
    toolkit: tuple[int, int] = (0, 0)
    reason: str | None = None


@dataclass(frozen=True)
class GpuFacts:
    """What the machine and its torch say. `driver` is the newest CUDA version that the driver supports, None without a driver; `refusal`
    the code with which it would not start. `devices` are (name, arch) of every visible one."""

    torch: str
    torch_cuda: str | None
    torch_hip: str | None = None
    driver: tuple[int, int] | None = None
    refusal: int = 0
    devices: tuple[tuple[str, str], ...] = ()


def image_for(arch: str, built: Sequence[str]) -> str | None:
    """Which built image runs on a device of `arch` (sm_86, gfx942, ...); None when no one does, or when the name is unknown.

    Code for sm_XY runs on the same major version from that minor one on, code with the suffix `a` on exactly that device, and PTX
    (compute_XY) on everything that is newer. AMD's names must be equal.
    """
    if arch.startswith("gfx"):
        bare = arch.split(":")[0]  # without features such as :sramecc+
        return bare if bare in built else None
    device = _version_of(arch)
    if device is None:
        return None
    by_age = sorted(built, key=lambda image: (image.startswith("sm_"), _version_of(image) or (0, 0, "")), reverse=True)
    return next((image for image in by_age if _runs_on(image, device)), None)


def _runs_on(image: str, device: tuple[int, int, str]) -> bool:
    compiled = _version_of(image)
    if compiled is None:
        return False
    if compiled[2] == "a":
        return compiled[:2] == device[:2]
    if compiled[2] == "f" or image.startswith("sm_"):  # f: a family of devices, which shares its major version
        return compiled[0] == device[0] and compiled[1] <= device[1]
    return compiled[:2] <= device[:2]


def _version_of(name: str) -> tuple[int, int, str] | None:
    """sm_90a as (9, 0, "a")."""
    match = re.fullmatch(r"(?:sm|compute)_(\d+)(\d)([af]?)", name)
    return (int(match[1]), int(match[2]), match[3]) if match else None


def find(directory: Path = NATIVE_DIR) -> GpuLibrary:
    """The library of this build and what it was compiled for, not opened."""
    path = directory / LIBRARY
    if not path.is_file():
        return GpuLibrary(None, reason=f"this build ({_distribution()}) has no GPU library")
    try:
        described = json.loads(path.with_suffix(".json").read_text())
        archs, toolkit = tuple(described["archs"]), _dotted(described["cuda"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return GpuLibrary(path, reason=f"{path.stem}.json, which tells what {path.name} was compiled for, cannot be read: {error}")
    return GpuLibrary(path, archs, toolkit)


def _distribution() -> str:
    try:
        return str(import_module("gristmill_kernels._build_info").DISTRIBUTION)
    except ImportError:
        return "a source tree"


def _dotted(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def why_unusable(library: GpuLibrary, facts: GpuFacts) -> str | None:
    """Why this library cannot run on this machine, as a sentence; None if it can."""
    if library.reason is not None:
        return library.reason
    if facts.torch_hip is not None:
        return f"torch {facts.torch} is built for ROCm, and {LIBRARY} for CUDA"
    return why_no_gpu(facts) or next(filter(None, (_not_for(*one, library, facts) for one in facts.devices)), None)


def why_no_gpu(facts: GpuFacts) -> str | None:
    """Why torch itself has no NVIDIA GPU here, as a sentence; None if it has one."""
    if facts.torch_cuda is None:
        return f"torch {facts.torch} is built without CUDA"
    return _no_driver(facts) or _no_device(facts)


def _no_driver(facts: GpuFacts) -> str | None:
    if facts.driver is None:
        return "no NVIDIA driver is installed (libcuda.so.1 is not found)"
    if facts.driver[0] < _dotted(facts.torch_cuda or "0.0")[0] and not facts.devices:
        return _too_old(facts.driver, _dotted(facts.torch_cuda or "0.0"), f"torch {facts.torch}")
    return None


def _no_device(facts: GpuFacts) -> str | None:
    if facts.devices:
        return None
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if facts.refusal not in (0, _NO_DEVICE, _INVALID_DEVICE):
        return f"the NVIDIA driver does not start: CUDA error {facts.refusal}"
    return "no NVIDIA GPU is visible" + (f" (CUDA_VISIBLE_DEVICES is {hidden!r})" if hidden is not None else "")


def _not_for(name: str, arch: str, library: GpuLibrary, facts: GpuFacts) -> str | None:
    image = image_for(arch, library.archs)
    if image is None:
        return f"{LIBRARY} has code for {', '.join(library.archs)}, which {name} ({arch}) cannot run"
    # A compiled image runs with any driver of the same major version, PTX only with one that knows the compiler's version.
    needed = library.toolkit if image.startswith("compute_") else (library.toolkit[0], 0)
    if facts.driver is not None and facts.driver < needed:
        return _too_old(facts.driver, needed, LIBRARY)
    return None


def _too_old(driver: tuple[int, int], needed: tuple[int, int], what: str) -> str:
    release = _DRIVER_OF.get(needed[0])
    advice = f"install driver {release} or newer" if release and needed[1] == 0 else "install a newer driver"
    return f"the NVIDIA driver supports CUDA {driver[0]}.{driver[1]}, but {what} needs {needed[0]}.{needed[1]}: {advice}"


def facts_of_this_machine() -> GpuFacts:
    """Asks torch, and the driver only where torch is built for it."""
    import torch

    known = GpuFacts(torch.__version__, torch.version.cuda, torch.version.hip)
    if known.torch_cuda is None:
        return known
    driver = _driver()
    if driver is None:
        return known
    known = replace(known, driver=_driver_version(driver))
    if not torch.cuda.is_available():
        return replace(known, refusal=int(driver.cuInit(0)))
    return replace(known, devices=tuple(_name_and_arch(torch, index) for index in range(torch.cuda.device_count())))


def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _driver_version(driver: Any) -> tuple[int, int]:
    version = ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10


def _name_and_arch(torch: Any, index: int) -> tuple[str, str]:
    major, minor = torch.cuda.get_device_capability(index)
    return torch.cuda.get_device_name(index), f"sm_{major}{minor}"


def open_library(found: GpuLibrary, facts: GpuFacts, open_function: Callable[[str], None] | None = None) -> GpuLibrary:
    """Open what `find` found where this machine can use it; the outcome carries the reason where not."""
    reason = why_unusable(found, facts)
    if reason is not None or found.path is None:
        return replace(found, reason=reason)
    import torch

    try:
        (open_function or torch.ops.load_library)(str(found.path))
    except (OSError, RuntimeError) as error:
        return replace(found, reason=load_failure(str(error), found.path, torch.__version__, built_with_torch()))
    return found


@functools.cache
def gpu_library() -> GpuLibrary:
    """The GPU library of this process, opened at the first call. One that is there for a device that is there, and yet of no use, is
    announced by a warning."""
    found = find()
    if found.reason is not None:
        return found
    facts = facts_of_this_machine()
    state = open_library(found, facts)
    if state.reason is not None and facts.devices:
        warnings.warn(f"gristmill_kernels does not use its C++ kernels on the GPU: {state.reason}", RuntimeWarning, stacklevel=2)
    return state
