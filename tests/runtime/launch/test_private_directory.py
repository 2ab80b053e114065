"""The directory of sockets: private, removed at the end, and at the next start when its owner was killed; never anybody else's."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill.private_directory import private_directory, remove_stale_directories

OWNER = """
import sys
from gristmill.private_directory import private_directory
with private_directory() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short temporary directory of this test's own."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="pd-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def owner(base: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    assert folder.parent == base and folder.is_dir()
    return process, folder


def test_it_is_private_and_goes_at_the_end(base: Path) -> None:
    with private_directory() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.parent == base
        assert remove_stale_directories(str(base)) == []
        assert [path.name for path in folder.iterdir()] == ["owner"]
    assert list(base.iterdir()) == []


def test_a_killed_owners_goes_at_the_next_start_and_a_live_ones_stays(base: Path) -> None:
    (dead, left), (alive, kept) = owner(base), owner(base)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(left / "a-b"))
    dead.send_signal(signal.SIGKILL)
    dead.wait(10)
    assert left.is_dir()
    with private_directory() as own:
        assert set(base.iterdir()) == {kept, own}
    alive.communicate("", 10)
    assert list(base.iterdir()) == []


def test_what_is_not_surely_a_dead_servers_is_left_alone(base: Path) -> None:
    def make(name: str, mode: int = 0o700, file: str = "owner") -> Path:
        folder = base / name
        folder.mkdir()
        folder.chmod(mode)
        (folder / file).touch()
        return folder

    stale = make("gristmill-abcd1234")
    others = [
        make("gristmill-trace-abcd1234"),
        make("gristmill-abcd12345"),
        make("other-abcd1234"),
        make("gristmill-aaaa0001", 0o755),
        make("gristmill-aaaa0002", file="owner.new"),  # its owner is about to lock it
    ]
    elsewhere = make("elsewhere")
    link = base / "gristmill-aaaa0003"
    link.symlink_to(elsewhere)
    within = make("gristmill-aaaa0004", file="x")
    (within / "owner").symlink_to(elsewhere / "owner")
    (base / "gristmill-aaaa0005").touch()
    held = make("gristmill-aaaa0006")
    lock = os.open(held / "owner", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    before = set(base.iterdir())
    assert remove_stale_directories(str(base)) == [str(stale)]
    assert set(base.iterdir()) == before - {stale}
    assert all((folder / "owner").exists() or (folder / "owner.new").exists() for folder in others)
    assert (elsewhere / "owner").exists()
    os.close(lock)


def test_a_base_that_cannot_be_read_is_no_failure() -> None:
    assert remove_stale_directories("/no/such/directory") == []


def test_two_starts_at_once_do_not_hurt_each_other(base: Path) -> None:
    owners = [owner(base) for _ in range(4)]
    assert all(folder.is_dir() for _, folder in owners)
    for process, _ in owners:
        process.communicate("", 10)
    assert list(base.iterdir()) == []
