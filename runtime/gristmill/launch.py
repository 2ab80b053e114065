"""What happens before anything starts: the model is found, its config and tokenizer are read, the options are checked against them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gristmill.catalogue import resolve_model
from gristmill.errors import OptionError
from gristmill.launch_config import LaunchConfig
from gristmill.loading.config import ModelConfig, load_config
from gristmill.options import Options
from gristmill.tokenizer.tokenizer import Tokenizer, load_tokenizer
from gristmill.trace import merge_traces
from gristmill.worker import null

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A model that was found and whose config and tokenizer can be read; `options.served_model_name` is filled in."""

    options: Options
    path: str
    model_config: ModelConfig
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]

    def launch_config(self, endpoint_prefix: str, trace_dir: str = "") -> LaunchConfig:
        return LaunchConfig(
            options=self.options,
            model_path=self.path,
            eos_ids=self.eos_ids,
            endpoint_prefix=endpoint_prefix,
            trace_dir=trace_dir,
            parent_pid=os.getpid(),
            made_up_tokens=_made_up_tokens(self.options, self.model_config),
        )


def _made_up_tokens(options: Options, config: ModelConfig) -> int:
    """A model without weights may lack a tokenizer as well."""
    return config.vocab_size if options.load_format == "dummy" else 0


def prepare(options: Options) -> Prepared:
    """Find the model, read its config and tokenizer, and check `options` against them; nothing is started and no weights are read.

    Raises:
        GristmillError: one sentence about what cannot be used.
    """
    resolved = resolve_model(options.model, options.revision)
    model_config = null.null_config(resolved.path) if null.is_null(resolved.path) else load_config(resolved.path)
    tokenizer = load_tokenizer(resolved.path, made_up=_made_up_tokens(options, model_config))
    if options.context_length > model_config.context_length:
        raise OptionError(
            f"--context-length {options.context_length} is more than {resolved.name} was trained for: {model_config.context_length} tokens"
        )
    if tokenizer.vocab_size > model_config.vocab_size:
        log.warning(
            "the tokenizer has %d tokens, the model only %d: the rest cannot be used", tokenizer.vocab_size, model_config.vocab_size
        )
    name = options.served_model_name or resolved.name.rsplit("/", 1)[-1]
    eos_ids = tuple(sorted({*model_config.eos_ids, *tokenizer.eos_ids}))
    return Prepared(dataclasses.replace(options, served_model_name=name), resolved.path, model_config, tokenizer, eos_ids)


@contextlib.contextmanager
def merged_trace(options: Options, folder: Path) -> Iterator[str]:
    """The directory for trace parts below `folder` ("" when not tracing); at the end they become the file of --trace."""
    if not options.trace:
        yield ""
        return
    target = Path(options.trace).expanduser().absolute()
    if not target.parent.is_dir() or not os.access(target.parent, os.W_OK) or target.is_dir():
        raise OptionError(f"--trace {options.trace!r} is not a file that can be written")
    parts = folder / "trace"
    parts.mkdir()
    try:
        yield str(parts)
    finally:
        log.info("trace of %d events written to %s", merge_traces(parts, target), target)
