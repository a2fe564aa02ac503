"""The one exception that is meant for a user's eyes."""


class UserError(ValueError):
    """Bad input: the message says what was found, what was expected and what to change.

    Command lines print the message alone and exit with code 2; every other exception keeps its traceback.
    """


class SharedError(UserError):
    """A `UserError` that every rank of a run raises; rank 0 prints it for all."""
