"""Measures of frames and of latent rows; nothing here knows of models.

Frames are float32 [F, H, W, 3] in 0..1. PSNR and SSIM ask how near the frames are to the true ones, and reward a
blurred mean of what could follow. Laplacian energy, chroma, change and the Frechet distance ask whether the frames are
like true ones at all. A stream has to be held against both kinds.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rtcwm.errors import UserError

PSNR_CAP = 100.0
"""PSNR of equal frames, dB; 8-bit frames that differ in one value by one step are below it up to 4 megapixels."""

LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601


def psnr(made: Tensor, true: Tensor) -> Tensor:
    """Peak signal to noise ratio of every frame, [F] dB: ``-10 log10(mean squared error)``, at most `PSNR_CAP`."""
    error = (made - true).square().flatten(1).mean(dim=1)
    return -10 * torch.log10(error.clamp(min=10 ** (-PSNR_CAP / 10)))


def structural_similarity(made: Tensor, true: Tensor) -> Tensor:
    """SSIM of every frame, [F], -1..1 (Wang et al. 2004; torchmetrics, Gaussian window of 1.5 pixels).

    Raises:
        UserError: torchmetrics is not installed.
    """
    try:
        from torchmetrics.functional.image import structural_similarity_index_measure as ssim
    except ImportError as error:
        raise missing("torchmetrics", error) from error
    return ssim(made.permute(0, 3, 1, 2), true.permute(0, 3, 1, 2), data_range=1.0, reduction="none").reshape(-1)


def missing(package: str, error: ImportError) -> UserError:
    """What to tell a user who lacks a package of the extra `evaluate`."""
    return UserError(f"`rtcwm evaluate` needs {package} ({error}): pip install 'rtcwm[evaluate]'")


def laplacian_energy(frames: Tensor) -> Tensor:
    """Mean square of the five-point Laplacian of luma, [F]: fine detail. Blur lowers it, noise and ringing raise it."""
    luma = frames @ frames.new_tensor(LUMA)
    middle = luma[:, 1:-1, 1:-1]
    around = luma[:, :-2, 1:-1] + luma[:, 2:, 1:-1] + luma[:, 1:-1, :-2] + luma[:, 1:-1, 2:]
    return (around - 4 * middle).square().flatten(1).mean(dim=1)


def chroma(frames: Tensor) -> Tensor:
    """Mean of the largest minus the smallest colour value of a pixel, [F]: 0 is grey. It is the numerator of the
    saturation of HSV, whose denominator would let dark pixels decide."""
    return (frames.amax(dim=3) - frames.amin(dim=3)).flatten(1).mean(dim=1)


def change(frames: Tensor) -> Tensor:
    """Mean absolute difference of every frame to the one before, [F - 1]."""
    return frames.diff(dim=0).abs().flatten(1).mean(dim=1)


def colour_error(made: Tensor, true: Tensor) -> Tensor:
    """Distance of the mean colours of two stretches of frames, root mean square over R, G and B, scalar, in 0..255."""
    return 255 * (made.mean(dim=(0, 1, 2)) - true.mean(dim=(0, 1, 2))).square().mean().sqrt()


def moments(rows: Tensor) -> Tensor:
    """Sufficient statistics of samples ``[..., n, d]``: ``[..., d + 1, d + 1]`` float64, the sum of x x' over samples x
    with a one appended, so that counts and sums stand in the last row. Moments of a union are the sum of moments."""
    rows = rows.double()
    with_one = torch.cat([rows, rows.new_ones((*rows.shape[:-1], 1))], dim=-1)
    return with_one.transpose(-1, -2) @ with_one


def gaussian(total: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [d] and (biased) covariance [d, d] from moments [d + 1, d + 1]."""
    count, sums = total[-1, -1], total[-1, :-1]
    mean = sums / count
    return mean, total[:-1, :-1] / count - torch.outer(mean, mean)


def frechet(made: Tensor, true: Tensor, ridge: float = 1e-6) -> tuple[float, float]:
    """Frechet distance of the Gaussians fitted to two sets of samples, from their moments [d + 1, d + 1].

    ``|m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2))`` (Dowson and Landau 1982; Heusel et al. 2017, eq. 6). The trace of
    the root is the sum of the roots of the eigenvalues of ``C1^(1/2) C2 C1^(1/2)``, which is symmetric.

    Args:
        ridge: added to the diagonal of both covariances, which fewer samples than d leave singular.

    Returns:
        The distance, and the part of it that the means make.
    """
    (mean1, cov1), (mean2, cov2) = gaussian(made), gaussian(true)
    eye = torch.eye(len(mean1), dtype=cov1.dtype, device=cov1.device)
    cov1, cov2 = cov1 + ridge * eye, cov2 + ridge * eye
    if not torch.isfinite(cov1).all() or not torch.isfinite(cov2).all():
        return float("nan"), float("nan")  # a model that has diverged has no distance
    values, vectors = torch.linalg.eigh(cov1)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    cross = torch.linalg.eigvalsh(root @ cov2 @ root).clamp(min=0).sqrt().sum()
    of_means = (mean1 - mean2).square().sum()
    distance = of_means + cov1.trace() + cov2.trace() - 2 * cross
    return max(0.0, distance.item()), of_means.item()


def slope(values: Sequence[float]) -> float:
    """Least-squares slope of values at 0, 1, 2, ...; non-finite ones are left out; NaN with fewer than two."""
    heights = np.asarray(values, dtype=float)
    places = np.arange(len(heights))
    known = np.isfinite(heights)
    if known.sum() < 2:
        return float("nan")
    places, heights = places[known] - places[known].mean(), heights[known]
    return float(places @ heights / (places @ places))
