"""The one exception that is meant for a user's eyes."""

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
