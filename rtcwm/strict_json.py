"""JSON files that users write, read so that a wrong value is named instead of doing something else."""

import json
import math
import reprlib
from pathlib import Path

from rtcwm.errors import UserError


def read_object(path: Path, expected: str, blank: bool = False) -> dict:
    """The object that a JSON file holds.

    Args:
        path: the file; expected: what it should hold, for the message.
        blank: whether a file without a word, or `null`, counts as an empty object.

    Raises:
        UserError: it cannot be read, holds something else, or a key twice, of which the last would win silently.
    """

    def once(pairs: list[tuple[str, object]]) -> dict:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(key for place, (key, _) in enumerate(pairs) if key in dict(pairs[:place]))
            raise UserError(f"{path}: the key {twice!r} stands twice in one object: keep one")
        return found

    try:
        text = path.read_text()
        found = {} if blank and text.strip() in ("", "null") else json.loads(text, object_pairs_hook=once)
    except UserError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}), expected {expected}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds {reprlib.repr(found)}, expected {expected}")
    return found


def section(path: Path, config: dict, name: str) -> dict:
    """A section of a config, made empty where it is absent; raises `UserError` unless it is an object."""
    found = config.setdefault(name, {})
    if not isinstance(found, dict):
        raise UserError(f"{path}: {name} is {found!r}, expected an object")
    return found


def take_flag(path: Path, config: dict, key: str, default: bool) -> bool:
    """Takes a key out of a config; raises `UserError` unless it is true or false."""
    value = config.pop(key, default)
    if not isinstance(value, bool):
        raise UserError(f"{path}: {key} is {value!r}, expected true or false")
    return value


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
