"""What a finished wheel must be: no stray files, op libraries on the stable ABI alone, an honest tag, no paths of the build."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from gristmill_build import fatbin

MAX_BYTES = 100 * 10**6  # of a wheel; what package indexes take
PACKAGE = "gristmill_kernels/"
CONTENT = re.compile(r"gristmill_kernels/(?:[a-z0-9_]+/)*(?:[A-Za-z0-9_]+\.pyi?|py\.typed|tuned\.json)")
HOST = re.compile(r"gristmill_kernels/_host\.(?:cpython-3\d+|abi3)[\w-]*\.so")
OP_LIBRARY = re.compile(r"gristmill_kernels/_native/libgristmill_[a-z]+_([a-z0-9]+)\.so")
GPU_LIBRARY = "gristmill_kernels/_native/libgristmill_cuda.so"
GPU_DESCRIPTION = "gristmill_kernels/_native/libgristmill_cuda.json"
SYSTEM_LIBRARIES = re.compile(r"lib(?:c|m|dl|pthread|rt|gcc_s)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+")
# The stable ABI's C functions, or symbols of the C library and the unwinder (they carry a version).
ALLOWED_SYMBOL = re.compile(r"aoti_torch_\w+|torch_\w+|\w+@(?:GLIBC|GCC)_[\d.]+")
# Weak references of the C runtime and of libstdc++ (transactional memory), which stay unresolved in every process.
WEAK_HOOK = re.compile(r"__gmon_start__|__cxa_pure_virtual|_ITM_\w+|_ZGTt\w+")


def check_wheel(wheel: Path) -> list[str]:
    """Every fault of the wheel as one sentence; an empty list for a good one."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as scratch:
        archive.extractall(scratch)
        names = [info.filename for info in archive.infolist() if not info.is_dir()]
        return [*size_faults(wheel), *content_faults(names, Path(scratch)), *object_faults(wheel, names, Path(scratch))]


def size_faults(wheel: Path) -> Iterator[str]:
    """A wheel that is too large to be uploaded."""
    if (size := wheel.stat().st_size) >= MAX_BYTES:
        yield f"the wheel has {size / 1e6:.0f} MB, but has to stay below {MAX_BYTES / 1e6:.0f} MB"


def content_faults(names: list[str], root: Path) -> Iterator[str]:
    """Files that do not belong into the wheel, and libraries that are missing from it."""
    information = runpy.run_path(str(root / PACKAGE / "_build_info.py"))
    gpu = {GPU_LIBRARY, GPU_DESCRIPTION} if information["PLATFORM"] == "cuda" else set()
    for name in names:
        known = CONTENT.fullmatch(name) or HOST.fullmatch(name) or OP_LIBRARY.fullmatch(name) or ".dist-info/" in name
        if not (known or name in gpu):
            yield f"{name}: does not belong into a wheel"
    missing = gpu - set(names)
    yield from (f"{name}: is missing" for name in sorted(missing))
    if gpu and not missing:
        yield from image_faults(root)
    if not any(HOST.fullmatch(name) for name in names):
        yield "there is no gristmill_kernels/_host module"
    levels = {match[1] for name in names if (match := OP_LIBRARY.fullmatch(name))}
    promised = set(information["ISA_LEVELS"])
    if levels != promised:
        yield f"_build_info.py promises levels {sorted(promised)}, but there are libraries for {sorted(levels)}"


def image_faults(root: Path) -> Iterator[str]:
    """GPU code that differs from what loader_gpu.py is told. Files of kernels that only Hopper can run hold its code alone."""
    promised = frozenset(json.loads((root / GPU_DESCRIPTION).read_text())["archs"])
    containers = fatbin.images(root / GPU_LIBRARY)
    if not any(held == promised for held in containers):
        yield f"{GPU_LIBRARY}: no source file was compiled for {', '.join(sorted(promised))}, as {Path(GPU_DESCRIPTION).name} promises"
    for held in sorted({tuple(sorted(held)) for held in containers} - {tuple(sorted(promised)), ("sm_90a",)}):
        yield f"{GPU_LIBRARY}: holds code for {', '.join(held)}, but {', '.join(sorted(promised))} is promised"


def needed_faults(name: str, dynamic: str, from_torch: set[str]) -> Iterator[str]:
    """Libraries that nobody may expect on the user's machine."""
    for library in re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic):
        if not SYSTEM_LIBRARIES.fullmatch(library) and library not in from_torch:
            yield f"{name}: needs {library}"


def libraries_of_torch(name: str) -> set[str]:
    """What `import torch` has loaded before an object of this name is opened, and the object may use."""
    if name == GPU_LIBRARY:
        return {"libtorch_cpu.so", "libtorch_cuda.so"}
    return {"libtorch_cpu.so"} if OP_LIBRARY.fullmatch(name) else set()


def object_faults(wheel: Path, names: list[str], root: Path) -> Iterator[str]:
    """Faults of the shared objects."""
    promised = promised_glibc(wheel.name)
    for name in names:
        if not name.endswith(".so"):
            continue
        path = root / name
        dynamic = tool("readelf", "-dW", path)
        for kind, value in re.findall(r"\((RPATH|RUNPATH)\).*\[(.*)\]", dynamic):
            yield f"{name}: has {kind} {value}"
        from_torch = libraries_of_torch(name)
        is_op_library = bool(from_torch)
        yield from needed_faults(name, dynamic, from_torch)
        undefined = [line.split() for line in tool("nm", "-D", "--undefined-only", path).splitlines()]
        symbols = [name for kind, name in undefined if not (kind == "w" and WEAK_HOOK.fullmatch(name))]
        exported = {line.split()[-1] for line in tool("nm", "-D", "--defined-only", path).splitlines()}
        if exported - ({"PyInit__host"} if not is_op_library else set()):
            yield f"{name}: exports {', '.join(sorted(exported)[:5])}"
        if is_op_library:
            strangers = sorted(symbol for symbol in symbols if not ALLOWED_SYMBOL.fullmatch(symbol))
            if strangers:
                yield f"{name}: uses what is not in the stable ABI: {', '.join(strangers[:5])}"
        yield from version_faults(name, symbols, promised)
        yield from path_faults(name, path.read_bytes())


def version_faults(name: str, symbols: list[str], promised: tuple[int, ...] | None) -> Iterator[str]:
    """Symbol versions newer than the tag says, and any of libstdc++, which is linked statically."""
    needed = {match[1]: match[2] for symbol in symbols if (match := re.search(r"@(\w+?)_([\d.]+)$", symbol)) and match[1] != "GLIBC"}
    if "GLIBCXX" in needed or "CXXABI" in needed:
        yield f"{name}: needs symbols of a shared libstdc++"
    highest = max((version_of(symbol) for symbol in symbols if "@GLIBC_" in symbol), default=())
    if promised is not None and highest > promised:
        yield f"{name}: needs glibc {dotted(highest)}, but the tag promises {dotted(promised)}"


def path_faults(name: str, data: bytes) -> Iterator[str]:
    """Paths of the building machine inside the object (assertion texts and debug information would bring them)."""
    for found in sorted(set(re.findall(rb"/(?:tmp|home|root|work|build)/[\w./-]{4,}", data)))[:3]:
        yield f"{name}: contains the build path {found.decode()}"


def promised_glibc(wheel_name: str) -> tuple[int, ...] | None:
    """The oldest glibc among the wheel's platform tags; None for a tag that promises nothing (linux_x86_64)."""
    versions = [(int(major), int(minor)) for major, minor in re.findall(r"manylinux_(\d+)_(\d+)_", wheel_name)]
    return min(versions, default=None)


def version_of(symbol: str) -> tuple[int, ...]:
    return tuple(int(part) for part in symbol.rsplit("_", 1)[1].split("."))


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def tool(*command: object) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout
