"""A profile: how long a step takes on one kind of hardware with one model, and what the host adds. The format is in docs/simulate.md."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec

from gristmill.errors import GristmillError
from gristmill.worker.work import StepWork

FORMAT = "gristmill-profile-1"


class StepCost(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Seconds: a step takes the sum of its terms. All are at least 0."""

    constant: float
    prefill_token: float
    decode_row: float
    decode_kv_token: float
    prefill_pair: float

    def seconds(self, work: StepWork) -> float:
        return (
            self.constant
            + self.prefill_token * work.prefill_tokens
            + self.decode_row * work.decode_rows
            + self.decode_kv_token * work.decode_kv_tokens
            + self.prefill_pair * work.prefill_pairs
        )


class HostCost(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Seconds that the processes around the worker add."""

    submit: float = 0.0  # from a request's arrival until the scheduler has it
    plan: float = 0.0  # planning a step
    apply: float = 0.0  # taking in a result
    edge: float = 0.0  # a message between scheduler and worker, one way
    gap: float = 0.0  # between two steps of a worker that has the second one already
    deliver: float = 0.0  # from the scheduler until the client has the text


class Profile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`made` is for people: how and when the numbers came about, and how well they fit."""

    format: str
    model: str
    hardware: str
    step_s: StepCost
    pool_tokens: int
    max_context: int
    page_size: int = 1
    host_s: HostCost = HostCost()
    made: dict[str, Any] = {}

    def to_json(self) -> str:
        return json.dumps(msgspec.to_builtins(self), indent=1) + "\n"


def load_profile(path: str | Path) -> Profile:
    """The profile in a JSON file. Raises GristmillError, one sentence with file and line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise GristmillError(f"cannot read the profile {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise GristmillError(f"{path} is not a text file") from None
    try:
        json.loads(text)
        profile = msgspec.json.decode(text, type=Profile)
        _check(profile)
    except json.JSONDecodeError as error:
        raise GristmillError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise GristmillError(f"{path}, line {_line_of(text, str(error))}: {error}") from None
    return profile


def _check(profile: Profile) -> None:
    if profile.format != FORMAT:
        raise ValueError(f"`format` must be {FORMAT!r}, not {profile.format!r}")
    for name in ("pool_tokens", "max_context", "page_size"):
        if getattr(profile, name) < 1:
            raise ValueError(f"`{name}` must be at least 1, not {getattr(profile, name)}")
    for part in (profile.step_s, profile.host_s):
        for name in part.__struct_fields__:
            if not 0 <= (value := getattr(part, name)) < math.inf:
                raise ValueError(f"`{name}` must be a number of seconds, at least 0, not {value}")
    if profile.step_s == StepCost(0, 0, 0, 0, 0):
        raise ValueError("`step_s` has only zeros: a step must take time")


def _line_of(text: str, error: str) -> int:
    """The line of the field that a message names last (`$.step_s.constant`, `pool_tokens`); 1 when the file has no such line."""
    named = [word.rsplit(".", 1)[-1] for word in error.split("`")[1::2]]
    for name in reversed(named):
        at = text.find(f'"{name}"')
        if at >= 0:
            return text.count("\n", 0, at) + 1
    return 1
