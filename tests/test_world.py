"""The embedded world against a ray tracer of scalars and against what its seed promises."""

import math

import numpy as np
import pytest

from rtcwm.data import duv
from rtcwm.data.raycast import Pose, Solids, cast, hit_ball, hit_box
from rtcwm.data.world import BLOCK, CELL, VIEW_METRES, Film, hashed, proxy_size
from rtcwm.errors import UserError


def ray_of(pose: Pose, row: int, column: int, height: int, width: int) -> list[float]:
    """World direction of a pixel's ray, length 1 along the optical axis, by two plane rotations."""
    right = ((column + 0.5) / width * 2 - 1) * 0.7
    up = (1 - (row + 0.5) / height * 2) * 0.7 * height / width
    level = math.cos(pose.pitch) + up * math.sin(pose.pitch)  # the pitch turns (up, forward) ...
    rise = up * math.cos(pose.pitch) - math.sin(pose.pitch)
    return [
        right * math.cos(pose.yaw) + level * math.sin(pose.yaw),  # ... and the yaw (right, level)
        rise,
        level * math.cos(pose.yaw) - right * math.sin(pose.yaw),
    ]


def first_hit(origin: list[float], ray: list[float], solids: Solids) -> tuple[float, int]:
    """Depth and class by testing every solid: roots of the ellipsoid's quadratic, the six faces of a box, the plane."""
    best, label = (-origin[1] / ray[1], 3) if ray[1] < 0 else (math.inf, 1)
    if best > 120:
        best, label = math.inf, 1
    for centre, half, ball, name in zip(solids.centre, solids.half, solids.ball, solids.label, strict=True):
        away = [o - c for o, c in zip(origin, centre, strict=True)]
        found = []
        if ball:
            a = sum((d / h) ** 2 for d, h in zip(ray, half, strict=True))
            b = sum(2 * d * o / h**2 for d, o, h in zip(ray, away, half, strict=True))
            c = sum((o / h) ** 2 for o, h in zip(away, half, strict=True)) - 1
            if b * b > 4 * a * c:
                found.append((-b - math.sqrt(b * b - 4 * a * c)) / (2 * a))
        else:
            for axis in range(3):
                for side in (-1, 1):
                    depth = (side * half[axis] - away[axis]) / ray[axis]
                    others = [k for k in range(3) if k != axis]
                    if all(abs(away[k] + depth * ray[k]) <= half[k] for k in others):
                        found.append(depth)
        found = [depth for depth in found if depth > 0.05]
        if found and min(found) < best:
            best, label = min(found), int(name)
    return best, label


def ground_label(film: Film, x: float, z: float, depth: float) -> int:
    if depth >= VIEW_METRES:
        return 3
    if x % BLOCK < CELL or z % BLOCK < CELL:
        return 4
    block = np.array([math.floor(x / BLOCK)]), np.array([math.floor(z / BLOCK)])
    return 2 if hashed(film.scene.seed, *block)[0] < 0.15 else 3


def test_pixels_hit_what_a_scalar_ray_tracer_hits():
    film = Film(5, 0, 0, 64, 96)
    frames, _ = film.render(40, 1)
    pose = film.poses(40, 1)[0]
    solids = film.scene.solids(pose)
    classes = set()
    wrong = []
    for row in range(0, 64, 3):
        for column in range(0, 96, 5):
            ray = ray_of(pose, row, column, 64, 96)
            depth, label = first_hit(pose.position.tolist(), ray, solids)
            if label == 3:
                x, z = pose.position[0] + depth * ray[0], pose.position[2] + depth * ray[2]
                label = ground_label(film, x, z, depth)
            classes.add(label)
            expected = 0.0 if label == 1 else depth
            same = frames.ids[0, row, column] == label
            if not same or not math.isclose(frames.depth[0, row, column], expected, rel_tol=1e-3, abs_tol=1e-6):
                wrong.append((row, column))
    assert len(classes) >= 6
    assert len(wrong) <= 2  # of 440: float32 may put a ray on the other side of an edge


def test_a_ball_ahead_has_its_depth_and_its_outline():
    pose = Pose(np.array([0.0, 5.0, 0.0]), 0.0, 0.0, 0.0)
    ball = Solids(np.array([[0.0, 5.0, 10.0]]), np.full((1, 3), 2.0), np.array([True]), np.array([9]))
    hits = cast(pose, ball, 129, 193, 129 / 193, 120)
    assert hits.depth[64, 96] == pytest.approx(8.0, rel=1e-6)
    # A ball of radius r at distance d shows as a disc of radius r / sqrt(d^2 - r^2) on the picture plane.
    radius = 2 / math.sqrt(96) / 0.7 * 193 / 2
    assert (hits.solid == 0).sum() == pytest.approx(math.pi * radius**2, rel=0.02)
    sun = np.array([0.0, 0.0, -1.0], np.float32)
    assert hits.facing(sun)[64, 96] == pytest.approx(1, abs=1e-4)


def test_the_nearer_of_two_boxes_hides_the_other():
    pose = Pose(np.array([0.0, 5.0, 0.0]), 0.0, 0.0, 0.0)
    boxes = Solids(
        np.array([[0.0, 5.0, 20.0], [0.0, 5.0, 9.0]]), np.ones((2, 3)), np.array([False, False]), np.array([6, 10])
    )
    for order in ([0, 1], [1, 0]):
        hits = cast(pose, Solids(*(getattr(boxes, name)[order] for name in vars(boxes))), 65, 97, 65 / 97, 120)
        assert hits.solids.label[hits.solid[32, 48]] == 10
        assert hits.depth[32, 48] == pytest.approx(8.0, rel=1e-6)


def test_casting_in_rectangles_misses_nothing():
    """Against every solid cast over the whole picture, from random cameras; solids at and across borders included."""
    random = np.random.default_rng(2)
    for _ in range(40):
        pose = Pose(random.uniform(-1, 1, 3) + [0, 5, 0], random.uniform(0, 6.28), random.uniform(-0.3, 0.6), 0.0)
        centre = pose.position + random.uniform(-6, 6, (12, 3))
        solids = Solids(centre, random.uniform(0.2, 1.5, (12, 3)), random.uniform(size=12) < 0.5, np.full(12, 6))
        hits = cast(pose, solids, 33, 49, 33 / 49, 120)
        depths = [cast(pose, Solids(*(value[:0] for value in vars(solids).values())), 33, 49, 33 / 49, 120).depth]
        for index in range(12):
            if solids.ball[index]:
                depths.append(hit_ball(pose.position, hits.rays, centre[index], solids.half[index]))
            else:
                with np.errstate(divide="ignore"):
                    depths.append(hit_box(pose.position, 1 / hits.rays, centre[index], solids.half[index]))
        depths = np.stack(depths)
        np.testing.assert_allclose(hits.depth, depths.min(axis=0), rtol=1e-5)
        assert (hits.solid == depths.argmin(axis=0) - 1).mean() > 0.999  # but for ties of float32


def test_box_faces_turn_to_the_sun():
    pose = Pose(np.array([0.0, 3.0, 0.0]), math.pi / 4, 0.3, 0.0)
    box = Solids(np.array([[4.0, 1.0, 4.0]]), np.ones((1, 3)), np.array([False]), np.array([6]))
    hits = cast(pose, box, 96, 96, 1.0, 120)
    sun = np.array([-0.48, 0.6, -0.64], np.float32)
    x, y, z = hits.points()
    faces = {0.6: np.isclose(y, 2, atol=1e-4), 0.48: np.isclose(x, 3, atol=1e-4), 0.64: np.isclose(z, 3, atol=1e-4)}
    cosine = hits.facing(sun)
    for expected, face in faces.items():
        inside = face & (hits.solid == 0) & (sum(other.astype(int) for other in faces.values()) == 1)
        assert inside.sum() > 50
        np.testing.assert_allclose(cosine[inside], expected, atol=1e-5)
    assert np.allclose(cosine[hits.solid < 0], 0.6)


def test_a_seed_gives_the_same_frames_at_any_place_of_any_length():
    film, again = Film(1, 2, 3, 64, 64), Film(1, 2, 3, 64, 64)
    frames, proxy = film.render(0, 20)
    later, later_proxy = again.render(17, 3)
    assert (frames.rgb[17:] == later.rgb).all() and (proxy[17:] == later_proxy).all()
    assert (frames.depth[17:] == later.depth).all() and (frames.ids[17:] == later.ids).all()
    chunk, _ = again.chunk(1)
    assert (chunk.rgb[:3] == later.rgb).all() and len(chunk.rgb) == 17


def test_windows_of_an_episode_share_the_scene_and_not_the_flight():
    one, two, other = Film(1, 0, 0), Film(1, 0, 1), Film(1, 1, 0)
    assert one.scene.seed == two.scene.seed != other.scene.seed
    assert (one.scene.albedo == two.scene.albedo).all() and (one.scene.light == two.scene.light).all()
    assert (one.scene.light != other.scene.light).all()
    assert (one.poses(0, 1)[0].position != two.poses(0, 1)[0].position).any()


def test_colours_of_near_surfaces_do_not_depend_on_the_place():
    """What is seen later follows from frame one: without haze and shade, every surface has its class's colour."""
    scene = Film(4, 0, 0).scene
    film = Film(4, 0, 0, 64, 96)
    for frame in (0, 200):
        hits, ids = scene.look(film.poses(frame, 1)[0], 64, 96, film.aspect)
        near = (hits.solid < 0) & (hits.depth < 10) & (hits.depth > 0)
        sure = near & (ids == 3)
        colours = scene.shade(hits, ids, film.aspect)[sure].astype(float) / 255
        haze = (np.clip(hits.depth[sure] / VIEW_METRES, 0, 1) ** 1.5)[:, None]
        bare = (colours - haze * scene.horizon) / (1 - haze) / (scene.light * (0.55 + 0.45 * 0.8))
        x, _, z = hits.points()
        dark = (np.floor(x[sure] / 2.5) + np.floor(z[sure] / 2.5)) % 2 == 0
        assert sure.sum() > 50 and 0 < dark.mean() < 1
        np.testing.assert_allclose(bare, np.where(dark[:, None], scene.ground[0], scene.ground[1]), atol=0.01)


def test_solids_move_as_the_formula_says_and_the_camera_moves_and_turns():
    film = Film(0, 0, 0)
    poses = film.poses(0, 48)
    still = Pose(poses[0].position, poses[0].yaw, poses[0].pitch, 2.0)
    block = [int(value // BLOCK) for value in poses[0].position[[0, 2]]]
    base, _, swing, rate, phase, _, _ = film.scene._near(*block)
    moving = np.flatnonzero(rate)
    assert len(moving) > 10
    seen = film.scene.solids(still).centre
    found = 0
    for index in moving:
        angle = rate[index] * 2.0 + phase[index]
        x, z = base[index, 0] + swing[index, 0] * math.sin(angle), base[index, 2] + swing[index, 1] * math.cos(angle)
        found += bool((np.abs(seen - [x, base[index, 1], z]) < 1e-9).all(axis=1).any())
    assert found > 5  # the others are behind the haze
    steps = np.linalg.norm(np.diff([pose.position[[0, 2]] for pose in poses], axis=0), axis=1) * 24
    assert 1.3 < steps.min() and steps.max() < 3.1  # metres a second
    assert abs(poses[-1].yaw - poses[0].yaw) > 0.01


def test_the_default_proxy_is_the_reduction_of_the_picture_own_conditions():
    frames, proxy = Film(2, 0, 0).render(3, 2)
    assert frames.rgb.shape == (2, 128, 192, 3) and proxy.shape == (2, 32, 48, 3)
    assert (duv.decode_ids(proxy) == duv.block_majority(frames.ids, 32, 48)).all()
    assert (duv.encode(frames.depth, frames.ids, 32, 48) == proxy).all()
    assert set(np.unique(frames.ids)) >= {1, 3, 4}


def test_proxy_of_other_sizes():
    assert proxy_size(128, 192) == (32, 48) and proxy_size(768, 1344) == (192, 336)
    assert proxy_size(32, 64) == (16, 16) and proxy_size(96, 160) == (32, 48)
    assert Film(0, 0, 0, 96, 160).render(0, 1)[1].shape == (1, 32, 48, 3)
    for size in ((100, 192), (128, 16), (0, 32)):
        with pytest.raises(UserError, match="multiples of 32"):
            proxy_size(*size)
