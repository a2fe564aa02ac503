"""The `rtcwm` command line in the tests' own process."""

import sys

import pytest

from rtcwm import cli


def rtcwm(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """Runs the command line of these words; its exit code."""
    monkeypatch.setattr(sys, "argv", ["rtcwm", *map(str, words)])
    try:
        cli.main()
    except SystemExit as ended:
        return ended.code
    return 0
