"""`gristmill chat MODEL`: a conversation in the terminal, with an engine in this process or with a server (--url)."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from gristmill.cli.arguments import SERVER_ONLY, add_options, options_from
from gristmill.cli.generate import local_engine, printable
from gristmill.cli.sampling import add_sampling, argument_text, sampling_from, with_max_tokens
from gristmill.errors import GristmillError, OptionError

Message = dict[str, str]
Answer = Callable[[list[Message]], Iterator[str]]  # pieces of the model's answer to a conversation

DEFAULT_MAX_TOKENS = 512
_HELP = "/reset starts over, /exit (or Ctrl-D) ends, Ctrl-C stops an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", help="talk to a server at this address instead, such as http://127.0.0.1:8000")
    parser.add_argument("--system", metavar="TEXT", help="system message at the start of the conversation")
    add_sampling(parser, DEFAULT_MAX_TOKENS)
    add_options(parser, SERVER_ONLY)


def run(arguments: argparse.Namespace) -> int:
    sampling = sampling_from(arguments)
    system = argument_text("--system", arguments.system) if arguments.system else None
    if arguments.url:
        url = arguments.url.rstrip("/").removesuffix("/v1")
        model = getattr(arguments, "model", None) or _served_model(url)
        return converse(lambda messages: _ask_server(url, model, messages, sampling), system, f"{model} at {url}")
    options = options_from(arguments, skip=SERVER_ONLY, log_level="warning")
    with local_engine(options) as engine:
        if engine.tokenizer.chat_template is None:
            raise GristmillError(f"{options.model} has no chat template; use `gristmill generate`")

        def answer(messages: list[Message]) -> Iterator[str]:
            ids = engine.prompt_ids(messages)
            fitting = with_max_tokens(sampling, DEFAULT_MAX_TOKENS, len(ids), engine.context_length)
            with contextlib.closing(engine.stream(ids, **fitting)) as pieces:
                for _, delta in pieces:
                    yield delta.text

        return converse(answer, system, engine.options.served_model_name)


def converse(answer: Answer, system: str | None, name: str) -> int:
    """Read lines and print answers until the end of input or /exit; 1 when an answer failed and nobody was there to see it."""
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    interactive, failed = sys.stdin.isatty(), False
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (line editing and history for input())
        print(f"{name}. {_HELP}.")
    while True:
        try:
            line = argument_text("this line", input("\nyou: " if interactive else "")).strip()
        except OptionError as error:
            print(f"error: {error}", file=sys.stderr)
            failed = True
            continue
        except (EOFError, KeyboardInterrupt):
            if interactive:
                print()
            break
        if line in ("/exit", "/quit"):
            break
        if line == "/reset":
            messages = list(start)
        elif line.startswith("/"):
            print(_HELP)
        elif line:
            asked = [*messages, {"role": "user", "content": line}]
            text = _show(answer(asked))
            failed = failed or text is None
            # a failed or empty turn must not stay in the conversation
            messages = [*asked, {"role": "assistant", "content": text}] if text else messages
    return 1 if failed and not interactive else 0


def _show(pieces: Iterator[str]) -> str | None:
    """Print an answer as it comes and return it; None when it failed."""
    text = ""
    try:
        for piece in pieces:
            text += piece
            print(printable(piece), end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except OptionError:
        raise
    except GristmillError as error:
        print(f"{chr(10) if text else ''}error: {error}", file=sys.stderr)
        return None
    finally:
        close = getattr(pieces, "close", None)
        if close is not None:
            close()  # ends the request
    print(flush=True)
    return text


def _ask_server(url: str, model: str, messages: list[Message], sampling: dict[str, Any]) -> Iterator[str]:
    body = json.dumps({"model": model, "messages": messages, "stream": True, **sampling}).encode()
    with _open(f"{url}/v1/chat/completions", body) as response:
        for raw in response:
            line = raw.decode("utf-8", "replace").strip()
            if not line.startswith("data:") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data:"))
            if "error" in event:
                raise GristmillError(event["error"].get("message", "the server failed"))
            for choice in event.get("choices", []):
                yield choice["delta"].get("content") or ""


def _served_model(url: str) -> str:
    with _open(f"{url}/v1/models") as response:
        models = json.load(response).get("data", [])
    if not models:
        raise GristmillError(f"the server at {url} serves no model")
    return str(models[0]["id"])


def _open(url: str, body: bytes | None = None) -> Any:
    if not url.startswith(("http://", "https://")):
        raise OptionError(f"--url must begin with http:// or https://, not {url!r}")
    try:
        return urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"}), timeout=600)
    except urllib.error.HTTPError as error:
        try:
            message = json.load(error)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = error.reason
        raise GristmillError(f"the server answered {error.code}: {message}") from error
    except (OSError, ValueError) as error:
        raise GristmillError(f"cannot reach {url}: {getattr(error, 'reason', error)}") from error
