"""uvicorn's httptools protocol with a bound on request headers, which httptools collects in memory without any."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 << 10


class BoundedHttpProtocol(HttpToolsProtocol):
    """A request line and headers of more than MAX_HEADER_BYTES (and what arrived with them) get a 400 and end the connection."""

    _header_bytes = 0
    _in_headers = True

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                self.send_400_response("Request headers are too large.")

    def on_headers_complete(self) -> None:
        self._in_headers = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_headers, self._header_bytes = True, 0
        super().on_message_complete()
