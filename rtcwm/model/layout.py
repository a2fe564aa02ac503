"""Sizes and conventions of the packed sequence: what a latent, a chunk, a span and a geometry are.

Everything here is a number of the released MiniMax-H3 Ref2VA model and its VAE. One latent pixel is 16 x 16 image
pixels, one row is a 2 x 2 patch of latent pixels, and one 17-frame VAE clip is a chunk of 5 latents.
"""

from dataclasses import dataclass

from rtcwm.errors import UserError

FPS = 24
LATENT_FRAMES = (1, 4, 4, 4, 4)  # frames that each latent of a chunk covers
CHUNK_LATENTS = len(LATENT_FRAMES)
CLIP_FRAMES = sum(LATENT_FRAMES)
CHUNK_SECONDS = CLIP_FRAMES / FPS  # that a chunk plays
SPAN_CHUNKS = 6  # chunks a streaming model attends over: 5 of history and the one being denoised
TEACHER_LATENTS = 37  # 124 frames, the window of the released bidirectional adapter

LATENT_CHANNELS = 24
AUDIO_LATENT_CHANNELS = 32
AUDIO_CHANNELS = 2
AUDIO_LATENTS_PER_SECOND = 40
PIXELS_PER_LATENT = 16
PATCH = (1, 2, 2)  # latents, latent pixels down, latent pixels across: one row of the packed sequence
PATCH_FEATURES = LATENT_CHANNELS * PATCH[0] * PATCH[1] * PATCH[2]

VIDEO_TAG = 0
TEXT_TAG = 1
AUDIO_TAG = 2
MODALITIES = 3  # AdaLN keeps one row for each (model time, tag)

REFERENCE_TIME = 0.999  # model time of visual references, and of text when it is pinned
CLEAN_TIME = 1.0  # model time t = 1 - sigma of clean data


def padded(size: int) -> int:
    """`size` latent pixels rounded up to whole patches (2 latent pixels)."""
    return size + size % PATCH[1]


def rows_per_latent(height: int, width: int) -> int:
    """Rows of one latent frame of `height` x `width` latent pixels, zero-padded to whole patches."""
    return (padded(height) // PATCH[1]) * (padded(width) // PATCH[2])


@dataclass(frozen=True)
class Geometry:
    """Latent sizes of target and proxy as they are stored (latent pixels).

    The target must pack without padding; an odd proxy size is zero-padded at the right and at the bottom when packed.
    Raises UserError for an odd target size or a size below one latent pixel.
    """

    height: int
    width: int
    proxy_height: int
    proxy_width: int

    def __post_init__(self) -> None:
        sizes = (self.height, self.width, self.proxy_height, self.proxy_width)
        if min(sizes) < 1:
            raise UserError(f"latent sizes must be positive, found target {sizes[:2]} and proxy {sizes[2:]}")
        if self.height % PATCH[1] or self.width % PATCH[2]:
            raise UserError(
                f"target latents of {self.height} x {self.width} cannot be cut into {PATCH[1]} x {PATCH[2]} patches: "
                f"height and width must be even, that is, {2 * PIXELS_PER_LATENT} pixels or a multiple of it"
            )

    @classmethod
    def from_pixels(cls, height: int, width: int, proxy_height: int, proxy_width: int) -> "Geometry":
        """Geometry of videos given in pixels. Raises UserError where a size is not a multiple of 16 pixels."""
        sizes = {"height": height, "width": width, "proxy height": proxy_height, "proxy width": proxy_width}
        for name, pixels in sizes.items():
            if pixels % PIXELS_PER_LATENT:
                raise UserError(f"{name} of {pixels} pixels is not a multiple of {PIXELS_PER_LATENT}")
        return cls(*(pixels // PIXELS_PER_LATENT for pixels in sizes.values()))

    @property
    def padded_proxy(self) -> tuple[int, int]:
        """Height and width of the proxy as packed (latent pixels, even)."""
        return padded(self.proxy_height), padded(self.proxy_width)

    @property
    def target_rows(self) -> int:
        """Rows of one target latent."""
        return rows_per_latent(self.height, self.width)

    @property
    def proxy_rows(self) -> int:
        """Rows of one proxy latent."""
        return rows_per_latent(self.proxy_height, self.proxy_width)

    @property
    def target_chunk(self) -> int:
        """Rows of the target of one chunk."""
        return CHUNK_LATENTS * self.target_rows

    @property
    def proxy_chunk(self) -> int:
        """Rows of the proxy of one chunk."""
        return CHUNK_LATENTS * self.proxy_rows


RELEASED = Geometry(48, 84, 12, 21)  # 1344 x 768 with a 336 x 192 proxy


def frames_of(latents: int) -> int:
    """Frames that the first `latents` latents of a chunk stream cover: 30 -> 102, 37 -> 124."""
    chunks, rest = divmod(latents, CHUNK_LATENTS)
    return chunks * CLIP_FRAMES + sum(LATENT_FRAMES[:rest])


def chunks_of(latents: int) -> int:
    """Chunks that `latents` latents begin: 30 -> 6, 37 -> 8 (the last one cut)."""
    return -(-latents // CHUNK_LATENTS)


def audio_latents(frames: int) -> int:
    """Audio latents a channel over `frames` frames, as diffusers' `audio_latent_num_frames`: 102 -> 170, 124 -> 207."""
    return int(round(frames / FPS * AUDIO_LATENTS_PER_SECOND))
