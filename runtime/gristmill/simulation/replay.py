"""A trace against a real engine: every request is sent when its time has come, whatever has become of the others (open loop)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from gristmill.messages import SamplingParams
from gristmill.simulation.report import Record
from gristmill.simulation.traces import TraceRequest
from gristmill.tokenizer.manager import TokenizerManager
from gristmill.tokenizer.validate import make_submit


async def replay(manager: TokenizerManager, requests: Sequence[TraceRequest]) -> list[Record]:
    """Run `requests` (in the order of their arrival) with their exact output lengths; latencies are what a client of this process sees."""
    submits = []
    for request in requests:
        sampling = SamplingParams(temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True)
        submits.append(make_submit(request.prompt(manager.limits.vocab_size), sampling))
    start = time.monotonic()

    async def one(number: int) -> Record:
        request = requests[number]
        await asyncio.sleep(start + request.t - time.monotonic())
        record = Record(request.t, request.prompt_tokens)
        generation = manager.submit([submits[number]])
        try:
            async for batch in generation.batches():
                for _, text in batch:
                    if text.finish == "error":
                        record.error, record.reason = text.code or "error", text.error or ""
                    if text.ids.size:
                        record.t_last = time.monotonic() - start
                        record.t_first = record.t_last if record.t_first < 0 else record.t_first
                    if text.usage is not None:
                        record.output_tokens, record.cached_tokens = text.usage.completion_tokens, text.usage.cached_tokens
        finally:
            generation.abort()
        return record

    return list(await asyncio.gather(*map(one, range(len(requests)))))
