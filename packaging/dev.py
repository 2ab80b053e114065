"""`make dev`: builds the native parts in the source tree and installs kernels and runtime editable. Repeat it after editing C++."""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path

from gristmill_build import editable, staging

INPUTS = ("packaging/VERSION", "packaging/backend.py", "runtime/pyproject.toml", "runtime/gristmill/__init__.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--platform", default=None, help=f"one of {', '.join(staging.available())} (default: detected)")
    parser.add_argument(
        "--isas",
        default=os.environ.get("GRISTMILL_ISAS", ""),
        help="levels to build, e.g. 'avx2,avx512' (default: all of this architecture)",
    )
    parser.add_argument(
        "--archs",
        default=os.environ.get("GRISTMILL_CUDA_ARCHS", ""),
        help="GPU generations to build with --platform cuda, e.g. '90a' (default: all, which takes minutes)",
    )
    arguments = parser.parse_args()
    platform = staging.choose_platform({"platform": arguments.platform})
    os.environ["GRISTMILL_ISAS"] = arguments.isas  # pip's call of the backend builds the same
    os.environ["GRISTMILL_CUDA_ARCHS"] = arguments.archs
    editable.build_in_place(platform)
    install(platform)


def install(platform: str) -> None:
    """Registers both distributions with pip, which is slow, only where this environment does not have them as they are now."""
    stamp = Path(sys.prefix) / ".gristmill-dev"
    inputs = [*INPUTS, f"packaging/pyproject_{platform}.toml"]
    wanted = f"{staging.ROOT} {platform} {hashlib.sha256(b''.join((staging.ROOT / name).read_bytes() for name in inputs)).hexdigest()}"
    if stamp.exists() and stamp.read_text() == wanted and importable(platform):
        return
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-build-isolation", "--no-deps"]
    others = [f"kernels-{name}" for name in staging.available() if name != platform]
    if others:  # they own the same import package
        subprocess.run([sys.executable, "-m", "pip", "uninstall", "-q", "-y", *others], check=True)
    subprocess.run([*pip, "-C", f"platform={platform}", "-e", str(staging.ROOT)], check=True)
    subprocess.run([*pip, "-e", str(staging.ROOT / "runtime")], check=True)
    stamp.write_text(wanted)


def importable(platform: str) -> bool:
    """Whether both distributions are installed from this tree (someone may have uninstalled them since)."""
    code = (
        "import importlib.metadata as m, importlib.util as u, pathlib, sys\n"
        f"[m.version(name) for name in ('kernels-{platform}', 'gristmill')]\n"
        "found = [pathlib.Path(u.find_spec(name).origin).resolve() for name in ('gristmill_kernels', 'gristmill')]\n"
        "sys.exit(not all(path.is_relative_to(sys.argv[1]) for path in found))\n"
    )
    return subprocess.run([sys.executable, "-c", code, str(staging.ROOT)], cwd="/", stderr=subprocess.DEVNULL, check=False).returncode == 0


if __name__ == "__main__":
    main()
