"""The child processes of a server: starts them, passes on what they say, notices when one ends, and leaves none behind."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

import gristmill
from gristmill import progress
from gristmill.launch_child import BLOCKED_SIGNALS, GOODBYE, NAMES
from gristmill.launch_config import LaunchConfig
from gristmill.logs import escape
from gristmill.resources import cpu_count
from gristmill.watchdog import STACK_SIGNAL, is_stack_line, own_stacks

log = logging.getLogger(__name__)

_STOP_S = 2.0  # how long a child may take to end after it was asked to
_STACKS_S = 1.5  # how long the stacks of all children are waited for
_QUIET_S = 0.1  # a child that wrote no line of its stacks for so long has written them all
_CHATTER = re.compile(r"[\d-]+ [\d:.]+ (DEBUG|INFO) ")  # log lines that explain no end
_SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


class Child:
    """One child process: its stderr is read line by line, its end is reported once to `on_end`."""

    def __init__(self, role: str, config: LaunchConfig, on_end: Callable[[Child], None], show_progress: progress.Sink) -> None:
        self.name = f"{NAMES[role]} {config.rank}" if config.world_size > 1 and role == "worker" else NAMES[role]
        self.error = ""  # the sentence it ended with
        self.last_line = ""
        self.last_stack = 0.0  # when it wrote a line of its stacks
        self._show_progress = show_progress
        # -m puts the working directory on sys.path: a torch.py lying there must not become ours (PYTHONSAFEPATH: Python >= 3.11)
        # signals of the process group must not end it before it ignores them: it starts with them blocked
        before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gristmill.launch_child", role],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=_child_environment(role, config),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended already: its end says why
            self.process.stdin.write(config.to_json() + b"\n")
            self.process.stdin.flush()
        self._reader = threading.Thread(target=self._read, name=f"{role}-stderr", daemon=True)
        self._reader.start()
        threading.Thread(target=self._wait, args=(on_end,), name=f"{role}-wait", daemon=True).start()

    def sentence(self) -> str:
        """Why it ended, for the person who started the server."""
        if self.error:
            return self.error
        return self.public_sentence() + (f"; its last line was: {self.last_line}" if self.last_line else "")

    def public_sentence(self) -> str:
        """Why it ended, for clients: no path of this machine, no text of a log."""
        code = self.process.returncode
        return f"the {self.name} {f'was killed by {_signal_name(-code)}' if code < 0 else f'ended with exit code {code}'}"

    def ask_for_stacks(self) -> None:
        """Let it write the stacks of its threads to the log; one that was stopped goes on for that."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(STACK_SIGNAL)
            self.process.send_signal(signal.SIGCONT)

    def release(self) -> None:
        """Close its stdin, which asks it to end."""
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.write(GOODBYE)
            self.process.stdin.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for raw in iter(lambda: self.process.stderr.readline(1 << 16), b""):  # type: ignore[union-attr]
            line = raw.decode("utf-8", "replace").rstrip("\n")
            if report := progress.parse_line(line):
                self._show_progress(*report)
            elif is_stack_line(line):
                log.error("stack of the %s: %s", self.name, line)
                self.last_stack = time.monotonic()
            elif line.startswith("error: "):
                self.error = escape(line.removeprefix("error: "))
            elif line.strip():
                line = escape(line)
                if not _CHATTER.match(line):
                    self.last_line = line
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(line + "\n")
                    sys.stderr.flush()

    def _wait(self, on_end: Callable[[Child], None]) -> None:
        self.process.wait()
        self._reader.join(0.5)  # its last words
        on_end(self)


class Supervisor:
    """All children of one server. `on_failure` is called once, from a thread, when one ends that was not asked to."""

    def __init__(self, config: LaunchConfig, on_failure: Callable[[], None]) -> None:
        self.config = config
        self.children: list[Child] = []
        self.view = progress.View()
        self.failure = ""
        self.public_failure = ""
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._stopping = False

    def start(self) -> None:
        """Start one scheduler, one detokenizer and a worker per rank. To be called in the main thread: children die with it."""
        roles = [("scheduler", 0), ("detokenizer", 0)] + [("worker", rank) for rank in range(self.config.world_size)]
        for role, rank in roles:
            config = msgspec.structs.replace(self.config, rank=rank, parent_pid=os.getpid())
            self.children.append(Child(role, config, self._ended, self.view))

    def alive(self) -> bool:
        return not self.failure and all(child.process.poll() is None for child in self.children)

    def expect_end(self) -> None:
        """From now on the end of a child is no failure: they were told to shut down."""
        with self._lock:
            self._stopping = True

    def stop(self, grace_s: float = _STOP_S) -> None:
        """End all children: ask by closing their stdin, kill after `grace_s`."""
        self.expect_end()
        self.view.close()
        for child in self.children:
            child.release()
        deadline = time.monotonic() + grace_s
        for child in self.children:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
        for child in self.children:
            child.process.wait()

    def ask_for_stacks(self) -> None:
        """Let all children write the stacks of their threads to the log."""
        for child in self.children:
            child.ask_for_stacks()

    def dump_stacks(self) -> None:
        """Write the stacks of all processes to the log, this one's too; returns when they are there."""
        asked = time.monotonic()
        self.ask_for_stacks()
        for line in own_stacks():
            log.error("stack of the server: %s", line)
        children = [child for child in self.children if child.process.poll() is None]
        while time.monotonic() < asked + _STACKS_S:
            if all(asked < child.last_stack < time.monotonic() - _QUIET_S for child in children):
                return
            time.sleep(0.02)
        for child in children:
            if child.last_stack < asked:
                log.error("the %s wrote no stacks", child.name)

    def fail(self, sentence: str, public_sentence: str) -> None:
        """End the engine although no child has ended, for the reason `sentence`."""
        with self._lock:
            if self._stopping or self.failure:
                return
            self.failure, self.public_failure = sentence, public_sentence
        self.view.close()
        self._on_failure()

    def kill(self) -> None:
        """End all children at once."""
        self.expect_end()
        for child in self.children:
            child.process.kill()

    def _ended(self, child: Child) -> None:
        self.fail(child.sentence(), child.public_sentence())


def _child_environment(role: str, config: LaunchConfig) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in _SECRETS}
    root = Path(gristmill.__file__).resolve().parents[1]
    if root.name not in ("site-packages", "dist-packages"):  # run from a source tree, perhaps found by the working directory alone
        paths = [str(root), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    environment["PYTHONSAFEPATH"] = "1"
    environment["PYTHONUNBUFFERED"] = "1"
    # thread pools of numeric libraries are sized when they are loaded, and by the machine, not by the cgroup
    threads = (config.options.threads or cpu_count()) if role == "worker" else 1
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        environment[variable] = str(threads)
    return environment


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
