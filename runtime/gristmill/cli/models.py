"""`gristmill models`: the catalogue, and which of it is installed here."""

from __future__ import annotations

import argparse

from gristmill.catalogue import CATALOGUE, installed_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    return


def run(arguments: argparse.Namespace) -> int:
    for entry in CATALOGUE.values():
        path = installed_path(entry)
        print(f"{entry.name:16} {entry.title}\n{'':16} {path or 'not installed: ' + entry.install}")
    return 0
