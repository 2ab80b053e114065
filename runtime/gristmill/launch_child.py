"""Entry of a child process: `python -m gristmill.launch_child scheduler|detokenizer|worker`, its LaunchConfig as one JSON line on stdin.

Standard input stays open for as long as the parent lives: its end is how a child learns on every platform that the parent is gone.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import signal
import sys
import threading

import zmq

from gristmill import progress
from gristmill.errors import GristmillError
from gristmill.launch_config import LaunchConfig
from gristmill.logs import escape, setup_logging
from gristmill.watchdog import STACK_SIGNAL, dump_on_signal

log = logging.getLogger(__name__)

ROLES = {
    "scheduler": "gristmill.scheduler.process",
    "detokenizer": "gristmill.detokenizer.process",
    "worker": "gristmill.worker.process",
}
NAMES = {"scheduler": "scheduler", "detokenizer": "detokenizer", "worker": "model worker"}

GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
BLOCKED_SIGNALS = (*GROUP_SIGNALS, STACK_SIGNAL)  # until this process has said what they mean to it
GOODBYE = b"bye\n"  # the parent's last word; without it, the end of standard input means that it was killed
_EXIT_GRACE_S = 1.0
_PR_SET_PDEATHSIG = 1


def main(role: str) -> int:
    """Run `role` until it is told to stop; returns the exit code."""
    # a terminal's Ctrl-C or hang-up and a service manager's SIGTERM reach the whole group: the parent decides what they mean
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    dump_on_signal()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)  # the parent blocked them until here
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return 0  # the parent died while starting us
    config = LaunchConfig.from_json(line)
    # the detokenizer lives on for a moment, to remove the socket directory that a killed parent leaves
    if role != "detokenizer":
        _die_with_parent(config.parent_pid)
    setup_logging(config.options.log_level, f"{role}{config.rank}" if role == "worker" else role)
    progress.set_sink(progress.LineWriter(sys.stderr))
    stop = threading.Event()
    threading.Thread(target=_watch_parent, args=(config, stop), name="parent-watch", daemon=True).start()
    context = zmq.Context()
    try:
        importlib.import_module(ROLES[role]).run(config, context, stop)
    except GristmillError as error:
        print_error(str(error))
        return error.exit_code
    except BaseException as error:
        log.debug("the %s failed", NAMES[role], exc_info=True)
        print_error(describe_failure(f"the {NAMES[role]}", error))
        return 1
    finally:
        context.destroy(linger=200)
    return 0


def describe_failure(who: str, error: BaseException) -> str:
    """One sentence about an exception that is not one of ours."""
    text = (str(error).strip().splitlines() or [""])[0][:300]
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error) or type(error).__name__ == "OutOfMemoryError":
        return f"{who} is out of memory: {text or 'lower --pool-tokens or --mem-fraction, or use a smaller model'}"
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    place = f" ({os.path.basename(frame.tb_frame.f_code.co_filename)}:{frame.tb_lineno})" if frame is not None else ""
    return f"{who} failed: {type(error).__name__}: {text}{place}"


def print_error(sentence: str) -> None:
    """Tell the parent why this process ends; it shows the sentence once."""
    print(f"error: {escape(sentence)}", file=sys.stderr, flush=True)


def _die_with_parent(parent_pid: int) -> None:
    """Linux: be killed with the parent even while stuck in native code. Elsewhere the watch of stdin has to do."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(1)


def _watch_parent(config: LaunchConfig, stop: threading.Event) -> None:
    """End this process when the parent says so, or when it is gone without a word."""
    last = b""
    while chunk := os.read(0, 4096):
        last = chunk
    if not last.endswith(GOODBYE) and config.endpoint_prefix.startswith("ipc://"):
        shutil.rmtree(config.endpoint_prefix.removeprefix("ipc://"), ignore_errors=True)
    stop.set()
    threading.Event().wait(_EXIT_GRACE_S)  # the main thread usually ends the process first
    os._exit(0)


if __name__ == "__main__":
    exit_code = main(sys.argv[1])
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # not sys.exit: threads of native libraries must not hold up the end
