"""Writes docs/cli.md from the options and the parsers themselves: `python -m gristmill.cli.reference > docs/cli.md`."""

from __future__ import annotations

import argparse
import importlib

from gristmill.catalogue import CATALOGUE
from gristmill.cli.arguments import GROUPS, SERVER_ONLY, Parser
from gristmill.cli.main import COMMANDS
from gristmill.options import FIELDS, env_name, flag

_HEAD = """\
# Commands and options

<!-- Written by `python -m gristmill.cli.reference > docs/cli.md`; a test checks that it is current. -->

```
gristmill serve MODEL              # HTTP server on port 8000
gristmill generate MODEL -p "..."  # complete prompts in this process
gristmill chat MODEL               # talk in the terminal (--url: to a running server)
gristmill models                   # the catalogue
gristmill simulate --trace FILE --profile PROFILE  # predict throughput and latency
gristmill doctor                   # what works on this machine and why not
```

`python -m gristmill` is the same command. Both `--port 8000` and `--port=8000` work, options are never abbreviated, and a wrong one
ends with one line and exit code 2.

## MODEL

The first of these that fits:

1. an existing directory (Hugging Face layout: `config.json`, `tokenizer.json`, `*.safetensors`) or `.gguf` file;
2. a name of the catalogue: {catalogue};
3. a hub id, `owner/name` or `owner/name/file.gguf`, downloaded into the cache of `huggingface_hub`. `HF_ENDPOINT`, `HF_HUB_CACHE`,
   `HF_HUB_OFFLINE` and `HF_TOKEN` mean what they mean there; a complete earlier download is used when the hub cannot be reached.

## Options

Each option has an environment variable; the command line wins over the environment, and that over the default. An empty variable counts
as unset, a value of a wrong type ends the command, and a variable that begins with `GRISTMILL_` and is neither an option nor one of the
kernels' (`GRISTMILL_KERNELS_ISA`, `_IMPL`, `_STRICT`) warns.
`gristmill.Engine(model, **options)` takes the same names with `_` (it does not read the environment).

| option | default | variable | meaning |
| --- | --- | --- | --- |
"""

_TAIL = """\

Options marked ° belong to `serve` alone.

## Signals and exit codes of `serve`

- The port is opened first: a taken port ends the start before anything is loaded. `--port 0` takes a free one. When the model can make
  its first token, one line is printed: `ready: NAME at URL (pool of N tokens, loaded in S s)`.
- SIGTERM or Ctrl-C: no new requests, open ones finish for up to `--drain-s` seconds, exit code 0 (130 after Ctrl-C). A second signal
  ends at once.
- A child process that ends takes the server with it: open requests get an error, one sentence says which child and why, exit code 1.
- A child that hangs is noticed after `--watchdog-s` seconds: the stacks of all processes are logged, then the same end.
- However the server's own process ends, kill -9 included, no child and no socket is left (killing all its processes at once leaves a
  directory of sockets in the temporary directory, which the next start removes). More in [operations.md](operations.md).

Exit codes: 0 well, 1 something failed (the sentence says what), 2 a wrong option, 128 + n ended by signal n.

The log goes to stderr, one line per event, with control characters escaped; the `ready` line and generated text go to stdout.
"""

# commands with options of their own, and which of the options above they take beside them
_COMMANDS = {
    "generate": " Beside the options above:",
    "chat": " Beside the options above:",
    "simulate": " Takes the scheduling and memory options above; `--calibrate` those of the computation too ([simulate.md](simulate.md)):",
    "doctor": "",
}


def render() -> str:
    """The text of docs/cli.md."""
    catalogue = ", ".join(f"`{entry.name}` ({entry.title}; `{entry.install}`)" for entry in CATALOGUE.values())
    parts = [_HEAD.replace("{catalogue}", catalogue)]
    for group in GROUPS:
        for name, spec in FIELDS.items():
            if name != "model" and spec.metadata["group"] == group:
                parts.append(_row(name))
    parts.append(_TAIL)
    for command, beside in _COMMANDS.items():
        parts.append(f"\n## gristmill {command}\n\n{COMMANDS[command][0].upper()}{COMMANDS[command][1:]}.{beside}\n\n")
        parts.append("| option | meaning |\n| --- | --- |\n")
        parts.extend(_own_rows(command))
    return "".join(parts)


def _row(name: str) -> str:
    spec = FIELDS[name]
    kind = type(spec.default)
    shown = f"`{flag(name)}`, `--no-{flag(name)[2:]}`" if kind is bool else f"`{flag(name)}`"
    default = ("on" if spec.default else "off") if kind is bool else f"`{spec.default}`" if spec.default != "" else ""
    meta = spec.metadata
    text = meta["help"] + (f" ({', '.join(map(str, meta['choices']))})" if meta["choices"] else "")
    mark = " °" if name in SERVER_ONLY else ""
    return f"| {shown}{mark} | {default} | `{env_name(name)}` | {_cell(text)} |\n"


def _own_rows(command: str) -> list[str]:
    """The flags of a command that are not options of the engine."""
    parser = Parser(prog=command)
    importlib.import_module(f"gristmill.cli.{command}").add_arguments(parser)
    own = [action for action in parser._actions if action.dest not in FIELDS and not isinstance(action, argparse._HelpAction)]
    return [f"| `{', '.join(action.option_strings)}{_metavar(action)}` | {_cell(action.help or '')} |\n" for action in own]


def _metavar(action: argparse.Action) -> str:
    return f" {action.metavar}" if action.metavar and action.nargs != 0 else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("%%", "%")


if __name__ == "__main__":
    print(render(), end="")
