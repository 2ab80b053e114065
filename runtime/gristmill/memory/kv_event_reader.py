"""The reading end of the KV events: for routers, and for tests that a mirror fed by the stream has what the prefix cache has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import zmq

from gristmill.memory.kv_events import TOPIC, AllBlocksCleared, BlockRemoved, BlockStored, KvEventBatch, replay_endpoint


class KvEventReader:
    """Subscribes to an engine and fills gaps in the stream from its ring.

    Args:
        endpoint: What --kv-events says.
        context: A context to share, or None for one of its own.
        queue_batches: Batches that wait here at most; what comes beyond is lost and asked for again.
    """

    def __init__(self, endpoint: str, context: zmq.Context | None = None, queue_batches: int = 10_000) -> None:
        self._context, self._owns_context = context or zmq.Context(), context is None
        self._endpoint = endpoint
        self._decoder = msgspec.msgpack.Decoder(KvEventBatch)
        self._sub = self._context.socket(zmq.SUB)
        self._sub.set_hwm(queue_batches)
        self._sub.setsockopt(zmq.LINGER, 0)
        self._sub.setsockopt(zmq.SUBSCRIBE, TOPIC)
        self._sub.connect(endpoint)
        self.next_seq = 0
        self.n_gaps = 0  # gaps seen
        self.n_lost = 0  # batches in them that the ring no longer had
        self.n_restarts = 0  # the engine began again at 0, so its cache is empty

    def read(self, timeout_ms: int = 0, replay_ms: int = 5000) -> list[KvEventBatch]:
        """Everything new, in order; waits up to `timeout_ms` for the first batch and `replay_ms` for the replay of a gap."""
        batches: list[KvEventBatch] = []
        while self._sub.poll(timeout_ms):
            timeout_ms = 0
            _, seq_bytes, payload = self._sub.recv_multipart()
            seq = int.from_bytes(seq_bytes, "big")
            if seq < self.next_seq:
                if seq:
                    continue  # had from a replay already
                self.n_restarts += 1
                self.next_seq = 0
                batches.append(KvEventBatch(0.0, [AllBlocksCleared()]))
            if seq > self.next_seq:
                self.n_gaps += 1
                batches += self.replay(seq, replay_ms)
                self.n_lost += seq - self.next_seq
            batches.append(self._decoder.decode(payload))
            self.next_seq = seq + 1
        return batches

    def replay(self, stop: int | None = None, timeout_ms: int = 5000) -> list[KvEventBatch]:
        """Ask for what is missing before sequence number `stop` (None: for all there is). Batches that the ring no longer has are counted
        in `n_lost`."""
        socket = self._context.socket(zmq.DEALER)  # a REQ takes one answer only
        socket.setsockopt(zmq.LINGER, 0)
        socket.set_hwm(0)
        batches: list[KvEventBatch] = []
        try:
            socket.connect(replay_endpoint(self._endpoint))
            socket.send_multipart((b"", self.next_seq.to_bytes(8, "big")))
            while socket.poll(timeout_ms):
                _, seq_bytes, payload = socket.recv_multipart()
                seq = int.from_bytes(seq_bytes, "big", signed=True)
                if seq < 0 or (stop is not None and seq >= stop):
                    break
                self.n_lost += seq - self.next_seq
                batches.append(self._decoder.decode(payload))
                self.next_seq = seq + 1
        finally:
            socket.close()
        return batches

    def __enter__(self) -> KvEventReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._sub.close()
        if self._owns_context:
            self._context.term()


class Page(NamedTuple):
    """One cached page: the hash of the page before it, and its tokens."""

    parent: int | None
    tokens: tuple[int, ...]
    extra_key: str


class CacheMirror:
    """What an engine has cached, by its events alone. No hash is computed: pages are found by their parent and their tokens."""

    def __init__(self) -> None:
        self.pages: dict[int, Page] = {}
        self._by_page: dict[Page, int] = {}

    def apply(self, batch: KvEventBatch) -> None:
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                for number in event.block_hashes:
                    # unknown where an earlier batch was lost
                    page = self.pages.pop(number, None)
                    if page is not None:
                        self._by_page.pop(page, None)
            else:
                self.pages.clear()
                self._by_page.clear()

    def _store(self, event: BlockStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        for i, number in enumerate(event.block_hashes):
            extra_key = event.extra_keys[i][0] if event.extra_keys else ""
            page = Page(parent, tuple(event.token_ids[i * size : (i + 1) * size]), extra_key)
            self.pages[number] = page
            self._by_page[page] = number
            parent = number

    def match_length(self, ids: Sequence[int] | np.ndarray, page_size: int, extra_key: str = "") -> int:
        """How many leading tokens of `ids` are cached there."""
        tokens = [int(token) for token in ids]
        parent: int | None = None
        for start in range(0, len(tokens) - page_size + 1, page_size):
            parent = self._by_page.get(Page(parent, tuple(tokens[start : start + page_size]), extra_key))
            if parent is None:
                return start
        return len(tokens) // page_size * page_size
