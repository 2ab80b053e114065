"""What the routes share: the manager, the options, the metrics, and the facts of one request that its log line reports."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from starlette.requests import Request

from gristmill.options import Options
from gristmill.server.metrics import Metrics
from gristmill.tokenizer.manager import TokenizerManager


@dataclass
class ServerState:
    manager: TokenizerManager
    options: Options
    metrics: Metrics
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        return self.options.served_model_name or self.options.model.rstrip("/").rsplit("/", 1)[-1]


@dataclass
class RequestFacts:
    """Filled in by the routes, read by the request log and the histograms. Times are time.monotonic() seconds."""

    request_id: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish: str = ""
    started: float = field(default_factory=time.monotonic)
    first_token: float = 0.0
    last_token: float = 0.0


def server_state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def request_facts(request: Request) -> RequestFacts:
    facts: RequestFacts = request.scope["state"]["facts"]
    return facts
