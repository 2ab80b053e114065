"""The in-tree PEP 517/660 backend: scikit-build-core on a staged copy with the chosen platform's project file.

Editable installs build in the source tree instead, since an installed path into a temporary copy would dangle.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gristmill_build import editable, staging

Settings = dict[str, Any] | None
TORCH = "torch>=2.10"  # headers and libtorch_cpu to link with; the op libraries then work with any torch from 2.10 on


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    from scikit_build_core import build

    with staging.staged(config_settings) as settings:
        return list(build.get_requires_for_build_sdist(settings))


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    from scikit_build_core import build

    with staging.staged(config_settings) as settings:
        return [*build.get_requires_for_build_wheel(settings), TORCH]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return get_requires_for_build_wheel(config_settings)


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    from scikit_build_core import build

    metadata_directory = os.path.abspath(metadata_directory)
    with staging.staged(config_settings) as settings:
        return str(build.prepare_metadata_for_build_wheel(metadata_directory, settings))


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Settings = None) -> str:
    return prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    from scikit_build_core import build

    sdist_directory = os.path.abspath(sdist_directory)
    with staging.staged(config_settings) as settings:
        return str(build.build_sdist(sdist_directory, settings))


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    from scikit_build_core import build

    wheel_directory = os.path.abspath(wheel_directory)
    with staging.staged(config_settings) as settings:
        return str(build.build_wheel(wheel_directory, settings))


def build_editable(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """Native parts are built into the source tree; the wheel holds the metadata and a path to python/."""
    wheel_directory = os.path.abspath(wheel_directory)
    platform = staging.choose_platform(config_settings or {})
    editable.build_in_place(platform)
    prepare = prepare_metadata_for_build_wheel
    return editable.editable_wheel(Path(wheel_directory), lambda directory: prepare(str(directory), {"platform": platform}))
