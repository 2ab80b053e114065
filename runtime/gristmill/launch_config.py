"""What a child process is told at its start: one JSON document on its standard input, so that nothing is pickled."""

from __future__ import annotations

import msgspec

from gristmill.options import Options


class LaunchConfig(msgspec.Struct, frozen=True):
    """Everything a process needs beyond its role.

    `model_path` is a resolved local directory or .gguf file; `model_hash` names it in the prefix cache's events.
    `eos_ids` is the union of the EOS ids of config, generation config and tokenizer.
    `endpoint_prefix` is `ipc://<private 0700 dir>` or `inproc://<unique>`.
    `made_up_tokens` is the size of the tokenizer to make up where the model has none (load_format dummy; 0: there must be one).
    `trace_dir` receives one part file per process when tracing ("" = off).
    """

    options: Options
    model_path: str
    eos_ids: tuple[int, ...]
    endpoint_prefix: str
    rank: int = 0
    world_size: int = 1
    trace_dir: str = ""
    parent_pid: int = 0
    made_up_tokens: int = 0

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(data: bytes) -> LaunchConfig:
        return msgspec.json.decode(data, type=LaunchConfig)
