"""What to tell a user who lacks a package of the extra `prepare`."""

from rtcwm.errors import UserError


def missing(package: str, error: ImportError) -> UserError:
    """The UserError to raise where an import of `package` failed."""
    return UserError(f"`rtcwm prepare` needs {package} ({error}): pip install 'rtcwm[prepare]'")
