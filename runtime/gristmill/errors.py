"""Errors that reach a person as one sentence instead of a traceback."""


class GristmillError(Exception):
    """Something the user can act on. Its text is one clear sentence, shown as it is; the CLI exits with `exit_code`."""

    exit_code = 1


class OptionError(GristmillError):
    """A command-line option, environment variable or API argument that cannot be used as given."""

    exit_code = 2


class ModelError(GristmillError):
    """A model directory, file or name that cannot be loaded: missing, truncated, unknown or inconsistent."""


class ProtocolError(GristmillError):
    """Two processes of the engine disagree about the step protocol (version, step order, message shape)."""
