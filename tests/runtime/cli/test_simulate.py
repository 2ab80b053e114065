"""`gristmill simulate`: what it prints and what it refuses."""

import json

import pytest

from gristmill.cli.main import main
from gristmill.simulation.profile import FORMAT, Profile, StepCost, load_profile


@pytest.fixture
def files(tmp_path):
    trace, profile = tmp_path / "trace.jsonl", tmp_path / "profile.json"
    trace.write_text("".join(json.dumps({"t": i, "prompt": 20, "output": 5}) + "\n" for i in range(6)))
    made = {"largest": {"decode_rows": 1, "prefill_tokens": 4}}
    profile.write_text(Profile(FORMAT, "paper-1b", "a napkin", StepCost(0.5, 0, 0, 0, 0), 1000, 100, made=made).to_json())
    return ["simulate", "--trace", str(trace), "--profile", str(profile)]


def test_a_prediction_for_people(files, capsys):
    assert main(files) == 0
    out = capsys.readouterr().out
    assert out.startswith("paper-1b on a napkin: 6 of 6 requests finished\n")
    assert "output tokens/s" in out and "first token" in out
    assert "note: steps had up to 20 prefill tokens; the profile was measured up to 4" in out


def test_a_prediction_for_programs(files, capsys):
    assert main([*files, "--json", "--limit", "3", "--rate", "100", "--policy", "lpm", "--page-size", "4"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["finished"], summary["output_tokens"]) == (3, 15)
    assert summary["pool"][0].keys() == {"t", "running", "waiting", "free", "evictable", "locked"}
    assert summary["ttft_s"].keys() == {"mean", "p50", "p90", "p99"}


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (["--rate", "1", "--speed", "1"], "--rate and --speed both say"),
        (["--rate", "fast"], "must be a number greater than 0, not fast"),
        (["--limit", "0"], "must be a whole number, at least 1, not 0"),
        (["--threads", "2"], "--threads goes with --calibrate"),
        (["--page-size", "0"], "--page-size must be a whole number"),
        (["--calibrate", "null:0"], "--calibrate makes its own requests"),
        (["--port", "80"], "unknown option --port"),
    ],
)
def test_wrong_options(files, capsys, more, error):
    assert main([*files, *more]) == 2
    assert error in capsys.readouterr().err


def test_missing_options(files, capsys):
    assert main(files[:3]) == 2
    assert "--profile is missing" in capsys.readouterr().err
    assert main(["simulate", *files[3:]]) == 2
    assert "needs --trace FILE" in capsys.readouterr().err


def test_calibrate_writes_a_profile_that_simulate_reads(files, tmp_path, capsys):
    target = tmp_path / "measured.json"
    words = ["--calibrate", "null:2", "--calibrate-seconds", "0.5", "--context-length", "200", "--max-running", "4"]
    assert main(["simulate", *words, "--profile", str(target)]) == 0
    assert "written to" in capsys.readouterr().out
    assert load_profile(target).max_context == 200
    assert main([*files[:3], "--profile", str(target)]) == 0


def test_calibrate_looks_first_where_it_will_write(tmp_path, capsys):
    assert main(["simulate", "--calibrate", "null:0", "--profile", str(tmp_path / "no" / "where.json")]) == 2
    assert "is not a file that can be written" in capsys.readouterr().err
