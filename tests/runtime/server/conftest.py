"""Fixtures: model M, and a real uvicorn on 127.0.0.1 with a fake engine behind it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import uvicorn

from gristmill.server.app import build_app
from gristmill.server.http_protocol import BoundedHttpProtocol
from tests.support.fake_engine import FakeEngine
from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("m"), eos=2, generation_eos=[2, 7], tokenizer_eos=9, pad_vocab=8)


@contextlib.contextmanager
def serving(engine: FakeEngine) -> Iterator[SimpleNamespace]:
    """HTTP in front of `engine`, in a thread: yields url, client, engine, and `call(function)` to run something on its loop."""
    started, ended = threading.Event(), threading.Event()
    box = SimpleNamespace(engine=engine)
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio turns Nagle off only where the protocol is named
    sock.bind(("127.0.0.1", 0))
    sock.listen(1024)

    async def main() -> None:
        await engine.manager.start()
        server = uvicorn.Server(
            uvicorn.Config(build_app(engine.manager, engine.options), log_config=None, access_log=False, http=BoundedHttpProtocol)
        )
        box.server, box.loop = server, asyncio.get_running_loop()
        task = asyncio.create_task(server.serve([sock]))
        if engine.ready:
            await engine.manager.wait_ready()
        while not server.started:
            await asyncio.sleep(0.001)
        started.set()
        await task
        await engine.manager.close()

    def run() -> None:
        try:
            with contextlib.suppress(RuntimeError):  # uvicorn installs no signal handlers outside the main thread
                asyncio.run(main())
        finally:
            ended.set()

    threading.Thread(target=run, daemon=True).start()
    assert started.wait(20)
    box.url = f"http://127.0.0.1:{sock.getsockname()[1]}"

    def call(function: Callable[[], object]) -> object:
        async def wrapped() -> object:
            return function()

        return asyncio.run_coroutine_threadsafe(wrapped(), box.loop).result(5)

    box.call = call
    with httpx.Client(base_url=box.url, timeout=30) as client:
        box.client = client
        try:
            yield box
        finally:
            box.server.should_exit = box.server.force_exit = True
            assert ended.wait(10)


@pytest.fixture(scope="module")
def served(tiny_model: Path) -> Iterator[SimpleNamespace]:
    """One server for a module."""
    with FakeEngine(tiny_model) as engine, serving(engine) as box:
        yield box


@pytest.fixture
def serve() -> Callable[[FakeEngine], contextlib.AbstractContextManager[SimpleNamespace]]:
    """`with serve(FakeEngine(...)) as box`, for tests that need an engine of their own."""

    @contextlib.contextmanager
    def start(engine: FakeEngine) -> Iterator[SimpleNamespace]:
        with engine, serving(engine) as box:
            yield box

    return start
