"""Building in the source tree for development: CMake installs the native parts into python/gristmill_kernels, a .pth file points there."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from gristmill_build.staging import ROOT


def build_directory(platform: str) -> Path:
    """One per platform and interpreter, kept between builds."""
    return ROOT / "build" / f"dev-{platform}-{sysconfig.get_config_var('SOABI')}"


def build_in_place(platform: str) -> None:
    """Configures when needed, compiles what changed (ninja), and puts the results where `import gristmill_kernels` looks.

    The environment variables GRISTMILL_ISAS and GRISTMILL_CUDA_ARCHS limit what is compiled.
    """
    with exclusive(build_directory(platform)) as build:
        compile_and_install(build, platform)


@contextlib.contextmanager
def exclusive(build: Path) -> Iterator[Path]:
    """Two builds in one directory spoil each other; the later one waits for the earlier."""
    build.mkdir(parents=True, exist_ok=True)
    with (build / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield build


def compile_and_install(build: Path, platform: str) -> None:
    isas = os.environ.get("GRISTMILL_ISAS", "")
    archs = os.environ.get("GRISTMILL_CUDA_ARCHS", "") if platform == "cuda" else ""
    environment = {"CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1), **os.environ}
    definitions = {"GRISTMILL_PLATFORM": platform, "GRISTMILL_ISAS": isas, "Python_EXECUTABLE": sys.executable}
    if archs:
        definitions["GRISTMILL_CUDA_ARCHS"] = archs
    wanted = "\n".join(f"{name}={value}" for name, value in definitions.items())
    stamp = build / "configured.txt"
    if not (build / "build.ninja").exists() or not stamp.exists() or stamp.read_text() != wanted:
        arguments = [f"-D{name}={value}" for name, value in definitions.items()]
        run(["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja", *arguments], environment)
        stamp.write_text(wanted)
    run(["cmake", "--build", str(build)], environment)
    remove_other_levels(build)
    run(["cmake", "--install", str(build), "--prefix", str(ROOT / "python")], {**environment, "CMAKE_INSTALL_MESSAGE": "NEVER"})


def remove_other_levels(build: Path) -> None:
    """A library that this build does not make would be stale code that the loader might still pick."""
    native = ROOT / "python" / "gristmill_kernels" / "_native"
    for library in native.glob("libgristmill_*"):
        if not (build / library.name).exists():
            library.unlink()


def run(command: list[str], environment: dict[str, str]) -> None:
    """Runs a build step from the interpreter's own environment first (the venv's cmake), and names the step that failed."""
    environment = {**environment, "PATH": os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])}
    try:
        subprocess.run(command, check=True, env=environment)
    except FileNotFoundError:
        raise SystemExit(f"{command[0]} was not found: pip install -r requirements/build.txt") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{' '.join(command[:2])} failed with exit code {error.returncode}") from None


def editable_wheel(target: Path, prepare_metadata: Callable[[Path], str]) -> str:
    """A wheel of metadata and one .pth file; `prepare_metadata(directory)` makes the .dist-info there and returns its name."""
    with tempfile.TemporaryDirectory() as scratch:
        dist_info = Path(scratch) / prepare_metadata(Path(scratch))
        name = dist_info.name.removesuffix(".dist-info")  # kernels_cpu-0.1.0
        tag = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        wheel_file = dist_info / "WHEEL"
        wheel_file.write_text(f"Wheel-Version: 1.0\nGenerator: gristmill packaging/backend.py\nRoot-Is-Purelib: false\nTag: {tag}\n")
        files = {path.relative_to(scratch).as_posix(): path.read_bytes() for path in sorted(dist_info.rglob("*")) if path.is_file()}
        files[f"{name.split('-')[0]}_editable.pth"] = f"{ROOT / 'python'}\n".encode()
        record = "".join(f"{path},sha256={digest(data)},{len(data)}\n" for path, data in files.items())
        files[f"{dist_info.name}/RECORD"] = (record + f"{dist_info.name}/RECORD,,\n").encode()
        filename = f"{name}-{tag}.whl"
        with zipfile.ZipFile(target / filename, "w", zipfile.ZIP_DEFLATED) as archive:
            for path, data in files.items():
                archive.writestr(path, data)
    return filename


def digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
