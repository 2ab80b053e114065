"""The ZeroMQ edges between the processes: one PUSH/PULL pair each, over ipc:// in a private directory or inproc:// in one process.

Nothing here knows what the messages mean. Bytes that are not a message of ours are logged and dropped: they cannot come from
another user (the directory is 0700), and no byte received is ever unpickled or executed.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass

import zmq

from gristmill.errors import ProtocolError
from gristmill.messages import PROTOCOL_VERSION, Hello, Message, decode, encode

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 64 << 20
_LINGER_MS = 500


@dataclass(frozen=True)
class Endpoints:
    """Names of all edges below one prefix: `ipc://<private dir>` for processes, `inproc://<unique>` inside one process."""

    prefix: str

    @property
    def a_to_b(self) -> str:
        return f"{self.prefix}/a-b"

    @property
    def b_to_c(self) -> str:
        return f"{self.prefix}/b-c"

    @property
    def c_to_a(self) -> str:
        return f"{self.prefix}/c-a"

    def b_to_d(self, rank: int) -> str:
        return f"{self.prefix}/b-d{rank}"

    def d_to_b(self, rank: int) -> str:
        return f"{self.prefix}/d{rank}-b"


class Push:
    """The sending end of an edge; says Hello as soon as it is made. Not thread-safe, like the socket below it."""

    def __init__(self, context: zmq.Context, endpoint: str, role: str) -> None:
        self.socket = context.socket(zmq.PUSH)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self.socket.connect(endpoint)
        self.send(Hello(PROTOCOL_VERSION, role, os.getpid()))

    def send(self, message: Message) -> None:
        """Queue `message`; never blocks (no high-water mark: what bounds each edge is the protocol)."""
        self.send_encoded(encode(message))

    def send_encoded(self, frames: list[bytes | memoryview]) -> None:
        """Queue frames made by `encode`, so that the same bytes can go to several ranks."""
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:  # over inproc:// the other end has closed: nobody will ever read it
            log.debug("dropped a message whose reader has closed its end")

    def close(self) -> None:
        self.socket.close()


class Pull:
    """The receiving end of an edge: binds, checks the Hello, hands out decoded messages. `socket` may be put in a zmq.Poller."""

    def __init__(self, context: zmq.Context, endpoint: str) -> None:
        self.endpoint = endpoint
        self.peer: Hello | None = None
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.socket.bind(endpoint)

    def recv(self, timeout_ms: int | None = 0) -> Message | None:
        """The next message, or None when none came within `timeout_ms` (0: only what is already there; None: wait forever).

        Raises ProtocolError when the peer speaks another protocol version or sends before its Hello.
        """
        deadline = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        while True:
            left = None if deadline is None else max(0, round((deadline - time.monotonic()) * 1000))
            if not self.socket.poll(left):
                return None
            frames = [frame.buffer for frame in self.socket.recv_multipart(copy=False)]
            try:
                message = decode(frames)
            except ProtocolError as error:
                log.warning("dropped on %s: %s", self.endpoint.rsplit("/", 1)[-1], error)
                continue
            if isinstance(message, Hello):
                if message.protocol != PROTOCOL_VERSION:
                    raise ProtocolError(
                        f"process {message.pid} ({message.role}) speaks protocol {message.protocol}, this one {PROTOCOL_VERSION}: "
                        "install one version of gristmill"
                    )
                self.peer = message
                continue
            if self.peer is None:
                raise ProtocolError(f"a {type(message).__name__} came before the Hello on {self.endpoint}")
            return message

    def close(self) -> None:
        self.socket.close()
