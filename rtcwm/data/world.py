"""The embedded world: procedural, seeded scenes without end, seen from a flying camera.

It stands in for recorded clips wherever rtcwm has to show that training works: the frames that a first picture and a
proxy ask for are known, so a stream's error is a number for any length. Hence the rule of the scene: **what comes into
view later follows from what was seen before**. A class has one colour; light and the two ground colours belong to the
episode and are visible in the first frame; the ground is a checker whose cells are tied to a grid of roads, and roads
have a class of their own, so that the proxy of flat ground gives the camera's path away.

The plane is cut into blocks of 10 m, each furnished from a hash of (episode, block). Every solid moves on
`base + swing * (sin, -, cos)(rate t + phase)`; swing 0 stands still, (r, r) walks a circle, (r, 0) drives up and
down a road. The camera flies above everything (solids end at 3.5 m), so it never needs to avoid anything.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rtcwm.data import duv
from rtcwm.data.raycast import VIEW_HALF_WIDTH, Hits, Pose, Solids, cast
from rtcwm.errors import UserError
from rtcwm.model.layout import CLIP_FRAMES, FPS

VERSION = 1  # raised when the same seed starts to give other frames

BLOCK = 10.0  # metres, period of the roads
CELL = 2.5  # metres, checker cell and road width: four cells a block keep the checker's phase from block to block
WATER_SHARE = 0.15  # of the blocks
VIEW_METRES = 34.0  # where haze has swallowed everything
GROUND_REACH = 120.0  # metres; ground beyond is sky
NEIGHBOURS = 5  # blocks furnished on each side of the camera's: 50 m and more, past the haze
AMBIENT, SUN = 0.55, 0.45  # share of light without and with a direction

ALBEDO = np.array(
    [
        (0.0, 0.0, 0.0),
        (0.0, 0.0, 0.0),
        (0.16, 0.34, 0.52),
        (0.0, 0.0, 0.0),
        (0.36, 0.36, 0.38),
        (0.18, 0.50, 0.16),
        (0.72, 0.62, 0.52),
        (0.78, 0.74, 0.22),
        (0.82, 0.36, 0.30),
        (0.48, 0.30, 0.14),
        (0.28, 0.28, 0.74),
        (0.80, 0.48, 0.80),
    ],
    dtype=np.float32,
)  # by class; void, sky and terrain take the episode's colours
SKY, WATER, TERRAIN, ROAD, VEGETATION, BUILDING, INFRASTRUCTURE, HUMAN, ANIMAL, VEHICLE, PROP = range(1, 12)


@dataclass(frozen=True)
class Frames:
    """Rendered frames: rgb uint8 `[F, H, W, 3]`, depth float32 `[F, H, W]` metres (0: sky), ids uint8
    `[F, H, W]`."""

    rgb: np.ndarray
    depth: np.ndarray
    ids: np.ndarray


def proxy_size(height: int, width: int) -> tuple[int, int]:
    """Height and width of the proxy in pixels: a quarter of the picture's, rounded to a multiple of 16 (halves up), at
    least 16.

    Raises:
        UserError: the picture's sides are not multiples of 32 (a latent patch covers 32 pixels).
    """
    if height < 32 or width < 32 or height % 32 or width % 32:
        raise UserError(f"a picture of {width}x{height} was asked for; height and width must be multiples of 32")
    return tuple(max(1, (side // 4 + 8) // 16) * 16 for side in (height, width))


def hashed(seed: int, x: np.ndarray, z: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each block (x, z) of an episode: 32-bit integer mixing, the same on every machine."""
    value = x.astype(np.int64).astype(np.uint32) * np.uint32(0x9E3779B1)
    value ^= z.astype(np.int64).astype(np.uint32) * np.uint32(0x85EBCA77)
    value ^= np.uint32(seed)
    for factor in (0x7FEB352D, 0x846CA68B):
        value = (value ^ (value >> np.uint32(15))) * np.uint32(factor)
    return (value ^ (value >> np.uint32(16))) / 2.0**32


class Scene:
    """What the clips of one episode share: light, ground colours and everything that stands on the plane."""

    def __init__(self, seed: int) -> None:
        """`seed` >= 0 names the episode."""
        self.seed = seed
        generator = np.random.default_rng([seed, 1])
        self.light = generator.uniform(0.75, 1.1, 3).astype(np.float32)
        base, step = generator.uniform(0.32, 0.62, 3), generator.uniform(0.08, 0.16, 3) * generator.choice([-1, 1])
        self.ground = np.stack([base - step, base + step]).astype(np.float32)
        self.albedo = np.stack([ALBEDO, ALBEDO], axis=1)  # [class, alternative, 3]
        self.albedo[TERRAIN] = self.ground
        self.albedo[BUILDING, 1] *= np.float32(0.8)  # every other metre of a wall
        azimuth = generator.uniform(0, 2 * np.pi)
        self.sun = np.array([0.6 * np.sin(azimuth), 0.8, 0.6 * np.cos(azimuth)], dtype=np.float32)
        self.horizon = np.array([0.76, 0.80, 0.84], dtype=np.float32) * self.light
        self.far_ground = (0.6 * self.ground.mean(axis=0) + 0.4 * ALBEDO[ROAD]).astype(np.float32)
        self.zenith = np.array([0.36, 0.54, 0.82], dtype=np.float32) * self.light
        self._near = lru_cache(maxsize=64)(self._furniture_near)

    def furnish(self, x: int, z: int) -> list[tuple]:
        """Solids of block (x, z): (base [3], half [3], swing [2], rate, phase, ball, label), metres and radians/s."""
        generator = np.random.default_rng([self.seed, 2, x % 2**32, z % 2**32])
        solids = []

        def put(
            label: int,
            ball: bool,
            half: tuple[float, float, float],
            swing: tuple[float, float] = (0.0, 0.0),
            at: tuple[float, float] | None = None,
            rate: float = 0.0,
        ) -> None:
            low, high = CELL + 0.4, BLOCK - 0.4
            reach = np.array([half[0] + swing[0], half[2] + swing[1]])
            spot = np.array(at) if at else generator.uniform(low + reach, np.maximum(low + reach, high - reach))
            base = np.array([x * BLOCK + spot[0], half[1], z * BLOCK + spot[1]])
            solids.append((base, np.array(half), swing, rate, generator.uniform(0, 2 * np.pi), ball, label))

        kind = generator.uniform()
        if self.is_water(np.array([x]), np.array([z]))[0]:
            pass
        elif kind < 0.3:
            put(
                BUILDING,
                False,
                (generator.uniform(1.2, 2.2), generator.uniform(1.0, 1.75), generator.uniform(1.2, 2.2)),
            )
        elif kind < 0.55:
            for _ in range(int(generator.integers(2, 4))):
                radius = generator.uniform(0.7, 1.3)
                put(VEGETATION, True, (radius, radius, radius))
        elif kind < 0.75:
            put(INFRASTRUCTURE, False, (0.3, 1.6, 0.3))
            put(PROP, False, (0.5, 0.5, 0.5))
        else:
            put(ANIMAL, True, (0.55, 0.5, 0.55), (1.5, 1.5), rate=generator.uniform(0.4, 0.9))
        if generator.uniform() < 0.35 and not self.is_water(np.array([x]), np.array([z]))[0]:
            put(HUMAN, True, (0.4, 0.9, 0.4), (2.4, 2.4), rate=generator.choice([-1, 1]) * generator.uniform(0.3, 0.6))
        if generator.uniform() < 0.4:
            rate = generator.uniform(0.5, 0.9)
            if generator.uniform() < 0.5:
                put(VEHICLE, False, (1.2, 0.6, 0.65), (3.5, 0.0), (BLOCK / 2, CELL / 2), rate)
            else:
                put(VEHICLE, False, (0.65, 0.6, 1.2), (0.0, 3.5), (CELL / 2, BLOCK / 2), rate)
        return solids

    def is_water(self, x: np.ndarray, z: np.ndarray) -> np.ndarray:
        """Whether the inner square of blocks (x, z) is a pond."""
        return hashed(self.seed, x, z) < WATER_SHARE

    def _furniture_near(self, x: int, z: int) -> tuple[np.ndarray, ...]:
        """Solids of all blocks around (x, z), one array a field."""
        around = range(-NEIGHBOURS, NEIGHBOURS + 1)
        found = [solid for dx in around for dz in around for solid in self.furnish(x + dx, z + dz)]
        return tuple(np.array([solid[field] for solid in found]) for field in range(7))

    def solids(self, pose: Pose) -> Solids:
        """Solids around the camera at its time."""
        block = np.floor(pose.position[[0, 2]] / BLOCK).astype(int)
        base, half, swing, rate, phase, ball, label = self._near(int(block[0]), int(block[1]))
        angle = rate * pose.time + phase
        centre = base.copy()
        centre[:, 0] += swing[:, 0] * np.sin(angle)
        centre[:, 2] += swing[:, 1] * np.cos(angle)
        close = (centre - pose.position) @ pose.axes()[2] < VIEW_METRES
        return Solids(centre[close], half[close], ball[close], label[close])

    def look(self, pose: Pose, height: int, width: int, aspect: float) -> tuple[Hits, np.ndarray]:
        """First hits of one frame and their class ids `[H, W]`.

        Roads and ponds end with the haze: farther ground is terrain, so that a proxy pixel that covers several
        blocks shows no random pick of them.
        """
        hits = cast(pose, self.solids(pose), height, width, aspect, GROUND_REACH)
        x, _, z = hits.points()
        block_x, block_z = np.floor(x / BLOCK), np.floor(z / BLOCK)
        road = (x - block_x * BLOCK < CELL) | (z - block_z * BLOCK < CELL)
        near = np.where(road, ROAD, np.where(self.is_water(block_x, block_z), WATER, TERRAIN))
        ids = np.where(hits.depth < VIEW_METRES, near, np.where(np.isinf(hits.depth), SKY, TERRAIN))
        if len(hits.solids.label):
            ids = np.where(hits.solid >= 0, hits.solids.label[hits.solid], ids)
        return hits, ids.astype(np.uint8)

    def shade(self, hits: Hits, ids: np.ndarray, aspect: float) -> np.ndarray:
        """Colours of the hits, uint8 `[H, W, 3]`: albedo x light x (ambient + sun), then haze by depth.

        Far ground: one pixel covers more than a cell (depth^2 x pixel angle / height of the eye), so the pattern fades
        into its mean instead of flickering.
        """
        x, y, z = hits.points()
        cell = (np.floor(x / CELL) + np.floor(z / CELL)).astype(np.int64) % 2
        storey = y.astype(np.int64) % 2
        albedo = self.albedo[ids, np.where(ids == TERRAIN, cell, storey * (ids == BUILDING))]
        sky = ids == SKY
        depth = np.where(sky, np.float32(0), hits.depth)
        pixel = 2 * VIEW_HALF_WIDTH * aspect / ids.shape[0]
        footprint = depth**2 * np.float32(pixel / hits.origin[1])
        sharp = np.where(hits.solid >= 0, np.float32(1), np.clip(1.6 - 1.2 / CELL * footprint, 0, 1))[..., None]
        lit = AMBIENT + SUN * np.maximum(hits.facing(self.sun), 0)
        colour = (self.far_ground + sharp * (albedo - self.far_ground)) * self.light * lit[..., None]
        haze = np.clip(depth / VIEW_METRES, 0, 1)
        colour += (haze * np.sqrt(haze))[..., None] * (self.horizon - colour)
        rise = np.clip(2.5 * hits.rays[1], 0, 1)[..., None]
        colour = np.where(sky[..., None], self.horizon + rise * (self.zenith - self.horizon), colour)
        return np.rint(np.clip(colour, 0, 1) * 255).astype(np.uint8)


def camera_path(seed: list[int], frames: int) -> list[Pose]:
    """The first `frames` poses of the seeded flight; a longer flight begins with the same poses."""
    generator = np.random.default_rng(seed)
    start = generator.uniform(-200, 200, 2)
    heading = generator.uniform(0, 2 * np.pi)
    sway, rate, phase = generator.uniform(0.15, 0.35, 3), generator.uniform(0.2, 0.5, 3), generator.uniform(0, 6.28, 3)
    drift = generator.uniform(-0.05, 0.05)
    seconds = np.arange(frames) / FPS
    yaw = heading + drift * seconds + (sway * np.sin(rate * seconds[:, None] + phase)).sum(axis=1)
    speed = 2.2 + 0.8 * np.sin(0.4 * seconds + phase[0])
    step = np.stack([np.sin(yaw), np.cos(yaw)], axis=1) * speed[:, None] / FPS
    place = start + np.cumsum(step, axis=0) - step[:1]
    eye = 5.2 + 0.4 * np.sin(0.5 * seconds + phase[1])
    pitch = 0.34 + 0.04 * np.sin(0.6 * seconds + phase[2])
    return [
        Pose(np.array([x, y, z]), float(turn), float(tilt), float(time))
        for (x, z), y, turn, tilt, time in zip(place, eye, yaw, pitch, seconds, strict=True)
    ]


class Film:
    """One clip of the world: an episode's scene along one flight, rendered chunk by chunk.

    Deterministic in (seed, episode, window): windows of an episode share the scene and fly different paths.
    """

    def __init__(self, seed: int, episode: int, window: int, height: int = 128, width: int = 192) -> None:
        """Sizes in pixels.

        Raises:
            UserError: see :func:`proxy_size`.
        """
        self.height, self.width = height, width
        self.proxy_height, self.proxy_width = proxy_size(height, width)
        self.aspect = height / width
        self.scene = Scene(int(np.random.SeedSequence([seed, episode]).generate_state(1)[0]))
        self._path_seed = [seed, episode, window, 3]

    def poses(self, first: int, count: int) -> list[Pose]:
        """Cameras of frames `first` .. `first + count - 1`."""
        return camera_path(self._path_seed, first + count)[first:]

    def render(self, first: int, count: int) -> tuple[Frames, np.ndarray]:
        """Frames and their proxy.

        Conditions are cast at four times the proxy's size and reduced by blocks; at the sizes where that is the
        picture's own size (192x128, 1344x768) one cast serves both.

        Returns:
            Frames of the picture's size and the DUV picture, uint8 `[F, proxy height, proxy width, 3]`.
        """
        picture, condition = (self.height, self.width), (4 * self.proxy_height, 4 * self.proxy_width)
        rgb, seen, conditions = [], [], []
        for pose in self.poses(first, count):
            hits, ids = self.scene.look(pose, *picture, self.aspect)
            rgb.append(self.scene.shade(hits, ids, self.aspect))
            seen.append((hits.depth, ids))
            if condition != picture:
                hits, ids = self.scene.look(pose, *condition, self.aspect)
            conditions.append((hits.depth, ids))
        depth, ids = stacked(conditions)
        return Frames(np.stack(rgb), *stacked(seen)), duv.encode(depth, ids, self.proxy_height, self.proxy_width)

    def chunk(self, index: int) -> tuple[Frames, np.ndarray]:
        """The 17 frames of chunk `index` and their proxy."""
        return self.render(index * CLIP_FRAMES, CLIP_FRAMES)


def stacked(pictures: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Depth and ids of several frames, each `[F, H, W]`; sky (inf) becomes 0, as a depth pass writes it."""
    depth, ids = (np.stack(part) for part in zip(*pictures, strict=True))
    return np.where(np.isinf(depth), np.float32(0), depth), ids
