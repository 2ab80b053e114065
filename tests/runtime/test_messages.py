"""The wire form of every message: what goes in comes out, and nothing malformed gets through."""

from __future__ import annotations

import contextlib
import random

import msgspec
import numpy as np
import pytest

from gristmill.errors import ProtocolError
from gristmill.messages import (
    MESSAGES,
    Close,
    DetokSpec,
    Hello,
    LogprobBlock,
    NewReq,
    Open,
    Out,
    Ready,
    Result,
    SamplingParams,
    Stats,
    Step,
    Submit,
    Text,
    TokenLogprob,
    Usage,
    Write,
    decode,
    encode,
    floats,
    ints,
)
from gristmill.messages import Pool as PoolInfo

SAMPLING = SamplingParams(temperature=0.5, seed=2**62, logit_bias={3: 1.5}, stop_token_ids=(4, 5))

EXAMPLES = [
    Hello(1, "scheduler", 4),
    Submit("r1", ints([1, 2, 3]), SAMPLING, detok=DetokSpec(stop=("a", "é"), prompt_tail=(2, 3))),
    Step(
        7,
        ints([1, 2]),
        ints([1, 4]),
        ints([9, 4]),
        ints([1, 0]),
        new=[NewReq(2, 4, ints([5, 6, 7, 8]), SAMPLING, eos_ids=(2,)), NewReq(1, 1, ints([5]), SAMPLING)],
        writes=[Write(0, 2, 0, 4)],
        write_slots=ints([10, 11, 12, 13]),
    ),
    Ready(0, [PoolInfo("full", 128, 16)], 8, 512, {"backend": "cpu"}),
    Result(7, ints([3, -2]), [LogprobBlock(0, 9, ints([3]), floats([-0.5]), 1, ints([8]), floats([-0.25]))], 1.0, 2.0),
    Out([Open(1, "r1")], ints([1]), ints([3]), close=[Close(1, "length", 3, 2)]),
    Stats(ready=True, running=3),
    Text(
        "r1",
        "hi",
        ints([3]),
        [TokenLogprob(3, "h", b"\xff", -0.5, [TokenLogprob(4, "i", b"i", None)])],
        finish="stop",
        usage=Usage(1, 2, 0),
    ),
]


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, msgspec.Struct):
        return type(a) is type(b) and all(same(getattr(a, name), getattr(b, name)) for name in a.__struct_fields__)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_a_message_survives_the_wire(message):
    assert same(decode(encode(message)), message)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_an_unknown_field_of_a_newer_sender_is_ignored(message):
    frames = encode(message)
    header = msgspec.msgpack.decode(frames[0])
    header["added_later"] = 1
    assert same(decode([msgspec.msgpack.encode(header), *frames[1:]]), message)


def test_every_message_has_its_own_tag():
    tags = [kind.__struct_config__.tag for kind in MESSAGES]
    assert len(set(tags)) == len(tags) and all(isinstance(tag, str) for tag in tags)


STEP_FRAMES = [bytes(frame) for frame in encode(EXAMPLES[2])]


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\x80"],
        [b"cos\nsystem\n(S'true'\ntR."],
        STEP_FRAMES[:-1],
        [*STEP_FRAMES, b"1234"],
        [STEP_FRAMES[0], STEP_FRAMES[1][:-1], *STEP_FRAMES[2:]],
        [STEP_FRAMES[0], STEP_FRAMES[1] + b"1234", *STEP_FRAMES[2:]],
    ],
    ids=["none", "empty", "no type", "pickle", "frame missing", "frame left over", "frame cut", "frame too long"],
)
def test_malformed_frames_are_refused(frames):
    with pytest.raises(ProtocolError, match="received a"):
        decode(frames)


def test_random_damage_never_raises_anything_but_a_protocol_error(seed):
    rng = random.Random(seed)
    for _ in range(3000):
        frames = [bytearray(frame) for frame in encode(rng.choice(EXAMPLES))]
        for _ in range(rng.randrange(1, 4)):
            frame = rng.choice(frames)
            if frame:
                frame[rng.randrange(len(frame))] = rng.randrange(256)
        with contextlib.suppress(ProtocolError):
            decode(frames)


def test_deep_nesting_is_refused():
    with pytest.raises(ProtocolError):
        decode([b"\x82\xa4type\xa7control\xa4args" + b"\x81\xa1a" * 100_000 + b"\x01"])


@pytest.mark.parametrize("value", [np.zeros((2, 2), np.int32), np.zeros(2, np.float64), object()])
def test_only_one_dimensional_known_arrays_are_sent(value):
    with pytest.raises(TypeError, match="cannot be sent"):
        encode(Submit("r", value, SAMPLING))
