"""`gristmill generate MODEL -p PROMPT`: complete prompts in this process and print the text as it comes."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gristmill.cli.arguments import SERVER_ONLY, add_options, options_from
from gristmill.cli.sampling import add_sampling, argument_text, option_errors, sampling_from, with_max_tokens
from gristmill.errors import OptionError
from gristmill.logs import setup_logging
from gristmill.options import Options

if TYPE_CHECKING:
    from gristmill.engine import Engine


DEFAULT_MAX_TOKENS = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-p", "--prompt", action="append", metavar="TEXT", help="prompt, - for standard input; may be given several times")
    parser.add_argument("--chat", action="store_true", help="give each prompt to the model as a user's message (chat template)")
    parser.add_argument("-n", type=int, default=1, metavar="INT", help="choices per prompt (default: 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per choice instead of the text")
    add_sampling(parser, DEFAULT_MAX_TOKENS)
    add_options(parser, SERVER_ONLY)


def run(arguments: argparse.Namespace) -> int:
    options = options_from(arguments, skip=SERVER_ONLY, log_level="warning")
    if not arguments.prompt:
        raise OptionError("a prompt is missing: -p TEXT, or -p - to read standard input")
    prompts: list[Any] = [_stdin_text() if prompt == "-" else argument_text("-p", prompt) for prompt in arguments.prompt]
    if arguments.chat:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    sampling = sampling_from(arguments)
    from gristmill.tokenizer.validate import MAX_CHOICES, check_int

    with option_errors():
        check_int("n", arguments.n, 1, MAX_CHOICES)
    with option_errors(), local_engine(options) as engine:
        ids = [engine.prompt_ids(prompt) for prompt in prompts]
        sampling = with_max_tokens(sampling, DEFAULT_MAX_TOKENS, max(map(len, ids)), engine.context_length)
        if len(ids) == 1 and arguments.n == 1 and not arguments.json:
            stream(engine, ids[0], sampling)
            return 0
        for output in engine.generate(ids, n=arguments.n, **sampling):
            if arguments.json:
                usage = {name: getattr(output.usage, name) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")}
                record = {"prompt": output.prompt_index, "index": output.index, "text": output.text, "ids": output.ids}
                print(json.dumps({**record, "finish_reason": output.finish_reason, "usage": usage}), flush=True)
            else:
                print(f"--- prompt {output.prompt_index + 1}, choice {output.index + 1}\n{printable(output.text)}", flush=True)
    return 0


def _stdin_text() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(f"standard input is not valid UTF-8 text: {error.reason} at byte {error.start}") from None


def stream(engine: Engine, prompt: Any, sampling: dict[str, Any]) -> str:
    """Print the completion of `prompt` as it is generated, the speed on stderr when that is a terminal; returns the text."""
    text, start, first, tokens = "", time.monotonic(), 0.0, 0
    for _, delta in engine.stream(prompt, **sampling):
        if len(delta.ids) and not first:
            first = time.monotonic()
        tokens += len(delta.ids)
        text += delta.text
        sys.stdout.write(printable(delta.text))
        sys.stdout.flush()
    end = time.monotonic()
    print(flush=True)
    if sys.stderr.isatty() and tokens > 1:
        speed = (tokens - 1) / max(end - first, 1e-9)
        print(f"[{tokens} tokens, first after {1000 * (first - start):.0f} ms, then {speed:.1f} tokens/s]", file=sys.stderr)
    return text


def printable(text: str) -> str:
    """A model's text for standard output: on a terminal, control characters would move the cursor or change colours."""
    if not sys.stdout.isatty():
        return text
    return "".join(char if char in "\n\t" or (char >= " " and not "\x7f" <= char <= "\x9f") else "\ufffd" for char in text)


@contextlib.contextmanager
def local_engine(options: Options) -> Iterator[Engine]:
    """An engine in this process; a bar shows the loading of weights on a terminal."""
    setup_logging(options.log_level, "gristmill")
    from gristmill import progress
    from gristmill.engine import Engine

    view = progress.View()
    progress.set_sink(view)
    try:
        with Engine.from_options(options) as engine:
            view.close()
            yield engine
    finally:
        view.close()
        progress.set_sink(None)
