"""What a stream is worth against the truth: by chunk, over halves, and how it drifts.

Measures that stand beside a true value (sharpness, motion, saturation, jumps) are ratios of means, not means of ratios:
a chunk in which hardly anything moves would decide the mean. The Frechet distance is of 2 x 2 patches of latents (96
values, a row of the packed sequence), fitted anew to all rows of the chunks it is asked for: that of a half is not the
mean of its chunks', which are higher the fewer rows they have.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rtcwm.evaluate import metrics
from rtcwm.model.layout import CHUNK_LATENTS
from rtcwm.model.packing import patchify

Decode = Callable[[Tensor], Iterable[Tensor]]
"""`decode(latents [24, 5 n, h, w])` gives the frames of each of the n chunks, float32 [17, H, W, 3] in 0..1."""


@dataclass(frozen=True)
class Measure:
    """What a number means. `perfect` is the truth's own value."""

    unit: str
    perfect: float
    what: str


MEASURES = {
    "psnr": Measure("dB", metrics.PSNR_CAP, "peak signal to noise ratio against the true frames, mean over frames"),
    "ssim": Measure("", 1.0, "structural similarity to the true frames, mean over frames"),
    "frechet": Measure("", 0.0, "Frechet distance of 2x2 latent patches to the truth's"),
    "frechet_mean": Measure("", 0.0, "the part of the Frechet distance that the means make"),
    "sharpness": Measure("x truth", 1.0, "Laplacian energy of luma over the truth's"),
    "motion": Measure("x truth", 1.0, "change between neighbouring frames of a chunk over the truth's"),
    "saturation": Measure("x truth", 1.0, "mean chroma (largest minus smallest colour value) over the truth's"),
    "jumps": Measure(
        "x truth", 1.0, "change at the border to the chunk before over change inside the two, over the truth's"
    ),
    "colour": Measure("of 255", 0.0, "distance of a chunk's mean colour to the truth's, root mean square over R, G, B"),
}
MEANS = ("psnr", "ssim", "colour")
RATIOS = {"sharpness": "energy", "motion": "motion", "saturation": "chroma"}


@dataclass(frozen=True)
class Comparison:
    """One model's streams beside the truth, clip by clip and chunk by chunk.

    `near` holds [clips, chunks] of the measures in `MEANS`; `made` and `true` hold [clips, chunks] of "energy",
    "chroma", "motion" (mean change inside a chunk) and "border" (change at its start; NaN in chunk 0), and under
    "moments" [clips, chunks, 97, 97] of the latent patches.
    """

    near: dict[str, Tensor]
    made: dict[str, Tensor]
    true: dict[str, Tensor]

    @property
    def clips(self) -> int:
        return self.near["psnr"].shape[0]

    @property
    def chunks(self) -> int:
        return self.near["psnr"].shape[1]

    def value(self, measure: str, chunks: Sequence[int] | None = None, clips: Sequence[int] | None = None) -> float:
        """A measure over some chunks and clips (all of them by default); NaN or infinite where it has no value."""
        chunks = list(range(self.chunks)) if chunks is None else list(chunks)
        clips = list(range(self.clips)) if clips is None else list(clips)

        def cut(table: Tensor, chosen: Sequence[int] = chunks) -> Tensor:
            return table[clips][:, chosen]

        if measure in MEANS:
            return cut(self.near[measure]).mean().item()
        if measure in RATIOS:
            name = RATIOS[measure]
            return (cut(self.made[name]).sum() / cut(self.true[name]).sum()).item()
        if measure == "jumps":
            borders = [chunk for chunk in chunks if chunk > 0]
            made, true = (
                cut(side["border"], borders).sum()
                / (cut(side["motion"], borders) + cut(side["motion"], [k - 1 for k in borders])).sum()
                for side in (self.made, self.true)
            )
            return (made / true).item()
        made, true = (cut(side["moments"]).sum(dim=(0, 1)) for side in (self.made, self.true))
        distance, of_means = metrics.frechet(made, true)
        return distance if measure == "frechet" else of_means

    def summary(self, measure: str) -> dict:
        """A measure over all chunks, the first and the last half (the middle one of an odd number is in neither), its
        slope over chunks, by chunk, and by clip."""
        half = max(1, self.chunks // 2)
        by_chunk = [self.value(measure, [chunk]) for chunk in range(self.chunks)]
        return {
            "all": self.value(measure),
            "first_half": self.value(measure, range(half)),
            "last_half": self.value(measure, range(self.chunks - half, self.chunks)),
            "drift": metrics.slope(by_chunk),
            "chunks": by_chunk,
            "clips": [self.value(measure, clips=[clip]) for clip in range(self.clips)],
        }


def compare(made: Tensor, true: Tensor, decode: Decode) -> Comparison:
    """Measures streams.

    Args:
        made: latents [clips, 24, 5 n, h, w]; true: as long or longer, its first n chunks are used. Any device.
    """
    true = true[:, :, : made.shape[2]]
    near: dict[str, list] = {name: [] for name in MEANS}
    sides: tuple[dict[str, list], ...] = ({}, {})
    for made_clip, true_clip in zip(made, true, strict=True):
        rows: list[dict] = []
        last: tuple[Tensor | None, ...] = (None, None)
        for frames in zip(decode(made_clip), decode(true_clip), strict=True):
            rows.append(_chunk(frames, last))
            last = tuple(side[-1] for side in frames)
        for name in MEANS:
            near[name].append(torch.stack([row[name] for row in rows]))
        for index, (side, latents) in enumerate(zip(sides, (made_clip, true_clip))):
            for name in ("energy", "chroma", "motion", "border"):
                side.setdefault(name, []).append(torch.stack([row[name][index] for row in rows]))
            side.setdefault("moments", []).append(patch_moments(latents))
    stacked = [{name: torch.stack(values).double().cpu() for name, values in part.items()} for part in (near, *sides)]
    return Comparison(*stacked)


def _chunk(frames: tuple[Tensor, Tensor], last: tuple[Tensor | None, Tensor | None]) -> dict:
    """Numbers of one chunk of one clip: scalars for `MEANS`, pairs (made, true) for the rest."""
    made, true = frames
    borders = [
        side.new_tensor(torch.nan) if before is None else (side[0] - before).abs().mean()
        for side, before in zip(frames, last, strict=True)
    ]
    return {
        "psnr": metrics.psnr(made, true).mean(),
        "ssim": metrics.structural_similarity(made, true).mean(),
        "colour": metrics.colour_error(made, true),
        "energy": [metrics.laplacian_energy(side).mean() for side in frames],
        "chroma": [metrics.chroma(side).mean() for side in frames],
        "motion": [metrics.change(side).mean() for side in frames],
        "border": borders,
    }


def patch_moments(latents: Tensor) -> Tensor:
    """Moments of the 2 x 2 patches of every chunk, latents [24, 5 n, h, w] -> [n, 97, 97]."""
    chunks = torch.stack(latents.split(CHUNK_LATENTS, dim=1))  # [n, 24, 5, h, w]
    return metrics.moments(patchify(chunks.float()))
