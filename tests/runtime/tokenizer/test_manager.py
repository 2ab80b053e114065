"""The manager: texts reach the request that waits for them, and no request waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import zmq.asyncio

from gristmill.messages import Hello, Text
from gristmill.tokenizer.manager import EngineUnavailable, Generation, TokenizerManager
from gristmill.tokenizer.validate import check_sampling, make_submit
from gristmill.transport import Endpoints
from tests.support.fake_engine import FakeEngine, greedy_ids


def with_engine(engine: FakeEngine, body: Callable[[TokenizerManager], Awaitable[None]]) -> None:
    async def main() -> None:
        await engine.manager.start()
        try:
            if engine.ready:
                await asyncio.wait_for(engine.manager.wait_ready(), 10)
            await body(engine.manager)
        finally:
            await engine.manager.close()

    with engine:
        asyncio.run(main())


def request(manager: TokenizerManager, n: int = 1, max_tokens: int = 5, prompt: str = "hello") -> Generation:
    ids = manager.tokenizer.encode(prompt)
    sampling = check_sampling(manager.limits, len(ids), max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return manager.submit([make_submit(ids, sampling)] * n)


async def texts_of(generation: Generation) -> dict[int, Text]:
    joined: dict[int, Text] = {}
    async for batch in generation.batches():
        for index, text in batch:
            before = joined.get(index)
            if before is not None:
                text.text = before.text + text.text
            joined[index] = text
    return joined


def test_many_requests_at_once_get_their_own_text(tiny_model: Path) -> None:
    async def body(manager: TokenizerManager) -> None:
        results = await asyncio.gather(*(texts_of(request(manager, 2, 8, f"prompt {i}")) for i in range(50)))
        for i, result in enumerate(results):
            expected = manager.tokenizer.decode(greedy_ids(engine, manager.tokenizer.encode(f"prompt {i}"), 8))
            assert [result[j].text for j in (0, 1)] == [expected] * 2
        assert manager.open_requests == 0

    engine = FakeEngine(tiny_model)
    with_engine(engine, body)


def test_an_asyncio_context_serves_as_well(tiny_model: Path) -> None:
    with FakeEngine(tiny_model) as engine:
        context = zmq.asyncio.Context.shadow(engine.context.underlying)
        engine.manager = TokenizerManager(engine.config, context, engine.tokenizer, engine.model_config)

        async def main() -> None:
            await engine.manager.start()
            await asyncio.wait_for(engine.manager.wait_ready(), 10)
            assert (await texts_of(request(engine.manager)))[0].finish == "length"
            await engine.manager.close()

        asyncio.run(main())


def test_the_manager_keeps_its_context_alive(tiny_model: Path) -> None:
    import gc

    with FakeEngine(tiny_model) as engine:
        manager = TokenizerManager(engine.config, zmq.Context(), engine.tokenizer, engine.model_config)
        gc.collect()

        async def main() -> None:
            await manager.start()
            await manager.close()

        asyncio.run(main())


def test_an_aborted_request_ends_at_once(tiny_model: Path) -> None:
    async def body(manager: TokenizerManager) -> None:
        generation = request(manager, 3, 400)
        asyncio.get_running_loop().call_later(0.05, generation.abort)
        await asyncio.wait_for(texts_of(generation), 5)
        generation.abort()
        assert manager.open_requests == 0 and generation.finished
        engine.wait_for(lambda: len(engine.aborts) == 3 and not engine.n_running)

    engine = FakeEngine(tiny_model, step_s=0.01)
    with_engine(engine, body)


def test_a_dead_engine_ends_every_wait(tiny_model: Path) -> None:
    async def body(manager: TokenizerManager) -> None:
        generation = request(manager, 2, 400)
        waiting = asyncio.create_task(texts_of(generation))
        control = asyncio.create_task(manager.control("flush", timeout_s=None))
        await asyncio.sleep(0)
        manager.fail_all("the worker died", status=500)
        result = await asyncio.wait_for(waiting, 5)
        assert {(text.finish, text.error, text.status) for text in result.values()} == {("error", "the worker died", 500)}
        with pytest.raises(EngineUnavailable, match="the worker died"):
            await control
        for call in (lambda: request(manager), lambda: asyncio.ensure_future(manager.control("flush"))):
            with pytest.raises(EngineUnavailable, match="the worker died"):
                outcome = call()
                if isinstance(outcome, asyncio.Future):
                    await outcome
        assert not manager.ready and manager.failure == "the worker died"

    with_engine(FakeEngine(tiny_model, step_s=0.01), body)


def test_an_engine_that_fails_while_loading_ends_the_wait_for_it(tiny_model: Path) -> None:
    async def body(manager: TokenizerManager) -> None:
        waiting = asyncio.create_task(manager.wait_ready())
        with pytest.raises(EngineUnavailable, match="still being loaded"):
            request(manager)
        manager.fail_all("no weights")
        with pytest.raises(EngineUnavailable, match="no weights"):
            await asyncio.wait_for(waiting, 5)
        with pytest.raises(EngineUnavailable, match="no weights"):
            await manager.wait_ready()

    with_engine(FakeEngine(tiny_model, ready=False), body)


def test_control_times_out_and_shutdown_is_answered(tiny_model: Path) -> None:
    async def body(manager: TokenizerManager) -> None:
        assert await manager.control("flush") == {"freed_tokens": 0}
        manager._send = lambda message: None  # type: ignore[method-assign]  # the scheduler never gets it
        with pytest.raises(EngineUnavailable, match=r"did not answer 'flush' within 0.01 s"):
            await manager.control("flush", timeout_s=0.01)
        del manager._send
        await asyncio.wait_for(manager.shutdown(), 5)

    with_engine(FakeEngine(tiny_model), body)


def test_a_peer_of_another_version_is_fatal_and_says_so(tiny_model: Path) -> None:
    with FakeEngine(tiny_model) as engine:

        async def main() -> None:
            await engine.manager.start()
            await engine.manager.wait_ready()
            from gristmill.messages import encode

            socket = engine.context.socket(zmq.PUSH)
            socket.connect(Endpoints(engine.config.endpoint_prefix).c_to_a)
            socket.send_multipart([b"\x80garbage"])  # dropped
            socket.send_multipart(encode(Hello(999, "detokenizer", 1)))
            deadline = asyncio.get_running_loop().time() + 5
            while not engine.manager.failure and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(0.005)
            assert "protocol 999" in engine.manager.failure
            socket.close(0)
            await engine.manager.close()

        asyncio.run(main())


def test_limits_are_the_smaller_of_tokenizer_and_model(tiny_model: Path) -> None:
    async def body(manager: TokenizerManager) -> None:
        limits = manager.limits
        assert (limits.vocab_size, limits.context_length, limits.pool_tokens) == (600, 100, 1 << 20)

    with_engine(FakeEngine(tiny_model, option_overrides={"context_length": 100}), body)
