"""One wheel per test session, made as `make wheel` makes it, and an environment that holds nothing but torch, numpy and that wheel."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
VERSION = (ROOT / "packaging" / "VERSION").read_text().strip()
ARCH = "90a"  # the one GPU generation that the session's CUDA wheel holds
LEVEL = "avx2" if platform.machine() in ("x86_64", "AMD64") else "generic"  # the one level that the session's wheel holds


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def level() -> str:
    return LEVEL


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    """A finished process with its output as text; the output is shown when the test fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    print(done.stdout[-8000:], done.stderr[-8000:], sep="\n")
    return done


@pytest.fixture(scope="session", name="run")
def run_fixture() -> Callable[..., subprocess.CompletedProcess[str]]:
    return run


@pytest.fixture(scope="session")
def backend_path() -> Iterator[None]:
    """packaging/ importable, as it is for a build front end."""
    sys.path.insert(0, str(ROOT / "packaging"))
    yield
    sys.path.remove(str(ROOT / "packaging"))


@dataclass(frozen=True)
class Built:
    """What `make wheel` left in its output directory."""

    sdist: Path
    wheel: Path

    def names(self) -> list[str]:
        with zipfile.ZipFile(self.wheel) as archive:
            return archive.namelist()


@pytest.fixture(scope="session")
def make_wheel(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Built]:
    """sdist of a platform and the wheel built from it, with one instruction-set level and one GPU generation to keep this short, repaired
    and checked. Objects are shared, so that the CPU part of the second wheel is not compiled again."""
    objects = tmp_path_factory.mktemp("objects")

    def make(platform: str) -> Built:
        out = tmp_path_factory.mktemp(f"dist_{platform}")
        script = ROOT / "packaging" / "build_wheel.py"
        variables = {**os.environ, "GRISTMILL_ISAS": LEVEL, "GRISTMILL_CUDA_ARCHS": ARCH}
        done = run(sys.executable, script, "--platform", platform, "--build-dir", objects, "--out", out, env=variables)
        assert done.returncode == 0, "packaging/build_wheel.py failed"
        return Built(next(out.glob("*.tar.gz")), next(out.glob("*.whl")))

    return make


@pytest.fixture(scope="session")
def built(make_wheel: Callable[[str], Built]) -> Built:
    return make_wheel("cpu")


@pytest.fixture(scope="session")
def built_cuda(make_wheel: Callable[[str], Built]) -> Built:
    """kernels-cuda, which needs nvcc but neither a GPU nor torch's CUDA build."""
    nvcc = os.environ.get("CUDACXX") or shutil.which(
        "nvcc", path=f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin:{os.environ['PATH']}"
    )
    if nvcc is None:
        pytest.skip("needs nvcc")
    return make_wheel("cuda")


def with_requirements(*names: str) -> dict[str, importlib.metadata.Distribution]:
    """The named distributions of the running environment and all that they require."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        distribution = importlib.metadata.distribution(waiting.pop())
        if distribution.metadata["Name"] in found:
            continue
        found[distribution.metadata["Name"]] = distribution
        for text in distribution.requires or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


@dataclass(frozen=True)
class Environment:
    """A virtual environment without pip; the running environment's pip works on it from outside."""

    directory: Path

    @property
    def python(self) -> Path:
        return self.directory / "bin" / "python"

    @property
    def site(self) -> Path:
        return Path(sysconfig.get_path("platlib", "venv", {"platbase": str(self.directory), "base": str(self.directory)}))

    def pip(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """pip of this environment with no index and no other source: it must never replace the linked torch."""
        options = ["--python", self.python, "--disable-pip-version-check"]
        sources = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
        return run(sys.executable, "-m", "pip", *options, *arguments, env={**os.environ, **sources})

    def run(self, *arguments: object, cwd: Path, prefix: tuple[object, ...] = (), **variables: str) -> subprocess.CompletedProcess[str]:
        """Its Python, away from the source tree and without the caller's paths."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GRISTMILL"))}
        return run(*prefix, self.python, *arguments, cwd=cwd, env={**kept, **variables})


def make_environment(directory: Path) -> Environment:
    """torch and numpy with their requirements, linked from the running environment instead of downloaded."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    environment = Environment(directory)
    for distribution in with_requirements("torch", "numpy").values():
        for entry in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            target = environment.site / entry
            if not target.exists():
                target.symlink_to(Path(str(distribution.locate_file(entry))))
    return environment


@pytest.fixture
def new_environment(tmp_path: Path) -> Environment:
    """One without the wheel, for tests that install something of their own."""
    return make_environment(tmp_path / "environment")


@pytest.fixture(scope="session")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The session's wheel in an environment of its own, installed with its requirements checked."""
    environment = make_environment(tmp_path_factory.mktemp("installed") / "environment")
    assert environment.pip("install", built.wheel).returncode == 0
    return environment
