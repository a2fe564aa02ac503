"""What long commands say on the way: one line on stderr, and durations as people read them."""

import sys


def duration(seconds: float) -> str:
    """Seconds as 1:02:03 or 2:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def show(text: str, done: int, total: int, lines: int = 20) -> None:
    """One line on stderr for each of `total` pieces of work: rewritten on a terminal, some `lines` of them in a log."""
    if sys.stderr.isatty():
        print(f"\r{text:70}", end="\n" if done == total else "", file=sys.stderr, flush=True)
    elif done == total or done % -(-total // lines) == 0:
        print(text, file=sys.stderr, flush=True)
