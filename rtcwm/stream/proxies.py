"""Where a stream's proxies come from: latents of a prepared clip, or pictures of a condition root, as they are needed.

A condition root may still be growing. Its frames are looked for one after the other by name, so that waiting costs the
same however many there are.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from torch import Tensor

from rtcwm.data.clips import STREAM, Clip
from rtcwm.errors import UserError
from rtcwm.model.layout import CHUNK_LATENTS, CLIP_FRAMES
from rtcwm.prepare.proxies import DEPTH, IDS, Conditions, open_conditions, read_condition, read_ids
from rtcwm.train.dataset import finite, read

END = "END"
"""File whose presence says that a growing condition root has all its frames."""
PNG_END = b"IEND\xaeB`\x82"
POLL_SECONDS = 0.02


class ClipProxies:
    """Proxy latents `[24, 5, ph, pw]` float32 of a clip's chunks.

    Attributes:
        chunks: how many; waited: seconds spent waiting for files, none; note: what there is to say at the end, nothing.

    Raises:
        UserError: more chunks than the clip has from there on.
    """

    waited, note = 0.0, None

    def __init__(self, clip: Clip, start: int, chunks: int | None):
        left = clip.chunks - start
        if chunks is not None and chunks > left:
            raise UserError(
                f"--chunks {chunks}: clip {clip.id} has proxies for {left} chunks from start frame {start} on (of "
                f"{clip.chunks}): ask for fewer, or an earlier --start"
            )
        self.clip, self.start, self.chunks = clip, start, chunks or left

    def __iter__(self) -> Iterator[Tensor]:
        path = self.clip.path / STREAM
        for chunk in range(self.start, self.start + self.chunks):
            (latents,) = read(path, ("proxy",), slice(chunk * CHUNK_LATENTS, (chunk + 1) * CHUNK_LATENTS))
            yield finite(latents, self.clip, path, "proxy")[0]


class RootProxies:
    """DUV pictures, uint8 `[17, height, width, 3]`, of the chunks of a condition root.

    Args:
        path: the root; size: height and width that its files are reduced to.
        chunks: how many, None for all.
        follow: seconds to wait for a frame that is not there yet; None: all of them have to be.
        stopped: asked while waiting; ends the wait once it says so.

    Attributes:
        chunks: how many, None where the end is not known.
        waited: seconds spent waiting for files so far.
        note: what there is to say once the last chunk was taken.

    Raises:
        UserError: no such root, files that are missing in between, sizes that do not fit, or fewer chunks.
    """

    def __init__(
        self,
        path: Path,
        size: tuple[int, int],
        chunks: int | None,
        follow: float | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ):
        self.path, self.size, self.chunks, self.follow, self.stopped = path, size, chunks, follow, stopped
        self.waited, self.note = 0.0, None
        self._root: Conditions | None = None
        if not path.is_dir():
            raise UserError(f"--conditions {path} is not a folder: name a condition root (%06d{DEPTH}, %06d{IDS})")
        if follow is None:
            self._root = self._checked(open_conditions(path))
            whole, rest = divmod(self._root.frames, CLIP_FRAMES)
            if not whole or chunks is not None and chunks > whole:
                raise UserError(
                    f"--conditions {path} has {self._root.frames} frames, which are {whole} whole chunks of "
                    f"{CLIP_FRAMES}"
                    + (f", and --chunks asks for {chunks}" if chunks else "")
                    + ": render more, or add --follow if more are coming"
                )
            self.chunks = chunks or whole
            if chunks is None and rest:
                self.note = f"{rest} frames of {path} are left over: less than a chunk"

    def __iter__(self) -> Iterator[np.ndarray]:
        chunk = 0
        while self.chunks is None or chunk < self.chunks:
            pictures = []
            for number in range(chunk * CLIP_FRAMES, (chunk + 1) * CLIP_FRAMES):
                if self.follow is not None and not self._arrived(number):
                    self.note = self._ended(number, chunk)
                    return
                pictures.append(read_condition(self._root, number, *self.size))
            yield np.stack(pictures)
            chunk += 1

    def _checked(self, root: Conditions) -> Conditions:
        height, width = self.size
        if root.height % height or root.width % width:
            raise UserError(
                f"--conditions {self.path} is {root.width}x{root.height}, no whole multiple of the proxy's "
                f"{width}x{height}: render it at one, or set --proxy-size"
            )
        return root

    def _arrived(self, number: int) -> bool:
        """Waits for a frame; False once none came for `follow` seconds, or `END` says that none will."""
        began = time.monotonic()
        while not (found := self._whole(number)):
            if (self.path / END).exists():
                found = self._whole(number)  # it may have come before END did
                break
            if time.monotonic() - began > self.follow or self.stopped():
                break
            time.sleep(POLL_SECONDS)
        self.waited += time.monotonic() - began
        return found

    def _whole(self, number: int) -> bool:
        """Whether both files of a frame are there to their end. The first frame's size counts for all."""
        depth, ids = self.path / f"{number:06d}{DEPTH}", self.path / f"{number:06d}{IDS}"
        try:
            if not ids.read_bytes().endswith(PNG_END):
                return False
            if self._root is None:
                self._root = self._checked(Conditions(self.path, 0, *read_ids(ids).shape))
            return depth.stat().st_size >= 4 * self._root.height * self._root.width
        except FileNotFoundError:
            return False

    def _ended(self, number: int, chunk: int) -> str:
        waited = "stopped" if self.stopped() else f"no new frame came for {self.follow:g} s"
        why = f"{END} is there" if (self.path / END).exists() else waited
        rest = number - chunk * CLIP_FRAMES
        left = f"; {rest} frames are left over, less than a chunk" if rest else ""
        later = (self.path / f"{number + 1:06d}{DEPTH}").exists()
        gap = f"; frame {number:06d} is missing or not whole, though the next one is there" if later else ""
        asked = f"; --chunks asked for {self.chunks}" if self.chunks else ""
        return f"{self.path}: {why} after frame {number - 1}{left}{gap}{asked}"
