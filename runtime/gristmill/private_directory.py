"""The directory of a server's sockets: only this user can enter it, and what a server that was killed left behind goes at the next start.

A live server holds a lock on the file `owner` in its directory. The lock ends with the process however that ends, whatever becomes of its
process id, and it is seen from other containers that share the temporary directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gristmill.errors import GristmillError

_PREFIX = "gristmill-"
_NAME = re.compile(re.escape(_PREFIX) + "[a-z0-9_]{8}")  # as mkdtemp makes them
_OWNER = "owner"
_MAX_SOCKET_PATH = 100  # sun_path holds 108 bytes on Linux and 104 on macOS, the name of an edge included


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """A new directory that only this user can enter, short enough for socket names; removed at the end."""
    for base in dict.fromkeys((tempfile.gettempdir(), "/tmp")):
        remove_stale_directories(base)
        try:
            folder = tempfile.mkdtemp(prefix=_PREFIX, dir=base)
        except OSError as error:
            raise GristmillError(f"cannot make a directory for sockets in {base}: {error.strerror}; set TMPDIR") from error
        if len(os.fsencode(folder)) + len("/d00-b") <= _MAX_SOCKET_PATH:
            break
        os.rmdir(folder)
    else:
        raise GristmillError(f"the path of the temporary directory {tempfile.gettempdir()} is too long for sockets; set a shorter TMPDIR")
    lock = -1
    try:
        with contextlib.suppress(OSError):  # a file system without locks: then nobody will take it for a dead one's either
            lock = _claim(folder)
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def _claim(folder: str) -> int:
    """Lock the directory for the life of this process. The file appears under its name only when it is locked."""
    new = os.path.join(folder, _OWNER + ".new")
    lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(new, os.path.join(folder, _OWNER))
    except BaseException:
        os.close(lock)
        raise
    return lock


def remove_stale_directories(base: str) -> list[str]:
    """Remove the directories of this user's servers below `base` whose owners are dead; returns them."""
    removed: list[str] = []
    with contextlib.suppress(OSError), os.scandir(base) as entries:
        names = [entry.name for entry in entries if _NAME.fullmatch(entry.name)]
        for folder in (os.path.join(base, name) for name in names):
            with contextlib.suppress(OSError):
                if _remove_if_stale(folder):
                    removed.append(folder)
    return removed


def _remove_if_stale(folder: str) -> bool:
    info = os.lstat(folder)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) != 0o700:
        return False
    lock = os.open(os.path.join(folder, _OWNER), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its owner lives
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
    return True
