"""`gristmill serve MODEL`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse

from gristmill import early_signals
from gristmill.cli.arguments import add_options, options_from
from gristmill.logs import setup_logging


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    options = options_from(arguments)
    early_signals.exit_at_once()
    setup_logging(options.log_level, "server")
    from gristmill.listening import bind_sockets

    sockets = bind_sockets(options.host, options.port)
    try:
        from gristmill.serving import serve  # a wrong option or a taken port must not cost the import of the server

        return serve(options, sockets)
    finally:
        for sock in sockets:
            sock.close()
