"""Models of a Hugging Face style hub: picks the files the engine reads, downloads them into the hub's cache, explains each failure.

The client library honours HF_ENDPOINT, HF_HUB_OFFLINE, HF_HUB_CACHE and HF_TOKEN; nothing of that is done again here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from gristmill.errors import ModelError

# beside the weights: config, generation config, tokenizer and its config, weight index, chat template
_TEXT_FILES = ("*.json", "*.jinja")
_WEIGHTS = "*.safetensors"


def download(repo: str, file: str | None, revision: str = "") -> str:
    """Local path of the snapshot of `repo`, or of its `file`; only what the engine reads is downloaded.

    When the hub cannot be reached, a complete earlier download in the cache is used.

    Raises:
        ModelError: one sentence: offline and not cached, not found, gated, no such revision or file, no usable weights.
    """
    import huggingface_hub as hub
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    where = revision or None
    try:
        names = [sibling.rfilename for sibling in hub.HfApi().model_info(repo, revision=where).siblings or []]
    except Exception as error:
        if _is_answer(error):
            raise ModelError(_sentence(error, repo, revision)) from error
        return _from_cache(repo, file, where, error)
    wanted = pick_files(repo, names, file)
    try:
        folder = Path(hub.snapshot_download(repo, revision=where, allow_patterns=[_literal(name) for name in wanted]))
    except Exception as error:
        raise ModelError(_sentence(error, repo, revision)) from error
    _check_complete(repo, folder, wanted)
    return str(folder / wanted[0] if wanted[0].endswith(".gguf") else folder)


def pick_files(repo: str, names: Sequence[str], file: str | None = None) -> list[str]:
    """Which of a repository's files to download: the named .gguf, or the safetensors checkpoint, or the only .gguf."""
    ggufs = [name for name in names if name.endswith(".gguf")]
    if file is not None:
        if file not in names:
            raise ModelError(f"model {repo} has no file {file}; its .gguf files are: {', '.join(ggufs) or 'none'}")
        return [file]
    top = [name for name in names if "/" not in name]
    weights = [name for name in top if fnmatch(name, _WEIGHTS)]
    # some repositories keep a second copy under another name (consolidated.safetensors)
    weights = [name for name in weights if name.startswith("model")] or weights
    if weights:
        return weights + [name for name in top if any(fnmatch(name, pattern) for pattern in _TEXT_FILES)]
    if len(ggufs) == 1:
        return ggufs
    if ggufs:
        raise ModelError(f"model {repo} has several .gguf files; name one, as in {repo}/{ggufs[0]}")
    raise ModelError(f"model {repo} has neither .safetensors nor .gguf weights; other formats are not loaded")


def _from_cache(repo: str, file: str | None, revision: str | None, cause: Exception) -> str:
    """The cached snapshot, after the hub could not be asked because of `cause`."""
    import huggingface_hub as hub

    # the client refuses a snapshot that lacks a file of the pattern, and `*` matches folders too: ask for little, check below
    patterns = [_literal(file) if file else "config.json"]
    try:
        folder = Path(hub.snapshot_download(repo, revision=revision, allow_patterns=patterns, local_files_only=True))
    except Exception:
        raise ModelError(_sentence(cause, repo, revision or "")) from cause
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    try:
        wanted = pick_files(repo, names, file)
        _check_complete(repo, folder, wanted)
    except ModelError:
        raise ModelError(f"{_sentence(cause, repo, revision or '')} (the cached copy is incomplete)") from cause
    return str(folder / wanted[0] if wanted[0].endswith(".gguf") else folder)


def _check_complete(repo: str, folder: Path, wanted: Sequence[str]) -> None:
    """All `wanted` files and all shards that a weight index names are there."""
    needed = set(wanted)
    for name in wanted:
        if name.endswith(".safetensors.index.json"):
            try:
                needed.update(json.loads((folder / name).read_text())["weight_map"].values())
            except (OSError, ValueError, KeyError, AttributeError, TypeError):
                continue  # the loader says what is wrong with an index it cannot read
    missing = sorted(name for name in needed if not (folder / name).is_file())
    if missing:
        raise ModelError(f"model {repo} lacks {', '.join(missing[:3])}{' and more' if len(missing) > 3 else ''} on the hub")


def _is_answer(error: Exception) -> bool:
    """Whether the hub itself said no, rather than not being reached (5xx counts as not reached: the cache may still serve)."""
    response = getattr(error, "response", None)
    return isinstance(error, ValueError) or (response is not None and response.status_code < 500)


def _sentence(error: Exception, repo: str, revision: str) -> str:
    from huggingface_hub import constants, errors

    status: Any = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return f"model {repo} is gated: accept its terms at {constants.ENDPOINT}/{repo}, then set HF_TOKEN to a token that may read it"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"model {repo} has no revision {revision!r} on {constants.ENDPOINT}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"model {repo} is neither a local path nor found on {constants.ENDPOINT} (or it is private and HF_TOKEN is missing or wrong)"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"model {repo} is not in the local cache, and HF_HUB_OFFLINE forbids downloading it"
    if isinstance(error, errors.HfHubHTTPError) and status is not None:
        return f"the hub at {constants.ENDPOINT} answered {status} for model {repo}"
    if isinstance(error, errors.HFValidationError):
        return f"{repo!r} is not a valid hub id: {_first_line(error)}"
    if isinstance(error, OSError) and error.errno is not None:  # disk full, no permission
        return f"cannot store model {repo}: {error.strerror}" + (f" ({error.filename})" if error.filename else "")
    return f"model {repo} is not in the local cache, and the hub at {constants.ENDPOINT} cannot be reached: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _literal(name: str) -> str:
    """`name` as a pattern that matches nothing else."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)
