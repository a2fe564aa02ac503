"""The ``rtcwm`` command: small tools around the programs that a launcher starts."""

import sys

from jsonargparse import auto_cli

from rtcwm import __version__
from rtcwm.adapters.export import main_export, main_fuse
from rtcwm.adapters.inspect import main_diff, main_show
from rtcwm.bench.command import BENCH
from rtcwm.curate.check import main_check
from rtcwm.curate.imports import main_import
from rtcwm.data.make import main_world
from rtcwm.errors import UserError
from rtcwm.evaluate.command import main_evaluate
from rtcwm.prepare.command import main_prepare
from rtcwm.recipe.command import main_recipe
from rtcwm.train.world_base import main_world_base

COMMANDS = {
    "world": main_world,
    "prepare": main_prepare,
    "clips": {"check": main_check, "import": main_import},
    "evaluate": main_evaluate,
    "bench": BENCH,
    "recipe": main_recipe,
    "world-base": main_world_base,
    "export": main_export,
    "adapter": {"show": main_show, "diff": main_diff, "fuse": main_fuse},
}
LEADING = {
    ("export",): ("file",), ("adapter", "show"): ("file",), ("adapter", "fuse"): ("file",),
    ("adapter", "diff"): ("first", "second"), ("clips", "check"): ("folder",), ("clips", "import"): ("source",),
}  # fmt: skip
"""Arguments that may stand right after a command, without their flags."""
SWITCHES = ("--flag",)
"""Flags that need no value to be on."""


def name_leading(words: list[str]) -> list[str]:
    """Puts the flags of `LEADING` before words that stand right after a command, and `true` after bare `SWITCHES`."""
    for place in reversed(range(len(words))):
        if words[place] in SWITCHES and (place + 1 == len(words) or words[place + 1].startswith("-")):
            words = [*words[: place + 1], "true", *words[place + 1 :]]
    for command, names in LEADING.items():
        if tuple(words[: len(command)]) == command:
            rest, named = words[len(command) :], []
            for name in names:
                if rest and not rest[0].startswith("-"):
                    named += [f"--{name}", rest.pop(0)]
            return [*command, *named, *rest]
    return words


def main() -> None:
    """Runs one subcommand; a user's error is one line and exit code 2. A command may return an exit code of its own."""
    # Flags may be written with dashes, as the programs' are.
    arguments = [
        word
        if not word.startswith("--")
        else "--" + word[2:].partition("=")[0].replace("-", "_") + word[len(word.partition("=")[0]) :]
        for word in sys.argv[1:]
    ]
    try:
        description = f"rtcwm {__version__}"
        code = auto_cli(
            COMMANDS, args=name_leading(arguments), prog="rtcwm", description=description, as_positional=False
        )
    except UserError as error:
        print(f"rtcwm: error: {error}", file=sys.stderr)
        sys.exit(2)
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
