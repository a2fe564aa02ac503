"""The one exception that is meant for a user's eyes, and the checks of flags that raise it."""

INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM, as shells give it."""


class UserError(ValueError):
    """Bad input: the message says what was found, what was expected and what to change.

    Command lines print the message alone and exit with code 2; every other exception keeps its traceback.
    """


class StorageFault(UserError):
    """The output could not be written; going on with the next part of it would not help."""


class SharedError(UserError):
    """A `UserError` that every rank of a run raises; rank 0 prints it for all."""


def require(condition: bool, message: str) -> None:
    """Raises `UserError` with the message unless the condition holds."""
    if not condition:
        raise UserError(message)


def at_least(settings: object, least: float, *names: str) -> None:
    """Raises `UserError` where one of these settings is below the least; those that are None pass."""
    for name in names:
        value = getattr(settings, name)
        require(value is None or value >= least, f"--{name.replace('_', '-')} {value}: expected at least {least}")
