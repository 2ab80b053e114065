"""Which platform is built, and the staged copy of the tree whose pyproject.toml is that platform's.

scikit-build-core reads one project file, the one at the root, and a distribution's name may not be dynamic: hence the copy.
"""

from __future__ import annotations

import contextlib
import os
import platform as host
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MARKER = "packaging/PLATFORM"  # written into an sdist, which is of one platform
CONTENTS = ("CMakeLists.txt", "LICENSE", "csrc", "packaging", "python/gristmill_kernels")
# What builds and editors leave in the source tree; in a wheel these come from its own build or not at all.
STRAY = shutil.ignore_patterns(
    "__pycache__", "*.pyc", "*.so", "*.dylib", "*.pyd", "_build_info.py", "_native", ".*", "*~", "*.orig", "*.rej"
)

DETECT: dict[str, Callable[[], bool]] = {
    "metal": lambda: host.system() == "Darwin" and host.machine() == "arm64",
    "rocm": lambda: bool(os.environ.get("ROCM_PATH") or shutil.which("hipcc")),
    "cuda": lambda: bool(os.environ.get("CUDA_HOME") or shutil.which("nvcc")),
}

Settings = dict[str, Any]


def available() -> list[str]:
    """Platforms that this tree has a project file for."""
    return sorted(path.stem.removeprefix("pyproject_") for path in (ROOT / "packaging").glob("pyproject_*.toml"))


def choose_platform(settings: Mapping[str, Any]) -> str:
    """The config setting `platform`, else GRISTMILL_PLATFORM, else what the sdist is of, else what the machine has, else cpu."""
    marker = ROOT / MARKER
    fixed = marker.read_text().strip() if marker.exists() else None
    for value, origin in (
        (settings.get("platform"), "config setting platform"),
        (os.environ.get("GRISTMILL_PLATFORM"), "GRISTMILL_PLATFORM"),
    ):
        if not value:
            continue
        if value not in available():
            raise SystemExit(f"{origin}: {value!r} is not a platform of this tree; choose from {', '.join(available())}")
        if fixed and value != fixed:
            raise SystemExit(f"{origin}: this source distribution builds kernels-{fixed}, not kernels-{value}; get that one's sdist")
        return str(value)
    if fixed:
        return fixed
    return next((name for name, present in DETECT.items() if name in available() and present()), "cpu")


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuses a setting that neither this backend nor scikit-build-core knows; passing one over would build something else silently."""
    from scikit_build_core.settings.skbuild_model import ScikitBuildSettings

    known = {name.replace("_", "-") for name in ScikitBuildSettings.__dataclass_fields__} | {"platform", "skbuild"}
    for key in settings:
        if key.split(".")[0] not in known:
            raise SystemExit(
                f"config setting {key!r} is not known; use platform=... or a scikit-build-core setting such as cmake.define.NAME=..."
            )


def copy_tree(target: Path, platform: str) -> None:
    """The files a build needs, and nothing that lies around beside them. Times are kept, so a second build in place is incremental."""
    for name in CONTENTS:
        source, copy = ROOT / name, target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=STRAY)
        else:
            shutil.copy2(source, copy)
    shutil.copy2(ROOT / "packaging" / f"pyproject_{platform}.toml", target / "pyproject.toml")
    (target / MARKER).write_text(platform + "\n")


@contextlib.contextmanager
def staged(config_settings: Mapping[str, Any] | None) -> Iterator[Settings]:
    """Changes into the staged tree and yields the settings that are left for scikit-build-core.

    With `build-dir` set the copy lies in it at a fixed place, since CMake ties a build directory to one source directory.
    """
    settings: Settings = dict(config_settings or {})
    check_settings(settings)
    platform = choose_platform(settings)
    settings.pop("platform", None)
    os.environ.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))  # ninja's own default is two more
    build_dir = settings.get("build-dir")
    with contextlib.ExitStack() as stack:
        if build_dir:
            settings["build-dir"] = os.path.abspath(build_dir)
            tree = Path(settings["build-dir"]) / "staged"
            shutil.rmtree(tree, ignore_errors=True)
            tree.mkdir(parents=True)
        else:
            tree = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gristmill-build-")))
        copy_tree(tree, platform)
        before = os.getcwd()
        os.chdir(tree)
        stack.callback(os.chdir, before)
        yield settings
