"""The `rtcwm` command line itself: what it imports, and the words it takes."""

import subprocess
import sys

import pytest

from rtcwm import cli


def test_help_waits_for_no_torch():
    """Help and wrong flags are answered without the second or more that PyTorch takes to import."""
    lines = (
        "import sys, rtcwm.cli; print(sorted({'torch', 'deepspeed', 'diffusers', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("adapter diff a b --limit 3", "adapter diff --first a --second b --limit 3"),
        ("adapter diff --first a --second b", "adapter diff --first a --second b"),
        ("export a --to peft", "export --file a --to peft"),
        ("clips check c --flag", "clips check --folder c --flag true"),
        ("clips check c --flag --rms-low 0", "clips check --folder c --flag true --rms_low 0"),
        ("clips check c --flag false", "clips check --folder c --flag false"),
        (
            "prepare --source a --source=b --source+ c --model d",
            "prepare --source+ a --source+=b --source+ c --model d",
        ),
        ("prepare --source [a,b] --out=--source", "prepare --source [a,b] --out=--source"),
        ("evaluate --model a=b --run c", "evaluate --model+ a=b --run c"),
        ("world --start-every=2 --out=a-b", "world --start_every=2 --out=a-b"),
    ],
)
def test_words(given, read):
    assert cli.name_leading([cli.with_underscores(word) for word in given.split()]) == read.split()
