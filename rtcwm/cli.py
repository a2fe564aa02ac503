"""The ``rtcwm`` command: small tools around the programs that a launcher starts."""

import sys

from jsonargparse import auto_cli

from rtcwm import __version__
from rtcwm.data.make import main_world
from rtcwm.errors import UserError
from rtcwm.evaluate.command import main_evaluate
from rtcwm.train.world_base import main_world_base

COMMANDS = {"world": main_world, "evaluate": main_evaluate, "world-base": main_world_base}


def main() -> None:
    """Runs one subcommand; a user's error is one line and exit code 2."""
    # Flags may be written with dashes, as the programs' are.
    arguments = [
        word
        if not word.startswith("--")
        else "--" + word[2:].partition("=")[0].replace("-", "_") + word[len(word.partition("=")[0]) :]
        for word in sys.argv[1:]
    ]
    try:
        auto_cli(COMMANDS, args=arguments, prog="rtcwm", description=f"rtcwm {__version__}", as_positional=False)
    except UserError as error:
        print(f"rtcwm: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
