"""The teacher's windows of a set of clips, whole in device memory, and batches cut from them by index.

The embedded world is small (384 clips of 12 chunks: 0.2 GB), so that a training step reads nothing and the host only
launches kernels: what a batch is made of (`Draw`) is drawn on the device too, and gathered there.

A window is 37 latents from the beginning of a chunk. Its Picture 1 and text are those of its own first chunk or of an
earlier start frame, as later programs combine them: diffusion forcing takes both from one start frame, a teacher of
distillation takes the window's own first latent with an earlier start frame's text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rtcwm.data.clips import STREAM, Clip
from rtcwm.errors import UserError
from rtcwm.model.layout import CHUNK_LATENTS, TEACHER_LATENTS, audio_latents, chunks_of, frames_of
from rtcwm.model.packing import Window
from rtcwm.train.dataset import finite, read, silence, spans


@dataclass(frozen=True)
class Conditions:
    """Chances of what a window is trained with; each in [0, 1].

    Attributes:
        foreign_proxy: its proxy is not its own: in half of these cases another clip's, in the other half zeros.
        stale_text: its text is an earlier start frame's (uniformly drawn, where there is one).
        stale_picture: its Picture 1 is that of an earlier start frame as well; the others have their own first latent.
    """

    foreign_proxy: float
    stale_text: float
    stale_picture: float


@dataclass(frozen=True, eq=False)
class Draw:
    """What a batch of B windows is made of, each [B] long on the bank's device.

    `window`, `proxy`: rows of the table of windows (the proxy may be another window's); `zeroed`: 1 where the proxy is
    zeros; `start`: row of the table of start frames; `stale_picture`: 1 where Picture 1 is that start frame's.
    """

    window: Tensor
    proxy: Tensor
    zeroed: Tensor
    start: Tensor
    stale_picture: Tensor


@dataclass(frozen=True, eq=False)
class Bank:
    """All windows of some clips, on one device, fp32.

    Attributes:
        video, proxy: streams of all clips, one after the other, `[latents, 24, h, w]`.
        picture1, text: of all start frames, `[starts, 24, 1, h, w]` and `[starts, n, width]`; text_tags `[n]` (CPU).
        audio: silence of one window `[1, rows, 32]`.
        table: one row a window: first latent, first start frame of its clip, number of them at or before the window,
            first window of its clip, number of windows of its clip. `[windows, 5]` long.
        names: (clip id, first chunk) of every window.
    """

    video: Tensor
    proxy: Tensor
    picture1: Tensor
    text: Tensor
    text_tags: Tensor
    audio: Tensor
    table: Tensor
    names: tuple[tuple[str, int], ...]

    @classmethod
    def load(cls, clips: Sequence[Clip], device: torch.device) -> "Bank":
        """Reads all clips.

        Raises:
            UserError: no usable window; clips whose text cannot be batched (other numbers of rows or other tags);
                files that cannot be read, or values that are not finite.
        """
        streams, openings, table, names = [], [], [], []
        latents = starts = 0
        for clip in clips:
            firsts = spans(clip, chunks_of(TEACHER_LATENTS))
            if not firsts:
                continue
            path = clip.path / STREAM
            streams.append([finite(part, clip, path, "stream")[0] for part in read(path, ("video", "proxy"))])
            for start in clip.starts:
                openings.append(_opening(clip, start))
            own = (len(table), len(firsts))
            for first in firsts:
                fitting = sum(start <= first for start in clip.starts)
                table.append((latents + first * CHUNK_LATENTS, starts, fitting, *own))
                names.append((clip.id, first))
            latents += clip.chunks * CHUNK_LATENTS
            starts += len(clip.starts)
        if not table:
            raise UserError(
                f"none of {len(clips)} clips has a window of {TEACHER_LATENTS} latents: use clips of at least "
                f"{chunks_of(TEACHER_LATENTS)} chunks with a start frame near the beginning"
            )
        pictures, texts, tags = zip(*openings, strict=True)
        if any(not torch.equal(tags[0], other) for other in tags):
            raise UserError(
                "the clips' text rows differ in number or tags, and windows of one batch share one layout: encode all "
                "captions to one length, as the embedded world's are"
            )
        video, proxy = (
            torch.cat(parts, 1).transpose(0, 1).contiguous().to(device) for parts in zip(*streams, strict=True)
        )
        return cls(
            video=video,
            proxy=proxy,
            picture1=torch.stack(pictures).to(device),
            text=torch.stack(texts).to(device),
            text_tags=tags[0],
            audio=silence(clips[0].path.parent, audio_latents(frames_of(TEACHER_LATENTS))).to(device),
            table=torch.tensor(table, device=device),
            names=tuple(names),
        )

    @property
    def windows(self) -> int:
        return len(self.names)

    @property
    def device(self) -> torch.device:
        return self.table.device

    def draw(self, batch: int, conditions: Conditions, generator: torch.Generator) -> Draw:
        """Draws a batch from a generator on the bank's device, without waiting for it.

        Raises:
            UserError: proxies of other clips are asked for and there is one clip alone.
        """
        if conditions.foreign_proxy > 0 and self.names[0][0] == self.names[-1][0]:
            raise UserError(f"all windows belong to clip {self.names[0][0]}: a foreign proxy needs a second clip")
        chance = torch.rand(5, batch, generator=generator, device=self.device, dtype=torch.float64)
        window = _index(chance[0], self.windows)
        _, first_start, fitting, first_window, siblings = self.table[window].unbind(1)
        # Uniform over the windows of all other clips: count on from the end of the own clip's, around the table.
        other = (first_window + siblings + _index(chance[1], self.windows - siblings)) % self.windows
        foreign = chance[2] < conditions.foreign_proxy
        zeroed = chance[2] < conditions.foreign_proxy / 2
        stale = chance[3] < conditions.stale_text + conditions.stale_picture
        start = first_start + torch.where(stale, _index(chance[4], fitting), fitting - 1)
        proxy = torch.where(foreign, other, window)
        return Draw(window, proxy, zeroed, start, chance[3] < conditions.stale_picture)

    def truth(self, window: Tensor) -> Draw:
        """Windows `[B]` with their own proxies, first latents and latest start frames."""
        _, first_start, fitting, _, _ = self.table[window].unbind(1)
        never = torch.zeros_like(window, dtype=torch.bool)
        return Draw(window, window, never, first_start + fitting - 1, never)

    def batch(self, draw: Draw) -> Window:
        """The clean windows of a draw, gathered on the device."""
        video = self._cut(self.video, draw.window)
        proxy = self._cut(self.proxy, draw.proxy)
        flags = (len(draw.window), 1, 1, 1, 1)
        return Window(
            video=video,
            proxy=torch.where(draw.zeroed.view(flags), 0.0, proxy),
            picture1=torch.where(draw.stale_picture.view(flags), self.picture1[draw.start], video[:, :, :1]),
            text=self.text[draw.start],
            text_tags=self.text_tags,
            audio=self.audio.expand(len(draw.window), -1, -1),
        )

    def _cut(self, stream: Tensor, window: Tensor) -> Tensor:
        """37 latents from each window's first: `[B, 24, 37, h, w]`."""
        rows = self.table[window, 0, None] + torch.arange(TEACHER_LATENTS, device=self.device)
        return stream[rows].transpose(1, 2)


def _opening(clip: Clip, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Picture 1, text and tags of a start frame."""
    path = clip.start_file(start)
    picture, text, tags = read(path, ("picture1_native", "text", "text_tags"))
    return finite(picture, clip, path, "picture1_native")[0], finite(text, clip, path, "text")[0], tags.long()


def _index(chance: Tensor, count: Tensor | int) -> Tensor:
    """Uniform draws from [0, 1) as indices below `count`."""
    return (chance * count).long().clamp(max=count - 1)
