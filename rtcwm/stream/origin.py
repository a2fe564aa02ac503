"""What a stream starts from: a start frame of a prepared clip, or a picture and a caption encoded on the spot.

A picture is encoded as preparation encodes the start frames of clips, and what is encoded takes the clip files'
rounding (fp16 latents, bf16 text), so that a stream from a condition root is the stream of the clip that would be
prepared of it.
The text encoder is let go before the base is built: the two need not fit a card together.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rtcwm.data.clips import Clip, read_clip
from rtcwm.data.codec import TEXT_DIM, embed_text, load_codec
from rtcwm.data.world import proxy_size
from rtcwm.data.write import Start, stored
from rtcwm.errors import UserError
from rtcwm.model.layout import PIXELS_PER_LATENT, Geometry
from rtcwm.model.sampler import Conditions
from rtcwm.prepare.captions import canonical, text_of
from rtcwm.prepare.jobs import Models
from rtcwm.prepare.run import open_models
from rtcwm.prepare.settings import Settings, check_target, parse_size
from rtcwm.prepare.video import read_picture, scaled
from rtcwm.prepare.weights import codec_identity, component
from rtcwm.stream.command import Opening
from rtcwm.stream.pixels import CodecPixels, Pixels
from rtcwm.train.dataset import load_window
from rtcwm.train.inference import conditions, span_silence

PICTURE = "stream"
"""What noise is named by where there is no clip."""


@dataclass(frozen=True)
class Origin(ABC):
    """A checked beginning.

    Attributes:
        name: noise is named by it; geometry: in latents; codec: {name, hash} of what makes the latents; text_width: of
            the text rows; None where that is known only once they are made.
    """

    name: str
    geometry: Geometry
    codec: Mapping[str, str]
    text_width: int | None

    @abstractmethod
    def line(self) -> str:
        """The beginning in words."""

    @abstractmethod
    def open(self, picture1: str, device: torch.device) -> tuple[Conditions, Pixels]:
        """What the stream sees all along ("native" or "2048" `picture1`), on the device, and its way to frames."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in latents."""
        return self.geometry.height, self.geometry.width


@dataclass(frozen=True)
class ClipOrigin(Origin):
    """A start frame of a prepared clip. `vae`: the folder of the VAE; None for the embedded world's codec."""

    clip: Clip
    start: int
    vae: Path | None
    tf32: bool

    def line(self) -> str:
        flagged = sorted(chunk for chunk in self.clip.flagged if chunk >= self.start)
        note = f"; quality control flagged chunks {', '.join(map(str, flagged))}" if flagged else ""
        return f"start: frame {self.start} of clip {self.clip.path}, {self.clip.chunks} chunks{note}"

    def open(self, picture1: str, device: torch.device) -> tuple[Conditions, Pixels]:
        window = load_window(self.clip, self.start, self.start, chunks=1, picture1=picture1).to(device)
        given = conditions(window, self.clip.path.parent)
        if self.vae is None:
            return given, CodecPixels(load_codec(), self.size)
        from rtcwm.prepare.vae import VideoCodec  # with transformers, which the embedded world does without
        from rtcwm.stream.vae import VaePixels

        return given, VaePixels(VideoCodec(self.vae, device, self.tf32, decoder=True), self.size)


@dataclass(frozen=True)
class PictureOrigin(Origin):
    """A picture, uint8 `[H, W, 3]`, and a caption. `models`: what encodes them; None for the embedded world's codec."""

    picture: np.ndarray
    caption: str
    models: Models | None
    settings: Settings

    def line(self) -> str:
        height, width = (PIXELS_PER_LATENT * side for side in self.size)
        return f"start: a picture at {width}x{height}; {self.caption.splitlines()[0] if self.caption else 'no caption'}"

    def open(self, picture1: str, device: torch.device) -> tuple[Conditions, Pixels]:
        start, pixels = self._embedded(picture1) if self.models is None else self._encoded(device)
        picture = stored(start.picture1 if picture1 == "native" else start.picture1_2048)
        given = (picture.float()[None], stored(start.text).float()[None])
        picture, text, audio = (part.to(device) for part in (*given, span_silence(None)))
        return Conditions(picture, text, start.text_tags.long(), audio, self.geometry), pixels

    def _embedded(self, picture1: str) -> tuple[Start, Pixels]:
        if picture1 != "native":
            raise UserError("the adapter takes a Picture 1 of 2048 pixels, which the embedded world has not")
        codec = load_codec()
        latent = codec.encode_picture(scaled(self.picture, self.settings.size).copy())
        return Start(latent, *embed_text(self.caption, latent), self.caption), CodecPixels(codec, self.size)

    def _encoded(self, device: torch.device) -> tuple[Start, Pixels]:
        from rtcwm.prepare.work import Encoders, encode_start
        from rtcwm.stream.vae import VaePixels

        encoders = Encoders(self.models, self.settings, device, decoder=True)
        start = encode_start(encoders, self.picture, self.settings.size, self.caption, 0)
        pixels = VaePixels(encoders.codec, self.size)
        del encoders  # the text encoder
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return start, pixels


def open_origin(opening: Opening, picture1: str, text_width: int) -> Origin:
    """Checks what a stream is to start from.

    Args:
        picture1: which Picture 1 the adapter takes; text_width: of the base's text.

    Raises:
        UserError: anything that does not fit; nothing was loaded.
    """
    origin = _clip(opening) if opening.clip is not None else _picture(opening, picture1)
    if origin.text_width not in (None, text_width):
        raise UserError(
            f"the text of this stream has width {origin.text_width}, the base ({opening.base_name}) takes "
            f"{text_width}: name the base that goes with it with --base, or the --model that goes with the base"
        )
    return origin


def _clip(opening: Opening) -> ClipOrigin:
    path = Path(opening.clip)
    if not path.is_dir():
        raise UserError(f"--clip {path} is not a folder: name the folder of one clip, <clips>/<clip id>")
    clip = read_clip(path)
    start = clip.starts[0] if opening.start is None else opening.start
    if start not in clip.starts:
        raise UserError(f"--start {start}: clip {clip.id} has start frames {', '.join(map(str, clip.starts))}")
    codec, vae = load_codec().identity, None
    if clip.codec["hash"] != codec["hash"]:
        if opening.vae is None and opening.model_folder is None:
            raise UserError(
                f"clip {clip.id} was made by codec {clip.codec['name']} {clip.codec['hash']}, not by the embedded "
                "world's: name the MiniMax-H3 folder that decodes it with --model (or its VAE with --vae)"
            )
        vae = component(opening.model_folder or Path("."), "vae", opening.vae and Path(opening.vae))
        codec = codec_identity(vae)
        if clip.codec["hash"] != codec["hash"]:
            raise UserError(
                f"clip {clip.id} was made by codec {clip.codec['name']} {clip.codec['hash']}, and {vae} is "
                f"{codec['name']} {codec['hash']}: name the VAE that the clip was made with"
            )
    return ClipOrigin(clip.id, clip.geometry, codec, clip.text_width, clip, start, vae, opening.tf32)


def _picture(opening: Opening, picture1: str) -> PictureOrigin:
    given = opening.picture
    picture = given if isinstance(given, np.ndarray) else read_picture(Path(given), "name a picture with --picture")
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
        raise UserError(f"the picture is {picture.dtype} {picture.shape}, expected uint8 [H, W, 3]")
    size = parse_size(opening.size, "--size")
    size = size or picture.shape[:2]
    check_target(size, "the picture" if opening.size is None else "--size")
    settings = Settings(
        size=size, proxy_size=parse_size(opening.proxy_size, "--proxy-size"), picture1_2048=picture1 == "2048",
        vision_picture=opening.vision_picture, system_prompt=_text(opening.system_prompt),
        text_layer=opening.text_layer, text_dtype=opening.text_dtype, tf32=opening.tf32,
    )  # fmt: skip
    folder = opening.model_folder
    if folder is None:
        models, codec, width = None, load_codec().identity, TEXT_DIM
        proxy = settings.proxy_size or proxy_size(*size)
    else:
        models = open_models(
            folder, opening.vae and Path(opening.vae), opening.text_encoder and Path(opening.text_encoder),
            opening.text_layer,
        )  # fmt: skip
        codec, width, proxy = models.codec_identity, _width(models.text_encoder), settings.proxy_of(size)
    geometry = Geometry.from_pixels(*size, *proxy)
    return PictureOrigin(PICTURE, geometry, codec, width, picture, _caption(opening.prompt), models, settings)


def _caption(prompt: str) -> str:
    """The caption that ``--prompt`` gives or names."""
    path = Path(prompt)
    try:
        named = path.suffix in (".txt", ".json") and path.is_file()
    except OSError:  # longer than a file's name may be
        named = False
    if not named and path.suffix in (".txt", ".json") and len(prompt.split()) == 1:
        raise UserError(f"--prompt {prompt}: there is no such file")
    return canonical(text_of(path) if named else prompt)


def _text(path: Path | None) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip() if path else ""
    except (OSError, UnicodeDecodeError) as fault:
        raise UserError(f"--system-prompt {path} cannot be read: {fault}") from fault


def _width(text_encoder: Path) -> int | None:
    """Width of a Qwen3-VL's rows, by its config."""
    return json.loads((text_encoder / "config.json").read_text()).get("text_config", {}).get("hidden_size")
