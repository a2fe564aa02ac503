"""What prepared files depend on besides their sources and the weights, and the key that names all of it together."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from rtcwm.data.world import proxy_size
from rtcwm.errors import UserError
from rtcwm.model.layout import PATCH, PIXELS_PER_LATENT

VERSION = 2  # of the recipe: raised when the same sources and settings give other files
TARGET_MULTIPLE = PATCH[1] * PIXELS_PER_LATENT  # pixels: targets are packed without padding
LEAST_PROXY = 2 * PIXELS_PER_LATENT  # the VAE's reflecting pads need two latent pixels


@dataclass(frozen=True, kw_only=True)
class Settings:
    """As `rtcwm prepare` explains them; sizes are (height, width) in pixels, `system_prompt` is the text itself."""

    starts: str = "first"
    size: tuple[int, int] | None = None
    proxy_size: tuple[int, int] | None = None
    picture1_2048: bool = False
    vision_picture: str = "native"
    system_prompt: str = ""
    text_layer: int = 50
    text_dtype: str = "bfloat16"
    episode_captions: bool = True
    tf32: bool = True

    def __post_init__(self) -> None:
        starts_of(self.starts, 10**9)
        if self.text_layer < 0:
            raise UserError(f"--text-layer {self.text_layer}: expected 0 (the embeddings) or more")
        if self.size:
            check_target(self.size, "--size")
        if self.proxy_size and (
            min(self.proxy_size) < LEAST_PROXY or any(side % PIXELS_PER_LATENT for side in self.proxy_size)
        ):
            raise UserError(
                f"--proxy-size is {self.proxy_size[1]}x{self.proxy_size[0]}; width and height have to be multiples of "
                f"{PIXELS_PER_LATENT}, from {LEAST_PROXY} on"
            )

    def proxy_of(self, size: tuple[int, int]) -> tuple[int, int]:
        """Height and width of the proxy of a target of this size: a quarter, unless it was given."""
        return self.proxy_size or tuple(max(LEAST_PROXY, side) for side in proxy_size(*size))

    def stored(self) -> dict[str, object]:
        """The settings as JSON gives them back."""
        return json.loads(json.dumps(asdict(self)))


def parse_size(text: str | None, flag: str) -> tuple[int, int] | None:
    """`1344x768` as (height, width)."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if not match:
        raise UserError(f"{flag} {text}: expected WIDTHxHEIGHT, as 1344x768")
    return int(match[2]), int(match[1])


def check_target(size: tuple[int, int], name: object) -> None:
    """UserError, opened by `name`, for a target size in pixels that the model cannot take."""
    if min(size) < 1 or any(side % TARGET_MULTIPLE for side in size):
        raise UserError(
            f"{name} is {size[1]}x{size[0]}; width and height of a target have to be multiples of {TARGET_MULTIPLE}: "
            "cut or scale the video, or let --size scale it"
        )


def starts_of(rule: str, chunks: int) -> tuple[int, ...]:
    """Start frames of a clip of so many chunks: `first`, `every:N`, or indices as `0,3,7`, as far as the clip goes.

    Raises:
        UserError: none of these.
    """
    if rule == "first":
        return (0,)
    if match := re.fullmatch(r"every:([1-9]\d*)", rule):
        return tuple(range(0, chunks, int(match[1]))) if chunks < 10**9 else (0,)
    if re.fullmatch(r"\d+(,\d+)*", rule):
        return tuple(sorted({int(index) for index in rule.split(",") if int(index) < chunks}))
    raise UserError(f"--starts {rule}: expected first, every:N, or chunk indices as 0,3,7")


def key_of(
    settings: Settings,
    sources: Mapping[str, str],
    codec: Mapping[str, str],
    text_encoder: Mapping[str, str],
    size: tuple[int, int],
) -> str:
    """32 hex digits over all that a clip's files depend on."""
    parts = [VERSION, settings.stored(), dict(sources), dict(codec), dict(text_encoder), size]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
