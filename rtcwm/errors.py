"""The one exception that is meant for a user's eyes."""


class UserError(ValueError):
    """Bad input: the message says what was found, what was expected and what to change.

    Command lines print the message alone and exit with code 2; every other exception keeps its traceback.
    """
