"""The life of a server in process A: listening sockets first, then HTTP, manager and supervised children, then an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
import zmq

from gristmill import early_signals, watchdog
from gristmill.errors import GristmillError
from gristmill.launch import Prepared, merged_trace, prepare
from gristmill.launch_child import print_error
from gristmill.launch_config import LaunchConfig
from gristmill.listening import url_of
from gristmill.options import Options
from gristmill.private_directory import private_directory
from gristmill.supervise import Supervisor

log = logging.getLogger(__name__)

_FLUSH_S = 0.5  # for error responses to reach their clients before the sockets close
_SHUTDOWN_S = 2.0
_HALF_SENT_S = 2.0  # while draining: how long a request may take to arrive when no other is open


def serve(options: Options, sockets: list[socket.socket]) -> int:
    """Serve on `sockets` until a signal or a failure ends it; returns the exit code.

    Raises:
        GristmillError: what could not be started, or why a child process ended.
    """
    start = time.monotonic()
    watchdog.dump_on_signal()
    _allow_many_connections()
    prepared = prepare(options)
    early_signals.remember()
    os.umask(0o077)  # sockets and traces are this user's alone
    with private_directory() as folder, merged_trace(options, folder) as trace_dir:
        config = prepared.launch_config(f"ipc://{folder}", trace_dir)
        return asyncio.run(_Server(prepared, config, sockets, start).run_watched())


def _allow_many_connections() -> None:
    """Every connection is a file; the soft limit of 1,024 that shells start with is soon reached."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    """The life of one server in process A: HTTP, manager and supervisor, ended by a signal or by the first failure."""

    def __init__(self, prepared: Prepared, config: LaunchConfig, sockets: list[socket.socket], start: float) -> None:
        self.prepared, self.options = prepared, prepared.options
        self.config = config
        self.sockets = sockets
        self.start = start
        self.url = url_of(self.options.host, sockets[0])
        self.supervisor: Supervisor | None = None

    async def run_watched(self) -> int:
        import gristmill.server.app  # noqa: F401 (takes its time, which is not to count)

        with watchdog.LoopWatch(asyncio.get_running_loop(), self.options.watchdog_s, self._loop_hangs):
            return await self.run()

    def _loop_hangs(self, hang: watchdog.Hang) -> None:
        """Called in a thread: nothing that needs the loop can be done any more. The children see that this process is gone."""
        supervisor = self.supervisor
        if supervisor is not None:
            supervisor.expect_end()
            supervisor.dump_stacks()
        print_error(f"{hang} (--watchdog-s {self.options.watchdog_s:g}); the stacks of all processes are in the log")
        os._exit(1)

    async def run(self) -> int:
        from gristmill.server.app import build_app
        from gristmill.server.http_protocol import BoundedHttpProtocol
        from gristmill.tokenizer.manager import TokenizerManager

        loop = asyncio.get_running_loop()
        failed: asyncio.Future[None] = loop.create_future()
        signals: asyncio.Queue[int] = asyncio.Queue()
        for number in early_signals.handled():
            loop.add_signal_handler(number, signals.put_nowait, number)
        for received in early_signals.taken():
            signals.put_nowait(received)

        def on_failure() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed already
                loop.call_soon_threadsafe(_set_once, failed)

        context = zmq.Context()
        supervisor = self.supervisor = Supervisor(self.config, on_failure)
        manager = TokenizerManager(self.config, context, self.prepared.tokenizer, self.prepared.model_config)
        await manager.start()
        http = _HttpServer(
            uvicorn.Config(
                build_app(manager, self.options),
                log_config=None,
                access_log=False,
                http=BoundedHttpProtocol,
                ws="none",
                lifespan="off",
                loop="asyncio",
                server_header=False,
                timeout_keep_alive=75,  # longer than clients keep idle connections, so that they never meet a closing one
            )
        )
        http_task = asyncio.create_task(http.serve(self.sockets), name="http")
        watchdog.dump_on_signal(loop, supervisor.ask_for_stacks)
        ready_task = asyncio.create_task(self._announce(manager, supervisor))
        watch_task = asyncio.create_task(self._watch(manager, supervisor))
        signal_task = asyncio.create_task(signals.get())
        try:
            supervisor.start()
            ended: set[asyncio.Future[Any]] = {http_task, failed, signal_task}
            await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
            if signal_task.done() and not failed.done():
                return await self._drain(signal_task.result(), signals, manager, supervisor, http, http_task, failed)
            if not failed.done():
                http_task.result()
                raise GristmillError("the HTTP server ended unexpectedly")
            return await self._fail(manager, supervisor, http, http_task)
        finally:
            ready_task.cancel()
            watch_task.cancel()
            signal_task.cancel()
            await asyncio.to_thread(supervisor.stop)
            await manager.close()
            context.destroy(linger=0)

    async def _announce(self, manager: Any, supervisor: Supervisor) -> None:
        await manager.wait_ready()
        supervisor.view.close()
        stats = manager.stats
        took = time.monotonic() - self.start
        name = self.options.served_model_name
        print(f"ready: {name} at {self.url} (pool of {stats.pool_total} tokens, loaded in {took:.1f} s)", flush=True)

    async def _watch(self, manager: Any, supervisor: Supervisor) -> None:
        """End the engine when a part of it hangs; nobody else would, since it lives."""
        hang = await watchdog.watch(lambda: manager.seen, self.options.watchdog_s)
        manager.refuse_all(str(hang))
        log.error("%s (--watchdog-s %g); the stacks of all processes follow", hang, self.options.watchdog_s)
        await asyncio.to_thread(supervisor.dump_stacks)
        supervisor.fail(f"{hang} (--watchdog-s {self.options.watchdog_s:g}); the stacks of all processes are in the log", str(hang))

    async def _drain(
        self,
        number: int,
        signals: asyncio.Queue[int],
        manager: Any,
        supervisor: Supervisor,
        http: uvicorn.Server,
        http_task: asyncio.Task[None],
        failed: asyncio.Future[None],
    ) -> int:
        """Let open requests finish for up to drain_s; a second signal ends everything at once."""
        if manager.open_requests:
            log.warning("finishing %d open requests; a second signal stops at once", manager.open_requests)
        http.should_exit = True  # closes the listening sockets and idle connections, waits for the others
        again = asyncio.create_task(signals.get())
        try:
            ended: set[asyncio.Future[Any]] = {http_task, failed, again}
            await self._wait_drained(ended, manager)
            if failed.done():
                return await self._fail(manager, supervisor, http, http_task)
            if again.done():
                supervisor.kill()
                return 128 + again.result()
            if not http_task.done() and manager.open_requests:
                log.warning("%d requests were not finished after %g s", manager.open_requests, self.options.drain_s)
                manager.fail_all("the server is shutting down", status=503)
                await asyncio.wait({http_task}, timeout=_FLUSH_S)
        finally:
            again.cancel()
            await _end_http(http, http_task)
        supervisor.expect_end()
        with contextlib.suppress(asyncio.TimeoutError, GristmillError):
            await asyncio.wait_for(manager.shutdown(), _SHUTDOWN_S)
        return 0 if number == signal.SIGTERM else 128 + number

    async def _wait_drained(self, ended: set[asyncio.Future[Any]], manager: Any) -> None:
        """Until one of `ended`, drain_s is over, or for a while no request was open: what is left then are half-sent ones."""
        deadline = time.monotonic() + self.options.drain_s
        idle_since = time.monotonic()
        while (now := time.monotonic()) < deadline and now - idle_since < _HALF_SENT_S:
            if manager.open_requests:
                idle_since = now
            done, _ = await asyncio.wait(ended, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return

    async def _fail(self, manager: Any, supervisor: Supervisor, http: uvicorn.Server, http_task: asyncio.Task[None]) -> int:
        """A child ended: every open request gets the reason, then the server ends with it."""
        supervisor.kill()
        manager.fail_all(supervisor.public_failure)
        await asyncio.wait({http_task}, timeout=_FLUSH_S)  # /health says 503 meanwhile
        await _end_http(http, http_task)
        raise GristmillError(supervisor.failure)


def _set_once(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _end_http(http: uvicorn.Server, task: asyncio.Task[None]) -> None:
    """End HTTP now, whatever connections are open."""
    http.should_exit = http.force_exit = True
    await asyncio.wait({task}, timeout=_FLUSH_S)
    if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_FLUSH_S)
    if task.done() and not task.cancelled() and task.exception() is not None:
        log.error("the HTTP server failed: %s", task.exception())
    sys.stdout.flush()
