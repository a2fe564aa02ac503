"""The ``rtcwm`` command: small tools around the programs that a launcher starts.

A command's flags are its function's arguments, and its help is the docstring. The functions import their work when they
run, so that help and wrong flags cost no second of PyTorch.
"""

import os
import sys

from jsonargparse import auto_cli

from rtcwm import __version__
from rtcwm.adapters.command import main_diff, main_export, main_fuse, main_show
from rtcwm.bench.command import BENCH
from rtcwm.curate.command import main_check, main_import
from rtcwm.data.command import main_world
from rtcwm.errors import INTERRUPTED, UserError
from rtcwm.evaluate.command import main_evaluate
from rtcwm.prepare.command import main_prepare
from rtcwm.recipe.command import main_recipe
from rtcwm.stream.command import main_stream
from rtcwm.train.world_base import main_world_base

COMMANDS = {
    "world": main_world,
    "prepare": main_prepare,
    "clips": {
        "_help": "Check clips, or make them of another trainer's cache.",
        "check": main_check,
        "import": main_import,
    },
    "evaluate": main_evaluate,
    "stream": main_stream,
    "bench": BENCH,
    "recipe": main_recipe,
    "world-base": main_world_base,
    "export": main_export,
    "adapter": {
        "_help": "Look at an adapter, compare two, or fuse one.",
        "show": main_show,
        "diff": main_diff,
        "fuse": main_fuse,
    },
}
LEADING = {
    ("clips", "check"): ("folder",),
    ("clips", "import"): ("source",),
    ("export",): ("file",),
    ("adapter", "show"): ("file",),
    ("adapter", "diff"): ("first", "second"),
    ("adapter", "fuse"): ("file",),
}
"""Arguments that may stand right after a command, without their flags."""
SWITCHES = ("--flag", "--overwrite", "--follow")
"""Flags that need no value to be on."""
PIPE_CLOSED = 141
"""Exit code when nobody reads the output any more, as shells give it."""
LISTED = {("prepare", "--source"), ("evaluate", "--model")}
"""Flags of a command that add to a list each time they stand there, for which jsonargparse wants a plus behind them; a
whole list, `[a, b]`, takes the place of what a config says."""


def with_underscores(word: str) -> str:
    """A flag's name as the functions have it; flags may be written with dashes, as the programs' are."""
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value if word.startswith("--") else word


def name_leading(words: list[str]) -> list[str]:
    """Puts the flags of `LEADING` before words that stand right after a command, `true` after bare `SWITCHES` and a
    plus behind the flags of `LISTED`."""
    words = [*words]
    for place in reversed(range(len(words))):
        name, equals, value = words[place].partition("=")
        following = words[place + 1] if place + 1 < len(words) else "-"
        if words[place] in SWITCHES and following.startswith("-"):
            words.insert(place + 1, "true")
        elif (words[0], name) in LISTED and not (value or following).startswith("["):
            words[place] = f"{name}+{equals}{value}"
    for command, names in LEADING.items():
        if tuple(words[: len(command)]) == command:
            rest, named = words[len(command) :], []
            for name in names:
                if rest and not rest[0].startswith("-"):
                    named += [f"--{name}", rest.pop(0)]
            return [*command, *named, *rest]
    return words


def main() -> None:
    """Runs one subcommand; a user's error is one line and exit code 2, Ctrl-C one line and 130. A command may return an
    exit code of its own."""
    words = name_leading([with_underscores(word) for word in sys.argv[1:]])
    try:
        code = auto_cli(COMMANDS, args=words, prog="rtcwm", description=f"rtcwm {__version__}", as_positional=False)
        sys.stdout.flush()
    except UserError as error:
        print(f"rtcwm: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("rtcwm: interrupted; the same command starts it again, with what is already whole", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # what reads the output, such as `head`, has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more as it ends
        sys.exit(PIPE_CLOSED)
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
