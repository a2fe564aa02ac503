"""Ray casting of one frame of the embedded world: a ground plane, axis-aligned boxes and ellipsoids ("balls").

Rays have unit length along the optical axis, so the ray parameter of a hit is the metric depth that a renderer's depth
pass gives. The ground is cast over the whole picture; each solid only over the rectangle that its bounding ball can
cover, which is what makes a frame cost a few milliseconds.
"""

from dataclasses import dataclass

import numpy as np

VIEW_HALF_WIDTH = 0.7  # tangent of half the horizontal field of view (70 degrees)
NEAREST = 0.05  # metres; hits nearer than this are behind or inside the camera


@dataclass(frozen=True)
class Pose:
    """Camera of one frame: position `[3]` in metres (y up), yaw and downward pitch in radians, time in seconds."""

    position: np.ndarray
    yaw: float
    pitch: float
    time: float

    def axes(self) -> np.ndarray:
        """Rows: the camera's right, up and forward axes in the world, `[3, 3]` float64."""
        sine, cosine = np.sin(self.yaw), np.cos(self.yaw)
        down, level = np.sin(self.pitch), np.cos(self.pitch)
        forward = np.array([sine * level, -down, cosine * level])
        right = np.array([cosine, 0.0, -sine])
        return np.stack([right, np.cross(forward, right), forward])


@dataclass(frozen=True)
class Solids:
    """Solids of one moment: `centre [n, 3]` and `half [n, 3]` in metres, `ball [n]` bool, `label [n]` ids."""

    centre: np.ndarray
    half: np.ndarray
    ball: np.ndarray
    label: np.ndarray


@dataclass(frozen=True)
class Hits:
    """What every pixel sees.

    depth `[H, W]` metres (inf: sky), solid `[H, W]` index into `solids` (-1: ground or sky), origin `[3]` and rays
    `[3, H, W]` in the world, float32.
    """

    depth: np.ndarray
    solid: np.ndarray
    origin: np.ndarray
    rays: np.ndarray
    solids: Solids

    def points(self) -> np.ndarray:
        """World positions of the hits, `[3, H, W]` metres; the camera's own position for the sky."""
        return self.origin[:, None, None] + np.where(np.isinf(self.depth), np.float32(0), self.depth) * self.rays

    def facing(self, sun: np.ndarray) -> np.ndarray:
        """Cosine of the angle between the surface and the direction `sun [3]`, `[H, W]`; the ground's (and the
        sky's) normal is up."""
        cosine = np.full(self.depth.shape, sun[1], dtype=np.float32)
        rows, columns = np.nonzero(self.solid >= 0)
        index = self.solid[rows, columns]
        half = self.solids.half[index].T.astype(np.float32)
        points = self.origin[:, None] + self.depth[rows, columns] * self.rays[:, rows, columns]
        local = (points - self.solids.centre[index].T.astype(np.float32)) / half
        face = np.abs(local).argmax(axis=0) == np.arange(3)[:, None]
        normal = np.where(self.solids.ball[index], local / half, np.sign(local) * face)
        cosine[rows, columns] = sun @ normal / np.sqrt((normal**2).sum(axis=0))
        return cosine


def camera_rays(height: int, width: int, aspect: float) -> np.ndarray:
    """Rays through the pixel centres along the camera's right, up and forward axes, `[3, H, W]` float32, forward = 1.

    `aspect` is the height over the width of the field of view: pictures of several sizes show the same view.
    """
    rays = np.ones((3, height, width), dtype=np.float32)
    rays[0] = ((np.arange(width) + 0.5) / width * 2 - 1) * VIEW_HALF_WIDTH
    rays[1] = ((1 - (np.arange(height) + 0.5) / height * 2) * VIEW_HALF_WIDTH * aspect)[:, None]
    return rays


def rectangle(centre: np.ndarray, radius: float, height: int, width: int, aspect: float) -> tuple[slice, slice] | None:
    """Rows and columns that a ball can cover; None when it is out of view.

    `centre` is in camera axes. The bound takes the nearest and the farthest depth of the ball for each side, which
    is never too small.
    """
    x, y, z = centre
    near, far = z - radius, z + radius
    if far < NEAREST:
        return None
    if near < NEAREST:
        return slice(0, height), slice(0, width)
    left, right = min((x - radius) / near, (x - radius) / far), max((x + radius) / near, (x + radius) / far)
    low, high = min((y - radius) / near, (y - radius) / far), max((y + radius) / near, (y + radius) / far)
    half_width, half_height = VIEW_HALF_WIDTH, VIEW_HALF_WIDTH * aspect
    first_column = max(0, int(np.floor((left / half_width + 1) / 2 * width - 1)))
    last_column = min(width, int(np.ceil((right / half_width + 1) / 2 * width + 1)))
    first_row = max(0, int(np.floor((1 - high / half_height) / 2 * height - 1)))
    last_row = min(height, int(np.ceil((1 - low / half_height) / 2 * height + 1)))
    if first_column >= last_column or first_row >= last_row:
        return None
    return slice(first_row, last_row), slice(first_column, last_column)


def hit_ball(origin: np.ndarray, rays: np.ndarray, centre: np.ndarray, half: np.ndarray) -> np.ndarray:
    """Depth of the first hit of an ellipsoid for rays `[3, ...]`; inf where there is none."""
    start = (origin - centre) / half
    steps = [rays[axis] * np.float32(1 / half[axis]) for axis in range(3)]
    a = steps[0] ** 2 + steps[1] ** 2 + steps[2] ** 2
    b = sum(steps[axis] * np.float32(start[axis]) for axis in range(3))
    under = b * b - a * np.float32(start @ start - 1)
    depth = (-b - np.sqrt(np.maximum(under, 0))) / a
    return np.where((under > 0) & (depth > NEAREST), depth, np.float32(np.inf))


def hit_box(origin: np.ndarray, inverse: np.ndarray, centre: np.ndarray, half: np.ndarray) -> np.ndarray:
    """Depth of the first hit of an axis-aligned box (slab test) for rays with `inverse [3, ...]` = 1 / ray."""
    middle = [inverse[axis] * np.float32(centre[axis] - origin[axis]) for axis in range(3)]
    reach = [np.abs(inverse[axis]) * np.float32(half[axis]) for axis in range(3)]
    enter = np.maximum(np.maximum(middle[0] - reach[0], middle[1] - reach[1]), middle[2] - reach[2])
    leave = np.minimum(np.minimum(middle[0] + reach[0], middle[1] + reach[1]), middle[2] + reach[2])
    return np.where((enter <= leave) & (enter > NEAREST), enter, np.float32(np.inf))


def cast(pose: Pose, solids: Solids, height: int, width: int, aspect: float, ground_reach: float) -> Hits:
    """First hits of all rays of a picture; ground (the plane y = 0) beyond `ground_reach` metres counts as sky."""
    axes = pose.axes()
    rays = np.tensordot(axes.T.astype(np.float32), camera_rays(height, width, aspect), 1)
    inverse = 1 / np.where(np.abs(rays) < 1e-7, np.float32(1e-7), rays)
    depth = -inverse[1] * np.float32(pose.position[1])
    depth[(depth <= 0) | (depth > ground_reach)] = np.inf
    solid = np.full((height, width), -1, dtype=np.int16)
    centres = (solids.centre - pose.position) @ axes.T
    radii = np.linalg.norm(solids.half, axis=1)
    for index in np.flatnonzero(centres[:, 2] + radii > NEAREST):
        area = rectangle(centres[index], radii[index], height, width, aspect)
        if area is None:
            continue
        centre, half = solids.centre[index], solids.half[index]
        if solids.ball[index]:
            found = hit_ball(pose.position, rays[:, *area], centre, half)
        else:
            found = hit_box(pose.position, inverse[:, *area], centre, half)
        closer = found < depth[area]
        depth[area][closer] = found[closer]
        solid[area][closer] = index
    return Hits(depth, solid, pose.position.astype(np.float32), rays, solids)
