"""The port is opened first of all, and whatever is wrong with it is one sentence that names it."""

from __future__ import annotations

import errno
import socket

import pytest

from gristmill.errors import GristmillError, OptionError
from gristmill.listening import bind_sockets, url_of


def _close(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


def test_port_0_becomes_one_port_on_all_addresses_of_the_host() -> None:
    sockets = bind_sockets("localhost", 0)
    assert len({sock.getsockname()[1] for sock in sockets}) == 1
    assert url_of("localhost", sockets[0]) == f"http://localhost:{sockets[0].getsockname()[1]}"
    _close(sockets)


def test_a_port_whose_holder_has_gone_can_be_opened_again_at_once() -> None:
    first = bind_sockets("127.0.0.1", 0)
    port = first[0].getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)):
        _close(first)
        _close(bind_sockets("127.0.0.1", port))


def test_two_servers_never_share_a_port() -> None:
    first = bind_sockets("127.0.0.1", 0)
    with pytest.raises(GristmillError, match=f"port {first[0].getsockname()[1]} on 127.0.0.1 is already in use"):
        bind_sockets("127.0.0.1", first[0].getsockname()[1])
    _close(first)


def test_an_ipv6_address_is_bracketed_in_the_url() -> None:
    try:
        sockets = bind_sockets("::1", 0)
    except OptionError:
        pytest.skip("this machine has no IPv6")
    assert url_of("::1", sockets[0]).startswith("http://[::1]:")
    _close(sockets)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "256.1.1.1", "203.0.113.7", "a" * 300, "\0"])
def test_a_host_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(OptionError, match="--host"):
        bind_sockets(host, 0)


@pytest.mark.parametrize(("number", "words"), [(errno.EACCES, "port 80 on 127.0.0.1 may not be opened"), (errno.EMFILE, "port 80")])
def test_a_privileged_port_is_named(number: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(sock: socket.socket, address: object) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(GristmillError, match=words):
        bind_sockets("127.0.0.1", 80)
