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
    try:
        auto_cli(COMMANDS, prog="rtcwm", description=f"rtcwm {__version__}", as_positional=False)
    except UserError as error:
        print(f"rtcwm: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
