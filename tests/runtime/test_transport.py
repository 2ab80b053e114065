"""The edges between processes: greeting, order, and what foreign bytes do (nothing)."""

from __future__ import annotations

import os

import pytest
import zmq

from gristmill.errors import ProtocolError
from gristmill.messages import PROTOCOL_VERSION, Abort, Hello, encode
from gristmill.transport import Endpoints, Pull, Push


@pytest.fixture(params=["ipc", "inproc"])
def edge(request, tmp_path):
    context = zmq.Context()
    endpoint = Endpoints(f"ipc://{tmp_path}" if request.param == "ipc" else "inproc://test").a_to_b
    pull = Pull(context, endpoint)
    yield context, endpoint, pull
    pull.close()
    context.destroy(linger=0)


def test_messages_arrive_in_order_after_a_greeting(edge):
    context, endpoint, pull = edge
    push = Push(context, endpoint, "tokenizer")
    for i in range(100):
        push.send(Abort(str(i)))
    assert [pull.recv(2000).rid for _ in range(100)] == [str(i) for i in range(100)]
    assert pull.peer == Hello(PROTOCOL_VERSION, "tokenizer", os.getpid())
    assert pull.recv(0) is None


def test_another_protocol_version_is_fatal_with_both_versions_named(edge):
    context, endpoint, pull = edge
    socket = context.socket(zmq.PUSH)
    socket.connect(endpoint)
    socket.send_multipart(encode(Hello(PROTOCOL_VERSION + 1, "scheduler", 9)))
    with pytest.raises(ProtocolError, match=f"protocol {PROTOCOL_VERSION + 1}, this one {PROTOCOL_VERSION}"):
        pull.recv(2000)


def test_a_message_before_the_greeting_is_fatal(edge):
    context, endpoint, pull = edge
    socket = context.socket(zmq.PUSH)
    socket.connect(endpoint)
    socket.send_multipart(encode(Abort("1")))
    with pytest.raises(ProtocolError, match="before the Hello"):
        pull.recv(2000)


def test_foreign_bytes_are_dropped_and_the_edge_lives_on(edge, tmp_path, caplog):
    context, endpoint, pull = edge
    marker = tmp_path / "marker"
    foreign = context.socket(zmq.PUSH)
    foreign.connect(endpoint)
    payloads = [b"", b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR.", os.urandom(1024)]
    for payload in payloads:
        foreign.send(payload)
    push = Push(context, endpoint, "tokenizer")
    push.send(Abort("after"))
    assert pull.recv(2000) == Abort("after")
    assert pull.recv(200) is None and not marker.exists()
    assert sum("dropped" in record.message for record in caplog.records) == len(payloads)
    foreign.close()
    push.close()
