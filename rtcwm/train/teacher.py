"""What teacher and critic look at: a window of a rollout, in the layout that the teacher was trained on.

- "released": 37 latents in stock order, every row sees every row, text at the target's time. The window ends two
  latents into a chunk, so that it covers seven whole chunks of a rollout and the beginning of an eighth. Picture 1 is
  the window's own first latent, or the start frame.
- "causal": the six chunks of a span under the student's own mask and layout, with its start frame.

Teacher and critic see the same window with the same noise: the difference of their scores is the student's gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from diffusers import MiniMaxH3Transformer3DModel

from rtcwm.model.attention import Kernel, make_attend
from rtcwm.model.blocks import embed_text, predict_velocity
from rtcwm.model.layout import (
    CHUNK_LATENTS,
    REFERENCE_TIME,
    SPAN_CHUNKS,
    TEACHER_LATENTS,
    audio_latents,
    chunks_of,
    frames_of,
)
from rtcwm.model.masks import Rule
from rtcwm.model.packing import Window
from rtcwm.train.dataset import silence
from rtcwm.train.span import SpanNoise

TeacherKind = Literal["released", "causal"]
Picture1 = Literal["window", "start"]


def window_latents(kind: TeacherKind) -> int:
    """Latents of a teacher's window."""
    return TEACHER_LATENTS if kind == "released" else SPAN_CHUNKS * CHUNK_LATENTS


def window_chunks(kind: TeacherKind) -> int:
    """Chunks that a teacher's window touches: the shortest rollout that holds one."""
    return chunks_of(window_latents(kind))


@dataclass(frozen=True, eq=False)
class Rolled:
    """A finished rollout: latents ``[B, 24, 5 R, h, w]`` (detached) and the clip's window that it followed (its proxy,
    start frame and text, and in ``truth.video`` what the frames should have been)."""

    latents: torch.Tensor
    truth: Window

    @property
    def chunks(self) -> int:
        return self.latents.shape[2] // CHUNK_LATENTS


class Teacher:
    """Cuts windows out of rollouts and predicts velocities for them, with whatever adapter ``run`` binds.

    Args:
        clips_root: for the silent audio of a window.
    """

    def __init__(
        self,
        model: MiniMaxH3Transformer3DModel,
        kernel: Kernel,
        rule: Rule,
        kind: TeacherKind,
        picture1: Picture1,
        clips_root,
    ):
        self.model, self.kernel, self.rule = model, kernel, rule
        self.kind, self.picture1, self.clips_root = kind, picture1, clips_root
        self.latents, self.chunks = window_latents(kind), window_chunks(kind)
        self._text: tuple[torch.Tensor, torch.Tensor] | None = None  # of the last rollout: as given, and refined

    def last(self, chunks: int) -> int:
        """First chunk of the window at the end of a rollout, the student's."""
        return chunks - self.chunks

    def draw(self, chunks: int, generator: torch.Generator) -> int:
        """First chunk of a random window of a rollout, a critic's."""
        return int(torch.randint(chunks - self.chunks + 1, (), generator=generator))

    def window(self, rolled: Rolled, first: int) -> Window:
        """The window that begins at chunk ``first`` of a rollout, clean, with the conditions that the teacher gets."""
        begin = first * CHUNK_LATENTS
        cut = slice(begin, begin + self.latents)
        video = rolled.latents[:, :, cut]
        own_picture = self.kind == "released" and self.picture1 == "window"
        audio = silence(self.clips_root, audio_latents(frames_of(self.latents))).to(video.device)
        return replace(
            rolled.truth,
            video=video,
            proxy=rolled.truth.proxy[:, :, cut],
            picture1=video[:, :, :1] if own_picture else rolled.truth.picture1,
            audio=audio.expand(video.shape[0], -1, -1),
        )

    def velocity(
        self, window: Window, noise: SpanNoise, sigma: float, run: Callable[..., torch.Tensor], copies: int = 1
    ) -> torch.Tensor:
        """Velocity ``[B, 24, T, h, w]`` of the window noised to one level; of ``copies`` adapters that ``run`` binds
        together, ``[copies * B, ...]`` in their order."""
        released = self.kind == "released"
        # The stock rule keeps visual references at model time max(t, 0.999), and they really are that noisy.
        reference = min(sigma, 1 - REFERENCE_TIME) if released else 1 - REFERENCE_TIME
        noisy = noise.on(window, sigma, reference)
        layout = window.layout(stream=not released)
        attend = None if released else make_attend(self.kernel, layout, self.rule)
        time = torch.tensor(1 - sigma)
        times = time if released else time.expand(layout.chunks)
        text_time = "video" if released else "pinned"
        text = self._text_rows(window.text)
        return predict_velocity(self.model, noisy, layout, times, attend, text_time, run, copies, text)

    def _text_rows(self, text: torch.Tensor) -> torch.Tensor:
        """The refined rows of a rollout's text: every window of it has the same, whatever the level and the adapter."""
        if self._text is None or self._text[0] is not text:
            with torch.no_grad():
                self._text = text, embed_text(self.model, text)
        return self._text[1]
