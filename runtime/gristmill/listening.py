"""The listening sockets of the server, opened before anything slow is imported or read, so that a taken port costs nothing."""

from __future__ import annotations

import errno
import socket
from typing import Any

from gristmill.errors import GristmillError, OptionError

_BACKLOG = 2048


def bind_sockets(host: str, port: int) -> list[socket.socket]:
    """Listening sockets on all addresses of `host`; port 0 becomes one free port, the same for all of them.

    Raises:
        GristmillError: one sentence naming the port or address.
    """
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise OptionError(f"--host {host!r} is not a known host name or address") from error
    addresses = list(dict.fromkeys((info[0], info[4]) for info in infos))
    sockets: list[socket.socket] = []
    try:
        for family, address in addresses:
            if port == 0 and sockets:
                address = (address[0], sockets[0].getsockname()[1], *address[2:])
            try:
                sockets.append(_listen(family, address))
            except OSError as error:
                # `localhost` names ::1 also where IPv6 is switched off
                if len(addresses) > 1 and error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    continue
                raise _bind_error(host, port, error) from error
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    if not sockets:
        raise OptionError(f"--host {host!r} is not an address of this machine")
    return sockets


def _listen(family: int, address: Any) -> socket.socket:
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it on, each response waits 40 ms for an ACK
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != "::"))
        sock.bind(address)
        sock.listen(_BACKLOG)  # at once: two sockets may be bound to one port as long as neither listens
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _bind_error(host: str, port: int, error: OSError) -> GristmillError:
    if error.errno == errno.EADDRINUSE:
        return GristmillError(f"port {port} on {host} is already in use; stop the program that holds it or choose another with --port")
    if error.errno in (errno.EACCES, errno.EPERM):
        return GristmillError(f"port {port} on {host} may not be opened by this user; choose a port from 1024 up with --port")
    if error.errno == errno.EADDRNOTAVAIL:
        return OptionError(f"--host {host!r} is not an address of this machine")
    return GristmillError(f"cannot listen on port {port} of {host}: {error.strerror or error}")


def url_of(host: str, sock: socket.socket) -> str:
    """The base URL for `sock`, which was opened for `host`."""
    return f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"
