"""The three trace formats, what they share, and what is said of a file that is none of them."""

import numpy as np
import pytest

from gristmill.errors import GristmillError
from gristmill.simulation.traces import TraceRequest, read_trace, rescale

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:00,20,1
"""
MOONCAKE = """\
{"timestamp": 3000, "input_length": 700, "output_length": 20, "hash_ids": [0, 1]}
{"timestamp": 4500, "input_length": 1024, "output_length": 5, "hash_ids": [0, 2]}
"""
OWN = """\
{"t": 1.0, "prompt": 30, "output": 4}
{"t": 0.5, "prompt": [7, 8, 9], "output": 2, "priority": 3}

{"t": 2.0, "prompt": 50, "shared": [["system", 20], ["user 1", 10]], "output": 1}
{"t": 2.5, "prompt": 25, "shared": [["system", 25]], "output": 1}
"""


@pytest.fixture
def read(tmp_path):
    def read(text, **arguments):
        path = tmp_path / "trace"
        path.write_text(text)
        return read_trace(path, **arguments)

    return read


def common_prefix(a: TraceRequest, b: TraceRequest) -> int:
    n = min(a.prompt_tokens, b.prompt_tokens)
    return int(np.cumprod(a.prompt()[:n] == b.prompt()[:n]).sum())


def test_azure(read):
    requests = read(AZURE)
    assert [(r.prompt_tokens, r.output_tokens) for r in requests] == [(374, 44), (396, 109), (20, 1)]
    assert [r.t for r in requests] == pytest.approx([0, 4.314579, 13.31941], abs=1e-6)
    assert common_prefix(requests[0], requests[1]) == 0


def test_azure_with_time_zone_and_windows_line_ends(read):
    text = AZURE.replace("00,20,1", "00.5+00:00,20,1").replace("\n", "\r\n")
    assert read(text)[-1].t == pytest.approx(13.81941, abs=1e-6)


def test_mooncake_blocks_are_shared_tokens(read):
    first, second = read(MOONCAKE)
    assert (first.t, second.t) == (0, 1.5)
    assert (len(first.prompt()), len(second.prompt()), second.output_tokens) == (700, 1024, 5)
    assert common_prefix(first, second) == 512


def test_our_own_format(read):
    ids, plain, shared, whole = read(OWN)
    assert (ids.prompt().tolist(), ids.priority, ids.t) == ([7, 8, 9], 3, 0)
    assert (plain.t, plain.prompt_tokens, plain.output_tokens) == (0.5, 30, 4)
    assert common_prefix(shared, whole) == 20
    assert (shared.prompt_tokens, whole.prompt_tokens) == (50, 25)


def test_made_up_tokens_are_the_same_in_every_run(read):
    request = read('{"t": 0, "prompt": 4, "output": 1}\n')[0]
    assert request.prompt(1000).tolist() == [71, 143, 534, 256]
    assert 0 <= request.prompt(2).min() <= request.prompt(2).max() < 2


def test_limit_reads_no_further(read):
    assert len(read(OWN + "not a request\n", limit=4)) == 4


def test_rate_and_speed(read):
    requests = read(AZURE)
    assert [r.t for r in rescale(requests, speed=2)] == pytest.approx([r.t / 2 for r in requests])
    assert rescale(requests, rate=0.5)[-1].t == pytest.approx(4)
    together = [TraceRequest(0.0, 1, (("x", 5),))] * 3
    assert [r.t for r in rescale(together, rate=10)] == pytest.approx([0, 0.1, 0.2])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "has no requests"),
        ("\n\n", "has no requests"),
        ("a,b,c\n1,2,3\n", "line 1: a trace begins with TIMESTAMP,ContextTokens,GeneratedTokens or with a JSON object"),
        (AZURE + "2023-11-16 18:16:00,20\n", "line 5: 2 fields"),
        (AZURE + "yesterday,20,1\n", "line 5: TIMESTAMP must look like"),
        (AZURE + "2023-13-16 18:16:00,20,1\n", "line 5: "),
        (AZURE + "2023-11-16 18:16:00,20,-1\n", "line 5: GeneratedTokens must be an integer from 1"),
        (MOONCAKE.replace("[0, 2]", "[0]"), "line 2: 1 hash_ids do not cover input_length 1024"),
        (MOONCAKE.replace("[0, 2]", "7"), "line 2: hash_ids must be a list of integers"),
        (MOONCAKE.replace("4500", '"soon"'), "line 2: timestamp must be a number"),
        (MOONCAKE + '{"timestamp": 1\n', "line 3: not valid JSON"),
        (MOONCAKE + "[]\n", "line 3: a JSON list where an object is due"),
        ('{"t": 0, "prompt": 5}\n', "line 1: output is missing"),
        ('{"t": 0, "prompt": 0, "output": 1}\n', "line 1: prompt must be an integer from 1"),
        ('{"t": -1, "prompt": 5, "output": 1}\n', "line 1: t must be a number, at least 0"),
        ('{"t": NaN, "prompt": 5, "output": 1}\n', "line 1: t must be a number, at least 0"),
        ('{"t": 0, "prompt": [], "output": 1}\n', "line 1: prompt must be a number of tokens or a list"),
        ('{"t": 0, "prompt": [-1], "output": 1}\n', "line 1: prompt must be a number of tokens or a list"),
        ('{"t": 0, "prompt": 5, "output": 1, "prio": 1}\n', "line 1: 'prio' is not a field"),
        ('{"t": 0, "prompt": 5, "output": 1, "priority": "high"}\n', "line 1: priority must be an integer"),
        ('{"t": 0, "prompt": 5, "output": 1, "priority": 1001}\n', "line 1: priority must be an integer from -1000 to 1000"),
        ('{"t": 0, "prompt": 5, "output": 1, "shared": "system"}\n', "line 1: shared must be a list of"),
        ('{"t": 0, "prompt": 5, "output": 1, "shared": [["system"]]}\n', "line 1: shared must be a list of"),
        ('{"t": 0, "prompt": 5, "output": 1, "shared": [["system", 6]]}\n', "line 1: the shared parts have 6 tokens"),
    ],
)
def test_a_bad_trace_is_one_sentence_with_its_line(read, text, error):
    with pytest.raises(GristmillError) as caught:
        read(text)
    assert error in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_or_binary_file(tmp_path):
    with pytest.raises(GristmillError, match=r"cannot read the trace .*: No such file"):
        read_trace(tmp_path / "gone")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(GristmillError, match="is not a text file"):
        read_trace(tmp_path / "binary")
