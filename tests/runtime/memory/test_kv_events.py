"""The stream of KV events: its bytes, gaps and replay, and that a mirror fed by nothing else has what the prefix cache has."""

from __future__ import annotations

import itertools
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from gristmill.errors import GristmillError
from gristmill.memory.kv_event_reader import CacheMirror, KvEventReader
from gristmill.memory.kv_events import (
    REPLAY_BATCHES_PER_TURN,
    TOPIC,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEventBatch,
    KvEventPublisher,
    replay_endpoint,
    to_event,
)
from gristmill.memory.radix_cache import RadixCache
from gristmill.messages import Out, ints
from gristmill.options import OptionError, Options
from tests.runtime.scheduler.rig import Rig

_numbers = itertools.count()
STORED: Any = ("stored", None, [1], ints([5, 6]), "")


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


class Wire:
    """A publisher and a reader that has joined. A replay is served by the test: one thread has both ends."""

    def __init__(self, context: zmq.Context, page_size: int = 2, queue_batches: int = 1000, **settings: Any) -> None:
        self.context, self.endpoint = context, f"inproc://kv{next(_numbers)}"
        self.publisher = KvEventPublisher(context, self.endpoint, page_size, queue_batches=queue_batches, clock=lambda: 12.5, **settings)
        self.sub = context.socket(zmq.SUB)
        self.sub.set_hwm(queue_batches)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"")
        self.sub.connect(self.endpoint)
        assert not self.sub.poll(20)  # joined

    def ask(self, seq: int) -> list[tuple[int, bytes]]:
        """Every (sequence number, payload) of a replay."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.set_hwm(0)
        dealer.connect(replay_endpoint(self.endpoint))
        dealer.send_multipart((b"", seq.to_bytes(8, "big")))
        answers = []
        for _ in range(1000):
            self.publisher.turn()
            while dealer.poll(1 if not answers else 0):
                _, seq_bytes, payload = dealer.recv_multipart()
                number = int.from_bytes(seq_bytes, "big", signed=True)
                if number < 0:
                    assert not payload and not self.publisher.busy
                    dealer.close()
                    return answers
                answers.append((number, payload))
        raise AssertionError("the replay has no end")


def test_the_bytes_are_what_readers_of_other_engines_expect(context: zmq.Context) -> None:
    wire = Wire(context)
    wire.publisher.publish(
        [
            ("stored", None, [1, 2**64 - 1], ints([5, 6, 7, 8]), ""),
            ("stored", 2**63, [3], ints([9, 10]), "salt"),
            ("removed", [3]),
            ("cleared",),
        ]
    )
    topic, seq, payload = wire.sub.recv_multipart()
    assert (topic, seq) == (TOPIC, bytes(8))
    assert msgspec.msgpack.decode(payload) == [
        12.5,
        [
            ["BlockStored", [1, -1], None, [5, 6, 7, 8], 2, None, "GPU", None, None],
            ["BlockStored", [3], -(2**63), [9, 10], 2, None, "GPU", None, [["salt"]]],
            ["BlockRemoved", [3], "GPU"],
            ["AllBlocksCleared"],
        ],
    ]


class _Tagged(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    pass


def test_a_reader_that_knows_five_fields_reads_it() -> None:
    """SGLang's BlockStored ends with lora_id and its BlockRemoved with the hashes; vLLM's go on with the medium."""

    class Stored(_Tagged, tag="BlockStored"):
        block_hashes: list[int]
        parent_block_hash: int | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None

    class Removed(_Tagged, tag="BlockRemoved"):
        block_hashes: list[int]

    batch = KvEventBatch(1.0, [to_event(("stored", 7, [8], ints([1]), "k"), 1), to_event(("removed", [8]), 1)])
    stored, removed = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=tuple[float, list[Stored | Removed]])[1]
    assert stored == Stored([8], 7, [1], 1, None) and removed == Removed([8])


def test_nothing_is_sent_when_nothing_happened(context: zmq.Context) -> None:
    wire = Wire(context)
    wire.publisher.publish([])
    assert wire.publisher.next_seq == 0 and not wire.sub.poll(20)


def test_a_slow_reader_misses_batches_and_never_holds_up_the_publisher(context: zmq.Context) -> None:
    wire = Wire(context, queue_batches=5)
    for _ in range(100):
        wire.publisher.publish([STORED])
    assert wire.publisher.next_seq == 100
    seqs = []
    while wire.sub.poll(20):
        seqs.append(int.from_bytes(wire.sub.recv_multipart()[1], "big"))
    assert 5 <= len(seqs) <= 20 and seqs == sorted(set(seqs))
    wire.publisher.publish([STORED])
    assert int.from_bytes(wire.sub.recv_multipart()[1], "big") == 100 > seqs[-1] + 1, "the gap shows in the sequence"


def test_a_replay_has_what_the_ring_has_from_the_asked_number_on(context: zmq.Context) -> None:
    wire = Wire(context, ring_batches=400)
    assert wire.ask(0) == []
    for _ in range(500):
        wire.publisher.publish([STORED])
    answers = wire.ask(3)
    assert [number for number, _ in answers] == list(range(100, 500)), "3 to 99 are no longer there"
    assert len(answers) > REPLAY_BATCHES_PER_TURN
    assert [number for number, _ in wire.ask(499)] == [499]
    assert wire.ask(500) == [] and wire.ask(2**63) == []
    assert msgspec.msgpack.decode(answers[0][1], type=KvEventBatch).events == [to_event(STORED, 2)]


def test_the_ring_is_bounded_in_bytes_too(context: zmq.Context) -> None:
    wire = Wire(context, ring_bytes=1000)
    large: Any = ("stored", None, [1] * 500, ints([5, 6] * 500), "")
    for _ in range(5):
        wire.publisher.publish([STORED])
    small = len(wire.ask(0)[0][1])
    assert [seq for seq, _ in wire.ask(0)] == [0, 1, 2, 3, 4]
    wire.publisher.publish([large])
    assert [seq for seq, _ in wire.ask(0)] == [5], "the newest is always there"
    for _ in range(100):
        wire.publisher.publish([STORED])
    assert [seq for seq, _ in wire.ask(0)] == list(range(106 - 1000 // small, 106))


def test_a_request_for_a_replay_that_is_none_is_ignored(context: zmq.Context) -> None:
    wire = Wire(context)
    wire.publisher.publish([STORED])
    dealer = context.socket(zmq.DEALER)
    dealer.connect(replay_endpoint(wire.endpoint))
    for frames in ([b""], [b"", b"123"], [b"", bytes(8), b""]):
        dealer.send_multipart(frames)
    assert len(wire.ask(0)) == 1
    assert not dealer.poll(20)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_a_mirror_fed_by_the_stream_alone_has_what_the_cache_has(page_size: int) -> None:
    g = random.Random(page_size)
    cache = RadixCache(60 * page_size, page_size, events=True, eviction=g.choice(["lru", "lfu"]))
    mirror, kinds = CacheMirror(), set()
    prompts: list[tuple[np.ndarray, str]] = []
    bases = [[g.randrange(4) for _ in range(20 * page_size)] for _ in range(3)]
    for turn in range(400):
        n = g.randrange(1, 20) * page_size
        ids, key = ints(g.choice(bases)[: n - page_size] + [g.randrange(50) for _ in range(page_size)]), g.choice(["", "", "salt"])
        match = cache.acquire(ids, key)
        missing = n - match.lease.n_tokens
        if missing <= cache.available:
            slots = np.concatenate([match.slots, cache.take(missing)])
            lease, n_present = cache.extend(match.lease, ids, slots, key)
            cache.give(slots[match.lease.n_tokens : n_present] if missing else slots[:0])
            cache.release(lease)
        else:
            cache.release(match.lease)
        prompts.append((ids, key))
        if turn % 97 == 96:
            cache.flush()
        if g.random() < 0.5:
            events = [to_event(change, page_size) for change in cache.take_events()]
            kinds |= {type(event) for event in events}
            mirror.apply(msgspec.msgpack.decode(msgspec.msgpack.encode(KvEventBatch(0.0, events)), type=KvEventBatch))
            assert cache.tree is not None and len(mirror.pages) * page_size == cache.tree.size
            for ids, key in prompts[-40:]:
                assert mirror.match_length(ids, page_size, key) == cache.probe(ids, key)
    assert kinds == {BlockStored, BlockRemoved, AllBlocksCleared}


def test_what_a_flushed_tree_still_does_is_not_told() -> None:
    cache = RadixCache(100, 1, events=True)
    ids = ints(range(10))
    lease, _ = cache.extend(cache.acquire(ids, "").lease, ids, cache.take(10), "")
    assert [change[0] for change in cache.take_events()] == ["stored"]
    cache.flush()
    cache.release(lease)
    assert cache.take_events() == [("cleared",)] and cache.take_events() == []


def test_without_events_nothing_is_recorded() -> None:
    cache = RadixCache(100, 1)
    cache.release(cache.extend(cache.acquire(ints([1]), "").lease, ints([1]), cache.take(1), "")[0])
    cache.flush()
    assert cache.take_events() == []


# --- the engine's scheduler


def one(rig: Rig, n: int) -> None:
    """A request of `n` prompt tokens, to its end."""
    rig.submit(f"r{next(_numbers)}", n, max_tokens=3, ignore_eos=True)
    while not rig.heard(Out).close:
        pass


def follow(rig: Rig, reader: KvEventReader, n_prompt: int) -> list[KvEventBatch]:
    """What the reader hears; requests go on until it hears something, as a subscription takes a moment to be known."""
    for _ in range(100):
        one(rig, n_prompt)
        if batches := reader.read(timeout_ms=100):
            return batches
    raise AssertionError("no event came")


def test_the_scheduler_publishes_replays_and_says_when_it_was_flushed(tmp_path: Path) -> None:
    endpoint, prompt = f"ipc://{tmp_path}/kv", np.arange(10, 19)
    with Rig(own_workers=False, kv_events=endpoint, page_size=2, model_path="null:0") as rig:
        rig.start_null_worker()
        one(rig, 9)
        for path in (tmp_path / "kv", tmp_path / "kv.replay"):
            assert path.stat().st_mode & 0o077 == 0, "nobody else may read"
        with KvEventReader(endpoint) as reader:
            mirror = CacheMirror()
            for batch in reader.replay():
                mirror.apply(batch)
            assert mirror.match_length(prompt, 2) == 8 and reader.n_lost == 0
            rig.control(1, "flush")
            batches = follow(rig, reader, 3)
            while not any(AllBlocksCleared() in batch.events for batch in batches):
                batches += follow(rig, reader, 3)
            for batch in batches:
                mirror.apply(batch)
            assert mirror.match_length(prompt, 2) == 2 and reader.n_lost == 0


def test_a_reader_fills_a_gap_from_the_ring(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/kv"
    with Rig(own_workers=False, kv_events=endpoint, model_path="null:0") as rig:
        rig.start_null_worker()
        one(rig, 20)
        with KvEventReader(endpoint) as reader:
            mirror = CacheMirror()
            for n in range(21, 200):
                one(rig, n)
                if batches := reader.read(timeout_ms=100):
                    break
            for batch in batches:
                mirror.apply(batch)
            assert reader.n_gaps == 1 and reader.n_lost == 0
            assert mirror.match_length(np.arange(10, 30), 1) == 20, "what was published before the reader came"


def test_an_endpoint_that_cannot_be_bound_is_refused_in_one_sentence(context: zmq.Context) -> None:
    with pytest.raises(GristmillError, match="cannot publish KV events on ipc:///nowhere/kv: No such file"):
        KvEventPublisher(context, "ipc:///nowhere/kv", 1)


@pytest.mark.parametrize("name", ["kv", "kv.replay"])
def test_a_file_that_is_no_socket_is_left_alone(context: zmq.Context, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("precious")
    with pytest.raises(GristmillError, match=f"cannot publish KV events on ipc://{tmp_path}/kv: Address already in use"):
        KvEventPublisher(context, f"ipc://{tmp_path}/kv", 1)
    assert (tmp_path / name).read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_endpoint_of_a_live_engine_is_not_taken_away_and_that_of_a_dead_one_is(context: zmq.Context, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/kv"
    first = KvEventPublisher(context, endpoint, 1)
    with pytest.raises(GristmillError, match="Address already in use"):
        KvEventPublisher(context, endpoint, 1)
    with KvEventReader(endpoint, context) as reader:
        for _ in range(100):  # a subscription takes a moment to be known
            first.publish([STORED])
            if reader.read(timeout_ms=20, replay_ms=0):
                break
        else:
            raise AssertionError("the first one is heard no more")
    first.close()
    assert list(tmp_path.iterdir()) == [], "no socket is left"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "kv"))
    KvEventPublisher(context, endpoint, 1).close()


def test_a_path_that_is_too_long_for_a_socket_is_refused(context: zmq.Context, tmp_path: Path) -> None:
    with pytest.raises(GristmillError, match="path too long"):
        KvEventPublisher(context, f"ipc://{tmp_path}/{'x' * 120}", 1)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5557", "tcp://*:5557", "ipc://", "ipc://@abstract", "/run/kv", "inproc://x"])
def test_only_sockets_with_file_permissions_are_taken(endpoint: str) -> None:
    with pytest.raises(OptionError, match="--kv-events must be ipc:// and a path"):
        Options(model="m", kv_events=endpoint)


def test_without_a_prefix_cache_there_is_nothing_to_publish() -> None:
    with pytest.raises(OptionError, match="--no-radix-cache"):
        Options(model="m", kv_events="ipc:///run/kv", radix_cache=False)
