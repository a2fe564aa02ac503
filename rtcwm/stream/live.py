"""A stream that is open: proxies in, frames out.

    with open_stream(adapter="student.safetensors", clip="clips/clip_000012") as stream:
        for frames in stream.over(proxies):     # uint8 [17, H, W, 3] RGB, one chunk
            show(frames)

`proxies` may be any iterable, and may wait for whatever makes them. A proxy is one chunk: latents `[24, 5, ph, pw]` as
clips hold them; depth in metres and class ids, both `[17, H, W]`, H and W multiples of the proxy's size; or DUV
pictures, uint8 `[17, 16 ph, 16 pw, 3]`. Arrays are encoded as preparation encodes them.

With the VAE of MiniMax-H3 frames follow their proxies by one chunk: the first `next` gives none, and `finish` the last
chunk's. With the embedded world's codec they come at once.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rtcwm.data import duv
from rtcwm.data.write import stored
from rtcwm.engine.device import release, synchronize
from rtcwm.errors import UserError
from rtcwm.model.layout import CHUNK_LATENTS, CLIP_FRAMES, LATENT_CHANNELS, PIXELS_PER_LATENT
from rtcwm.model.sampler import Stream
from rtcwm.prepare.proxies import check_pictures
from rtcwm.stream.command import Opening
from rtcwm.stream.pixels import Pixels, no_frames

Proxy = Tensor | np.ndarray | tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Took:
    """Seconds of a call: encoding the proxy, the base's forwards, decoding."""

    proxy: float = 0.0
    denoise: float = 0.0
    decode: float = 0.0


class LiveStream:
    """An open stream; see `open_stream`.

    Attributes:
        late: chunks by which frames follow their proxies, 0 or 1.
        height, width: of the frames, pixels; proxy_size: height and width of proxies, pixels.
        chunk: how many chunks were given so far.
        latents: of the last chunk, `[24, 5, h, w]` float32 on the device.
        took: of the last call.
    """

    def __init__(self, stream: Stream, pixels: Pixels, device: torch.device, close: Callable[[], None] = lambda: None):
        self._stream, self._pixels, self._device, self._close = stream, pixels, device, close
        geometry = stream.conditions.geometry
        self.height, self.width = (PIXELS_PER_LATENT * side for side in (geometry.height, geometry.width))
        self.proxy_size = tuple(PIXELS_PER_LATENT * side for side in (geometry.proxy_height, geometry.proxy_width))
        self.late, self.took, self.latents = pixels.late, Took(), None
        self._shape = (LATENT_CHANNELS, CHUNK_LATENTS, geometry.proxy_height, geometry.proxy_width)
        self._finished = False

    @property
    def chunk(self) -> int:
        return self._stream.chunk

    def over(self, proxies: Iterable[Proxy]) -> Iterator[np.ndarray]:
        """Frames of every chunk, uint8 `[17, height, width, 3]`, the last one's included; see `next`."""
        for proxy in proxies:
            if len(frames := self.next(proxy)):
                yield frames
        if len(frames := self.finish()):
            yield frames

    def next(self, proxy: Proxy) -> np.ndarray:
        """Makes the next chunk.

        Args:
            proxy: one chunk of it, as the module says.

        Returns:
            Frames, uint8 `[17, height, width, 3]`: of this chunk, or of the one before where `late` is 1, which at the
            first chunk are none (`[0, height, width, 3]`).

        Raises:
            UserError: a proxy of another size or type; the stream is as it was, and takes another one.
            RuntimeError: the stream is finished.
        """
        if self._finished:
            raise RuntimeError("this stream is finished: open another one")
        began = time.perf_counter()
        given = self.encode_proxy(proxy).to(self._device)
        synchronize(self._device)
        encoded = time.perf_counter()
        self.latents = self._stream.next_chunk(given[None])[0]
        synchronize(self._device)
        made = time.perf_counter()
        frames = self._pixels.push(self.latents)
        self.took = Took(encoded - began, made - encoded, time.perf_counter() - made)
        return frames

    def finish(self) -> np.ndarray:
        """Ends the stream.

        Returns:
            The last chunk's frames where `late` is 1 and there are any, `[17 or 0, height, width, 3]`.
        """
        began = time.perf_counter()
        geometry = self._stream.conditions.geometry
        frames = no_frames((geometry.height, geometry.width)) if self._finished else self._pixels.finish()
        self._finished, self.took = True, Took(decode=time.perf_counter() - began)
        return frames

    def encode_proxy(self, proxy: Proxy) -> Tensor:
        """Latents `[24, 5, ph, pw]` float32 of one chunk of a proxy, rounded as clips store them. Raises UserError for
        another size or type."""
        if isinstance(proxy, Tensor):
            if tuple(proxy.shape) != self._shape:
                raise UserError(f"a chunk of proxy latents is {list(self._shape)}, found {list(proxy.shape)}")
            return proxy.float()
        height, width = self.proxy_size
        if isinstance(proxy, tuple):
            depth, ids = proxy
            if len(depth) != CLIP_FRAMES or len(ids) != CLIP_FRAMES:
                found = f"{len(depth)} of depth and {len(ids)} of ids"
                raise UserError(f"a chunk of a proxy has {CLIP_FRAMES} frames, found {found}")
            proxy = duv.encode(depth, ids, height, width)
        expected = (CLIP_FRAMES, height, width, 3)
        if proxy.dtype != np.uint8 or proxy.shape != expected:
            raise UserError(
                f"DUV pictures of a chunk are uint8 {list(expected)}, found {proxy.dtype} {list(proxy.shape)}"
            )
        check_pictures(proxy, f"chunk {self.chunk} of the proxy")
        return stored(self._pixels.encode_proxy(proxy)).float()

    def close(self) -> None:
        """Lets go of the weights, so that another stream may be opened in their place."""
        self._stream = self._pixels = None
        self._close()
        release(self._device)  # blocks know their own forward: such a circle waits for the collector

    def __enter__(self) -> "LiveStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_stream(*, picture: Path | str | np.ndarray | None = None, **settings: object) -> LiveStream:
    """Opens a stream.

    Args:
        picture: file of the first frame, or the frame itself, uint8 `[H, W, 3]` RGB.
        settings: those of `rtcwm.stream.command.Opening`: `adapter`, and either `clip` (and `start`) or `picture` and
            `prompt` (and `model`); how to sample; where to run.

    Raises:
        UserError: settings that do not go together, or files that do not fit them; what headers tell is checked before
            a weight is read.
    """
    from rtcwm.stream.plan import prepare

    return prepare(Opening(picture=picture, **settings)).load()
