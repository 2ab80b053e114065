"""Profiles: written, read, refused with their line; and made from the trace of an engine."""

import json

import numpy as np
import pytest

from gristmill.errors import GristmillError
from gristmill.messages import EMIT_SAMPLE, Stats, Step, ints
from gristmill.options import Options
from gristmill.simulation.calibrate import calibrate, host_cost, phases, read_run
from gristmill.simulation.profile import FORMAT, HostCost, Profile, StepCost, load_profile
from gristmill.worker.work import StepWork, work_of

PROFILE = Profile(FORMAT, "m", "paper", StepCost(0.01, 1e-4, 1e-4, 1e-8, 1e-9), 5000, 400, made={"how": "by hand"})


def test_a_written_profile_is_read_back(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(PROFILE.to_json())
    assert load_profile(path) == PROFILE


def test_what_may_be_left_out(tmp_path):
    record = json.loads(PROFILE.to_json())
    for name in ("host_s", "made", "page_size"):
        del record[name]
    (tmp_path / "profile.json").write_text(json.dumps(record))
    profile = load_profile(tmp_path / "profile.json")
    assert (profile.host_s, profile.page_size) == (HostCost(), 1)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ('"format": "gristmill-profile-1"', '"format": "2"', "line 2: `format` must be 'gristmill-profile-1', not '2'"),
        ('"constant": 0.01', '"constant": -1', "line 6: `constant` must be a number of seconds"),
        ('"constant": 0.01', '"constant": "x"', "line 6: Expected `float`, got `str` - at `$.step_s.constant`"),
        ('"constant": 0.01,', "", "line 5: Object missing required field `constant` - at `$.step_s`"),
        ('"pool_tokens": 5000', '"pool_tokens": 0', "line 12: `pool_tokens` must be at least 1, not 0"),
        ('"pool_tokens"', '"pool"', "line 12: Object contains unknown field `pool`"),
        ('"pool_tokens": 5000,', '"pool_tokens": 5000', "line 13: not valid JSON"),
    ],
)
def test_a_bad_profile_is_one_sentence_with_its_line(tmp_path, old, new, error):
    path = tmp_path / "profile.json"
    assert old in PROFILE.to_json()
    path.write_text(PROFILE.to_json().replace(old, new))
    with pytest.raises(GristmillError) as caught:
        load_profile(path)
    assert f"{path}, {error}" in str(caught.value)


def test_a_profile_that_costs_nothing_is_refused(tmp_path):
    record = {**json.loads(PROFILE.to_json()), "step_s": dict.fromkeys(StepCost.__struct_fields__, 0)}
    (tmp_path / "profile.json").write_text(json.dumps(record))
    with pytest.raises(GristmillError, match="a step must take time"):
        load_profile(tmp_path / "profile.json")


def test_the_work_of_a_step():
    """Two decode rows, and a chunk of 3 after 4: its queries see 5, 6 and 7 keys."""
    step = Step(1, ints([0, 1, 2]), ints([1, 1, 3]), ints([10, 20, 7]), ints([EMIT_SAMPLE] * 3))
    assert work_of(step) == StepWork(prefill_tokens=3, decode_rows=2, decode_kv_tokens=30, prefill_pairs=18)


def test_the_phases_fit_the_engine_and_vary_everything():
    stats = Stats(max_reqs=16, max_context=256, pool_total=1000)
    source = phases(stats, np.random.default_rng(0))
    rounds = [next(source) for _ in range(60)]
    assert all(request.prompt_tokens + request.output_tokens <= 256 for phase in rounds for request in phase)
    assert {len(phase) for phase in rounds} == {1, 2, 4, 8, 16}
    names = [request.parts for phase in rounds for request in phase]
    assert len(set(names)) == len(names)


def event(process: int, name: str, start_us: float, end_us: float, **args: object) -> dict[str, object]:
    return {"pid": process, "name": name, "ph": "X", "ts": start_us, "dur": end_us - start_us, "args": args}


def test_host_costs_are_read_off_a_trace():
    """Step 1 ends before step 2 is planned (an idle engine gets a request at 1000); step 3 is sent while step 2 runs."""
    work = {**dict.fromkeys(StepWork._fields, 1)}
    labels = enumerate(("server (pid 1)", "scheduler (pid 2)", "worker0 (pid 3)"), start=1)
    events = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name in labels]
    for number, plan, forward, recv, applied, text in (
        (1, (0, 20), (50, 500), (30, 560), 570, 600),
        (2, (1100, 1120), (1180, 1900), (1160, 1960), 1970, 2000),
        (3, (1130, 1150), (1905, 2800), (1980, 2860), 2870, 2900),
    ):
        events += [event(2, "plan", *plan, step=number), event(3, "forward", *forward, step=number, **work)]
        events += [event(2, "recv", *recv, step=number), event(2, "apply", recv[1], applied, step=number)]
        events += [event(1, "dispatch", text - 5, text, message="Text")]
    events.append({"pid": 1, "name": "submit", "ph": "i", "ts": 1000.0})
    run = read_run({"traceEvents": events})
    assert [step.step for step in run.steps] == [1, 2, 3]
    cost = host_cost(run, {2, 3})
    expected = {"submit": 100e-6, "plan": 20e-6, "apply": 10e-6, "edge": 60e-6, "gap": 5e-6, "deliver": 30e-6}
    for name, value in expected.items():
        assert getattr(cost, name) == pytest.approx(value), name


def test_calibrating_a_null_model_finds_its_sleep():
    options = Options(model="null:4", pool_tokens=2000, max_running=8, context_length=200, log_level="warning")
    profile = calibrate(options, 1.0)
    assert 0.003 < profile.step_s.constant < 0.1  # the machine may be busy
    assert (profile.pool_tokens, profile.max_context, profile.model) == (2000, 200, "null:4")
    assert profile.made["fit"]["steps"] > 20
