"""What the routes share: the manager, the options, the metrics, and the facts of one request that its log line reports."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from starlette.requests import Request

from gristmill.options import Options
from gristmill.server.metrics import Metrics
from gristmill.tokenizer.manager import TokenizerManager
from gristmill.tokenizer.validate import RequestError

MAX_BODIES = 8  # bodies of --max-body-bytes, or any number of smaller ones of that size together, that may be held at a time
_MIN_BODIES_BYTES = 64 << 20


@dataclass
class ServerState:
    manager: TokenizerManager
    options: Options
    metrics: Metrics
    started: int = field(default_factory=lambda: int(time.time()))
    body_bytes: int = 0  # of all requests that were not submitted yet

    @property
    def model_name(self) -> str:
        return self.options.served_model_name or self.options.model.rstrip("/").rsplit("/", 1)[-1]

    def hold_body(self, facts: RequestFacts, size: int) -> None:
        """Count `size` more bytes of a request's body, until `release_body`. Raises RequestError when all bodies together are too much."""
        most = max(_MIN_BODIES_BYTES, MAX_BODIES * self.options.max_body_bytes)
        if self.body_bytes + size > most:
            text = f"the bodies of the requests that arrive now are more than {most} bytes; try again in 1 s"
            raise RequestError(text, status=503, code="too_busy", retry_after_s=1)
        self.body_bytes += size
        facts.body_bytes += size

    def release_body(self, facts: RequestFacts) -> None:
        self.body_bytes -= facts.body_bytes
        facts.body_bytes = 0


@dataclass
class RequestFacts:
    """Filled in by the routes, read by the request log and the histograms. Times are time.monotonic() seconds."""

    request_id: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish: str = ""
    body_bytes: int = 0  # held, see ServerState
    started: float = field(default_factory=time.monotonic)
    first_token: float = 0.0
    last_token: float = 0.0


def server_state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def request_facts(request: Request) -> RequestFacts:
    facts: RequestFacts = request.scope["state"]["facts"]
    return facts
