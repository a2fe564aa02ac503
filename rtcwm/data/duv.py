"""The proxy picture ("DUV"): log depth in red, a semantic class on a 4 x 3 grid in green and blue.

A proxy pixel is a measurement of one surface. Averaging two depths makes a surface that is nowhere, averaging two
colours makes a third class, so pictures are reduced by the block median (depth) and the block majority (class) and
never by interpolation. Other DUV conventions exist (other ranges, dark near, colours shared by classes) and look
alike: :func:`decode_ids` refuses a picture whose colours are not on this grid.

Red: `v = (ln 256 - ln z) / (ln 256 - ln 0.3)`, clipped to 0..1, near bright, as a 16-bit code, then as 8 bits.
No surface (z <= 1 mm) is code 0, which reads as infinitely far.
Green and blue: class `i` is `(GREEN[i % 4], BLUE[i // 4])`; green moves first.
"""

import math

import numpy as np

from rtcwm.errors import UserError

CLASSES = (
    "void",
    "sky",
    "water",
    "terrain",
    "road",
    "vegetation",
    "building",
    "infrastructure",
    "human",
    "animal",
    "vehicle",
    "prop",
)
GREEN = (32, 96, 160, 224)
BLUE = (43, 128, 213)
NEAR_METRES = 0.3
FAR_METRES = 256.0
NO_SURFACE_METRES = 1e-3
LOG_RANGE = math.log(FAR_METRES) - math.log(NEAR_METRES)

PALETTE = np.array([(GREEN[index % 4], BLUE[index // 4]) for index in range(len(CLASSES))], dtype=np.uint8)


def depth_codes(depth: np.ndarray) -> np.ndarray:
    """16-bit log codes of a metric depth map.

    Args:
        depth: metres along the optical axis, any shape; values <= 1 mm mean that no surface was hit.

    Returns:
        uint16, same shape: 65535 at 0.3 m and nearer, 0 at 256 m and farther and where there is no surface.

    Raises:
        UserError: a value is negative, infinite or not a number.
    """
    if not np.isfinite(depth).all() or (depth < 0).any():
        raise UserError(
            "depth must be finite metres >= 0 (0 where no surface was hit), found "
            f"{int((~np.isfinite(depth)).sum())} non-finite and {int((depth < 0).sum())} negative values; "
            "write 0 there"
        )
    surface = depth > NO_SURFACE_METRES
    metres = np.where(surface, depth, FAR_METRES).astype(np.float64)
    share = np.clip((math.log(FAR_METRES) - np.log(metres)) / LOG_RANGE, 0.0, 1.0)
    return np.rint(share * 65535.0).astype(np.uint16)


def blocks(values: np.ndarray, height: int, width: int) -> np.ndarray:
    """Cut `[..., H, W]` into `[..., height, width, n]`: the n values of each block of the reduced picture.

    Raises:
        UserError: H or W is not a whole multiple of the reduced size.
    """
    full_height, full_width = values.shape[-2:]
    if full_height % height or full_width % width:
        raise UserError(
            f"a {full_width}x{full_height} condition cannot be cut into whole blocks of a {width}x{height} "
            "proxy: render it at a whole multiple of the proxy's size"
        )
    rows, columns = full_height // height, full_width // width
    cut = values.reshape(*values.shape[:-2], height, rows, width, columns).swapaxes(-3, -2)
    return cut.reshape(*values.shape[:-2], height, width, rows * columns)


def block_median(values: np.ndarray, height: int, width: int) -> np.ndarray:
    """Reduce `[..., H, W]` to `[..., height, width]` by the median of each block.

    Of an even number of values the upper middle one is taken: it is a value that the block holds, where the mean of
    the two middle ones need not be.
    """
    cut = blocks(values, height, width)
    middle = cut.shape[-1] // 2
    return np.partition(cut, middle, axis=-1)[..., middle]


def block_majority(ids: np.ndarray, height: int, width: int) -> np.ndarray:
    """Reduce class ids `[..., H, W]` to `[..., height, width]` by the commonest id of each block, ties to the
    smaller id.

    Raises:
        UserError: an id outside 0..11.
    """
    check_ids(ids)
    cut = blocks(ids, height, width)
    winner = cut[..., 0].copy()
    mixed = (cut != cut[..., :1]).any(axis=-1)
    rows = cut[mixed].astype(np.int64)
    if len(rows):
        flat = rows + np.arange(len(rows))[:, None] * len(CLASSES)
        counts = np.bincount(flat.ravel(), minlength=len(rows) * len(CLASSES)).reshape(len(rows), len(CLASSES))
        winner[mixed] = counts.argmax(axis=1).astype(winner.dtype)
    return winner


def check_ids(ids: np.ndarray) -> None:
    """Raise UserError when a class id is outside 0..11."""
    if ids.size and not (0 <= int(ids.min()) and int(ids.max()) < len(CLASSES)):
        raise UserError(
            f"semantic ids run from {int(ids.min())} to {int(ids.max())}, expected 0..{len(CLASSES) - 1} "
            f"({', '.join(CLASSES)}): map the renderer's classes onto these first"
        )


def encode(depth: np.ndarray, ids: np.ndarray, height: int | None = None, width: int | None = None) -> np.ndarray:
    """The DUV picture of a depth map and a class map.

    Args:
        depth: `[..., H, W]` metres, 0 where there is no surface.
        ids: `[..., H, W]` class ids 0..11.
        height: rows of the picture; H when absent. H must be a multiple of it.
        width: columns of the picture, likewise.

    Returns:
        uint8 `[..., height, width, 3]`.

    Raises:
        UserError: shapes that differ, sizes that do not divide, bad depths or bad ids.
    """
    if depth.shape != ids.shape:
        raise UserError(
            f"depth {depth.shape} and semantic ids {ids.shape} must be two views of one picture: the shapes differ"
        )
    height, width = height or depth.shape[-2], width or depth.shape[-1]
    codes = block_median(depth_codes(depth), height, width)
    grid = PALETTE[block_majority(ids, height, width)]
    red = np.rint(codes / 257.0).astype(np.uint8)  # 257 * 255 = 65535: full scale stays full scale
    return np.concatenate((red[..., None], grid), axis=-1)


def decode_ids(picture: np.ndarray, tolerance: int = 0, name: str = "the proxy picture") -> np.ndarray:
    """Class ids of a DUV picture.

    Args:
        picture: uint8 `[..., 3]`.
        tolerance: largest distance of green and of blue to the grid; 0 for lossless files, up to 31 for decoded
            latents (half the spacing of green).
        name: what the error calls the picture (a path).

    Returns:
        uint8 `[...]`.

    Raises:
        UserError: colours farther from the grid than the tolerance, so that the picture follows another convention.
    """
    (column, off_green), (row, off_blue) = (nearest(levels) for levels in (GREEN, BLUE))
    green, blue = picture[..., 1], picture[..., 2]
    away = np.maximum(off_green[green], off_blue[blue])
    if (away > tolerance).any():
        wrong = picture[away > tolerance]
        colours, counts = np.unique(wrong[:, 1:], axis=0, return_counts=True)
        commonest = tuple(int(value) for value in colours[counts.argmax()])
        raise UserError(
            f"{name} is not DUV: {len(wrong)} of {away.size} pixels lie off the semantic grid by more than "
            f"{tolerance} (the commonest green, blue is {commonest}; expected green in {GREEN}, blue in "
            f"{BLUE}): encode the proxy again from depth and ids, from a lossless source"
        )
    return (column[green] + 4 * row[blue]).astype(np.uint8)


def nearest(levels: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """For each of the 256 values of a channel, the index of the level nearest to it and the distance, uint8 `[256]`."""
    distance = np.abs(np.arange(256)[:, None] - np.array(levels))
    return distance.argmin(axis=1).astype(np.uint8), distance.min(axis=1).astype(np.uint8)
