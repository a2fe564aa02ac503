"""Fits the embedded world's codec to the seeded world: `python -m rtcwm.data.codec_fit --out FILE`, half a minute.

Pictures weigh 0.9 and proxies 0.1: proxies have the sharper edges and would take the basis over (equal weights: 1.9 dB
less on pictures for 0.3 dB more on proxies; pictures alone: 2.2 dB less on proxies).
"""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from rtcwm.data.codec import GROUPS, NAME, PATCH_VALUES, patches, weights_hash
from rtcwm.data.world import Film
from rtcwm.model.layout import LATENT_CHANNELS, LATENT_FRAMES


def fit(
    episodes: int = 40, chunks: tuple[int, ...] = (0, 5, 11), seed: int = 20260101, picture_share: float = 0.9
) -> dict[str, Tensor]:
    """Fit the bases on chunks of `episodes` scenes; pictures weigh `picture_share`, proxies the rest. fp16 tensors."""
    share = np.array([picture_share, 1 - picture_share])
    scatter = {group: np.zeros((2, group * PATCH_VALUES, group * PATCH_VALUES)) for group in GROUPS}
    total = {group: np.zeros((2, group * PATCH_VALUES)) for group in GROUPS}
    count = {group: np.zeros(2) for group in GROUPS}
    for episode in range(episodes):
        film = Film(seed, episode, 0)
        for chunk in chunks:
            frames, proxy = film.chunk(chunk)
            for kind, video in enumerate((frames.rgb, proxy)):
                video = torch.from_numpy(video)
                for group, part in ((1, video[:1]), (4, video[1:])):
                    values = patches(part, group).reshape(-1, group * PATCH_VALUES)
                    scatter[group][kind] += (values.T @ values).numpy()
                    total[group][kind] += values.sum(0).numpy()
                    count[group][kind] += len(values)
    tensors = {}
    for group in GROUPS:
        basis, centre, std = principal(scatter[group], total[group], count[group], share, group)
        parts = {"basis": basis, "centre": centre, "mean": np.zeros(LATENT_CHANNELS), "std": std}
        tensors |= {f"{name}_{group}": torch.from_numpy(part).half().contiguous() for name, part in parts.items()}
    return tensors


def principal(
    scatter: np.ndarray, total: np.ndarray, count: np.ndarray, share: np.ndarray, group: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The 24 leading principal components of a weighted mixture of kinds.

    Args:
        scatter: sum of x x' by kind, `[kinds, n, n]`.
        total: sum of x by kind, `[kinds, n]`.
        count: number of x by kind, `[kinds]`.
        share: weight of each kind, whatever its number of x, `[kinds]`, sum 1.
        group: frames of a patch; n is a multiple of it.

    Returns:
        basis `[n, 24]`, centre `[n]` and the standard deviations `[24]` along the basis, largest first. A component's
        sign is free: the largest value of its sum over the frames is made positive.
    """
    centre = share @ (total / count[:, None])
    covariance = np.tensordot(share / count, scatter, 1) - np.outer(centre, centre)
    variance, vectors = np.linalg.eigh(covariance)
    basis = vectors[:, ::-1][:, :LATENT_CHANNELS].copy()
    still = basis.reshape(group, -1, LATENT_CHANNELS).sum(0)
    basis *= np.sign(np.take_along_axis(still, np.abs(still).argmax(0)[None], 0))
    return basis, centre, np.sqrt(variance[::-1][:LATENT_CHANNELS])


def main(out: Path) -> None:
    """Fit the codec and write it.

    Args:
        out: safetensors file to write.
    """
    metadata = {
        "name": NAME,
        "channels": str(LATENT_CHANNELS),
        "latent_frames": str(LATENT_FRAMES),
        "fitted_on": "embedded world, pictures 0.9, proxies 0.1",
    }
    tensors = fit()
    save_file(tensors, out, metadata=metadata)
    print(f"{out}: {out.stat().st_size} bytes, hash {weights_hash(tensors)}")


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli(main, as_positional=False)
