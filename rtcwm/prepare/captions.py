"""Captions of clips and of the start frames within them.

A caption's lines may open with the seconds they speak of, `[1.42s]` or `[0.00s-5.17s]`, counted from the clip's first
frame. A stream that starts at chunk m counts from its Picture 1, so its caption is moved by 17 m / 24 s: what ended
before is left out, what had begun begins at 0.00. Lines end with CRLF, the form that the released adapter was trained
on; a bare LF is another token.
"""

import json
import re
from pathlib import Path

from rtcwm.errors import UserError
from rtcwm.prepare.sources import Source, checked_text

STAMP = re.compile(r"\[(\d+(?:\.\d+)?)s(?:\s*-\s*(\d+(?:\.\d+)?)s)?\]")
TEXT_KEYS = ("prompt", "caption", "text", "description")
EPISODE_CAPTION = "caption.json"
LONGEST = 20_000  # characters; the rows of a text are in every window that is trained on, and captions have hundreds


def canonical(text: str) -> str:
    """The text without blank ends, its lines joined by CRLF."""
    return "\r\n".join(text.strip().replace("\r\n", "\n").replace("\r", "\n").split("\n"))


def read_caption(source: Source, episode_captions: bool) -> tuple[str, tuple[str, ...]]:
    """The caption of a clip, "" where there is none, and what there is to say about it.

    Args:
        source: its manifest text, else the first of its caption files that holds text.
        episode_captions: whether `caption.json`, which describes a whole episode, will do.

    A file without a word in it counts as one that is not there, and is named: annotation tools leave such files where
    they found nothing to say.

    Raises:
        UserError: a caption file that cannot be read, or a text that is no caption by its length.
    """
    notes, text = (), source.prompt or ""
    for file in source.captions if source.prompt is None else ():
        if file.name == EPISODE_CAPTION and not episode_captions:
            continue
        text = text_of(file)
        if text.strip():
            if file.name == EPISODE_CAPTION:
                notes = (
                    *notes,
                    f"caption from {EPISODE_CAPTION}, which describes the whole episode and not this clip",
                )
            break
        notes = (*notes, f"{file.name} is empty: passed over")
    text = canonical(text)
    if len(text) > LONGEST:
        raise UserError(f"the caption has {len(text)} characters, expected at most {LONGEST}: shorten it")
    if not text:
        return "", (*notes, "no caption: the text is empty")
    return text, notes if STAMP.search(text) else (
        *notes,
        "the caption has no time stamps: every start frame gets it whole",
    )


def text_of(file: Path) -> str:
    """The text of a .txt or .json caption file; "" where it says nothing: no bytes, `null`, `{}`, or a key of
    `TEXT_KEYS` that is null."""
    try:
        content = file.read_bytes().decode("utf-8-sig")
        if file.suffix != ".json" or not content.strip():
            return content
        found = json.loads(content)
    except (OSError, ValueError, RecursionError) as fault:
        raise UserError(f"{file} cannot be read as a caption ({fault}): mend or remove it") from fault
    compiled = found.get("compiled") if isinstance(found, dict) else None
    if isinstance(compiled, dict) and isinstance(compiled.get("cwm"), dict):
        found = compiled["cwm"].get("user", "")
    if found is None or found == {}:
        return ""
    if isinstance(found, dict):
        silent = any(key in found and found[key] is None for key in TEXT_KEYS)
        found = next((found[key] for key in TEXT_KEYS if isinstance(found.get(key), str)), "" if silent else None)
    if not isinstance(found, str):
        raise UserError(f"{file} holds no caption: expected text, or an object with one of {', '.join(TEXT_KEYS)}")
    return checked_text(found, file)


def from_start(caption: str, seconds: float) -> str:
    """The caption as a stream that starts `seconds` into the clip needs it; lines without a stamp stay with the line
    before them."""
    kept, keeps = [], True
    for line in caption.split("\r\n"):
        match = STAMP.match(line)
        if match:
            first, last = float(match[1]), float(match[2]) if match[2] else None
            keeps = last is None or last > seconds
            stamp = f"[{max(0.0, first - seconds):.2f}s" + (f"-{last - seconds:.2f}s]" if last is not None else "]")
            line = stamp + line[match.end() :]
        if keeps:
            kept.append(line)
    return "\r\n".join(kept)
