"""What enters and leaves the prefix cache, published for routers over ZeroMQ in the wire format that readers of vLLM and SGLang know.

One message is [topic, sequence number (8 bytes, big-endian), msgpack payload], see docs/kv-events.md. This module has the messages and the
publisher; kv_event_reader.py is the other end.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import zmq

from gristmill.errors import GristmillError

TOPIC = b"kv-events"
QUEUE_BATCHES = 256  # batches that wait for one reader; what it loses beyond that it asks for again
RING_BATCHES = 10_000  # batches that can be replayed,
RING_BYTES = 64 << 20  # as far as they are no larger than this together
REPLAY_BATCHES_PER_TURN = 256  # so that a long replay does not hold up a step
MEDIUM = "GPU"  # what readers call the memory that attention reads, whatever the device
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class KvEvent(msgspec.Struct, array_like=True, gc=False, tag=True):
    """One change of the prefix cache: an array of its class name and its fields in order. Readers ignore fields beyond those they know."""


class BlockStored(KvEvent):
    """Pages were added after page `parent_block_hash` (None: at the beginning). A hash stands for its page and all tokens before it."""

    block_hashes: list[int]  # signed 64 bit, one per page
    parent_block_hash: int | None
    token_ids: list[int]  # of all these pages
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[str]] | None = None  # per page; what else the request must match, such as a cache salt


class BlockRemoved(KvEvent):
    """Pages are gone, each after all that followed it."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(KvEvent):
    """The cache was flushed: nothing that was stored before this is found any more."""


class KvEventBatch(msgspec.Struct, array_like=True, gc=False):
    """What happened in one turn of the scheduler, in order; `ts` is seconds since the epoch."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


def replay_endpoint(endpoint: str) -> str:
    """Where the batches published on `endpoint` can be asked for again."""
    return endpoint + ".replay"


def signed(hashes: Sequence[int]) -> list[int]:
    """64-bit hashes as the signed integers of the wire."""
    return np.array(hashes, dtype=np.uint64).view(np.int64).tolist()


def to_event(change: tuple[Any, ...], page_size: int) -> BlockStored | BlockRemoved | AllBlocksCleared:
    """The event of one entry of RadixCache.take_events."""
    if change[0] == "stored":
        _, parent, pages, tokens, extra_key = change
        return BlockStored(
            signed(pages),
            None if parent is None else signed([parent])[0],
            tokens.tolist(),
            page_size,
            medium=MEDIUM,
            extra_keys=[[extra_key]] * len(pages) if extra_key else None,
        )
    if change[0] == "removed":
        return BlockRemoved(signed(change[1]), medium=MEDIUM)
    return AllBlocksCleared()


class KvEventPublisher:
    """Publishes batches, keeps the newest of them, and sends them again to who asks. Nothing here waits for a reader.

    A reader that is too slow loses messages: ZeroMQ drops what its queue of `queue_batches` cannot hold, and the reader sees a gap in the
    sequence numbers.

    Args:
        context: For the sockets.
        endpoint: An ipc:// path; `replay_endpoint` of it is bound too. Both sockets can be used by the owner of this process only. What a
            dead process left there is replaced, anything else is not.
        page_size: Tokens per page.
        queue_batches: Batches that wait for one reader at most.
        ring_batches, ring_bytes: Batches that can be replayed: so many, and of this size in all, but always the newest one.
        clock: Seconds since the epoch.

    Raises:
        GristmillError: The endpoint cannot be bound, or another process has it.
    """

    def __init__(
        self,
        context: zmq.Context,
        endpoint: str,
        page_size: int,
        *,
        queue_batches: int = QUEUE_BATCHES,
        ring_batches: int = RING_BATCHES,
        ring_bytes: int = RING_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._page_size, self._clock = page_size, clock
        self._encoder = msgspec.msgpack.Encoder()
        self._ring: deque[tuple[int, bytes]] = deque()
        self._most_batches, self._most_bytes, self._ring_bytes = ring_batches, ring_bytes, 0
        self._replays: deque[tuple[bytes, int]] = deque()  # (reader, next sequence number)
        self._files: list[tuple[str, int]] = []  # (path, inode) of our sockets
        self.next_seq = 0
        self._pub = context.socket(zmq.PUB)
        self._replay = context.socket(zmq.ROUTER)
        self._pub.set_hwm(queue_batches)
        self._replay.set_hwm(ring_batches + 1)  # a whole replay and its end fit; what a reader does not take is dropped
        try:
            for zmq_socket, address in ((self._pub, endpoint), (self._replay, replay_endpoint(endpoint))):
                zmq_socket.setsockopt(zmq.LINGER, 0)
                self._bind(zmq_socket, address)
        except (zmq.ZMQError, OSError) as error:
            self.close()
            raise GristmillError(f"cannot publish KV events on {endpoint}: {error.strerror or error}") from None

    @property
    def socket(self) -> zmq.Socket:
        """Readable when somebody asks for a replay; for a zmq.Poller."""
        return self._replay

    @property
    def busy(self) -> bool:
        """Whether a replay goes on with the next `turn`."""
        return bool(self._replays)

    def publish(self, changes: Sequence[tuple[Any, ...]]) -> None:
        """Send what RadixCache.take_events returned as one batch; nothing happened: nothing is sent."""
        if not changes:
            return
        batch = KvEventBatch(self._clock(), [to_event(change, self._page_size) for change in changes])
        payload, seq = self._encoder.encode(batch), self.next_seq
        self.next_seq += 1
        self._keep(seq, payload)
        self._pub.send_multipart((TOPIC, seq.to_bytes(8, "big"), payload), zmq.NOBLOCK)

    def _keep(self, seq: int, payload: bytes) -> None:
        self._ring.append((seq, payload))
        self._ring_bytes += len(payload)
        while len(self._ring) > self._most_batches or (self._ring_bytes > self._most_bytes and len(self._ring) > 1):
            self._ring_bytes -= len(self._ring.popleft()[1])

    def turn(self) -> None:
        """Read requests for a replay and send a part of what was asked for."""
        while self._replay.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            frames = self._replay.recv_multipart(zmq.NOBLOCK)
            if len(frames) == 3 and len(frames[2]) == 8 and len(self._replays) < RING_BATCHES:
                self._replays.append((frames[0], int.from_bytes(frames[2], "big")))
        if self._replays:
            reader, seq = self._replays.popleft()
            first = self._ring[0][0] if self._ring else self.next_seq
            seq = max(seq, first)
            stop = min(self.next_seq, seq + REPLAY_BATCHES_PER_TURN)
            for number in range(seq, stop):
                self._send_replay(reader, number.to_bytes(8, "big"), self._ring[number - first][1])
            if stop >= self.next_seq:
                self._send_replay(reader, END_OF_REPLAY, b"")
            else:
                self._replays.append((reader, stop))

    def _send_replay(self, reader: bytes, seq: bytes, payload: bytes) -> None:
        self._replay.send_multipart((reader, b"", seq, payload), zmq.NOBLOCK)

    def _bind(self, zmq_socket: zmq.Socket, address: str) -> None:
        """Let `zmq_socket` listen. At an ipc:// path it gets a socket made here: ZeroMQ would delete whatever file is there."""
        path = address.removeprefix("ipc://")
        if path == address:
            zmq_socket.bind(address)
            return
        _remove_dead_socket(path)
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listener:
            listener.bind(path)
            self._files.append((path, os.lstat(path).st_ino))
            os.chmod(path, 0o600)  # nobody can connect before it listens
            listener.setblocking(False)
            listener.listen(128)
            zmq_socket.setsockopt(zmq.USE_FD, listener.fileno())
            zmq_socket.bind(address)
            listener.detach()

    def close(self) -> None:
        self._pub.close()
        self._replay.close()
        for path, inode in self._files:
            with contextlib.suppress(OSError):
                if os.lstat(path).st_ino == inode:
                    os.unlink(path)
        self._files = []


def _remove_dead_socket(path: str) -> None:
    """Remove a socket on which nobody listens; leave anything else, so that binding fails."""
    with contextlib.suppress(FileNotFoundError), contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except BlockingIOError:  # somebody listens, with a full backlog
            return
