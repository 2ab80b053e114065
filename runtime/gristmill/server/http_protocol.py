"""uvicorn's httptools protocol with two bounds that it lacks: on request headers, which httptools collects in memory, and on the time
that a connection may stay open whose client reads nothing."""

from __future__ import annotations

import asyncio
import logging

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 << 10
STALL_S = 60.0


class BoundedHttpProtocol(HttpToolsProtocol):
    """A request line and headers of more than MAX_HEADER_BYTES (and what arrived with them) get a 400 and end the connection. So does a
    client that takes not a byte for STALL_S while more than the transport's buffer waits for it; its request is aborted."""

    stall_s = STALL_S
    _header_bytes = 0
    _in_headers = True
    _ended_message = False
    _stall: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        self._ended_message = False
        super().data_received(data)
        if self._in_headers and not self._ended_message:  # else most of it was the body of the message before
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                self.send_400_response("Request headers are too large.")

    def on_headers_complete(self) -> None:
        self._in_headers = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_headers, self._header_bytes, self._ended_message = True, 0, True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # not one that was pipelined behind it
            self.cycle.body = bytearray()  # of a request that was refused unread; an idle connection is not to hold it

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.transport.abort()  # nobody may ever read the end of the last response

    def _watch_reader(self, unread_bytes: int) -> None:
        self._stop_watching()
        self._stall = self.loop.call_later(self.stall_s, self._look, unread_bytes)

    def _look(self, before: int) -> None:
        unread_bytes = self.transport.get_write_buffer_size()  # nothing is added while writing is paused
        if unread_bytes < before:
            self._watch_reader(unread_bytes)
            return
        log.warning("closed the connection of a client that read nothing for %g s while %d bytes waited for it", self.stall_s, unread_bytes)
        self.transport.abort()

    def _stop_watching(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
