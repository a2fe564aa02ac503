"""The DUV picture against its formulas and against plain loops."""

import math
from collections import Counter

import numpy as np
import pytest

from rtcwm.data import duv
from rtcwm.errors import UserError

RANDOM = np.random.default_rng(0)


def test_depth_codes_follow_the_log_formula():
    depth = np.array([0.3, 256.0, math.sqrt(0.3 * 256), 3.0, 0.1, 300.0, 0.0, 0.001, 0.0011])
    span = math.log(256) - math.log(0.3)
    middle = [65535, 0, round(65535 / 2), round(65535 * (math.log(256) - math.log(3.0)) / span)]
    assert duv.depth_codes(depth).tolist() == middle + [65535, 0, 0, 0, 65535]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_depth_that_is_no_metre_is_refused(bad):
    with pytest.raises(UserError, match="finite metres >= 0"):
        duv.depth_codes(np.array([1.0, bad]))


def test_blocks_are_reduced_by_median_and_majority():
    codes = RANDOM.integers(0, 65536, (2, 8, 12)).astype(np.uint16)
    ids = RANDOM.integers(0, 12, (2, 8, 12)).astype(np.uint8)
    median, majority = duv.block_median(codes, 2, 4), duv.block_majority(ids, 2, 4)
    for frame in range(2):
        for row in range(2):
            for column in range(4):
                area = (frame, slice(4 * row, 4 * row + 4), slice(3 * column, 3 * column + 3))
                assert median[frame, row, column] == sorted(codes[area].ravel().tolist())[6]
                counts = Counter(ids[area].ravel().tolist())
                assert majority[frame, row, column] == min(counts, key=lambda label: (-counts[label], label))


def test_a_block_never_holds_a_value_between_two_surfaces():
    depth = np.where(np.arange(16).reshape(4, 4) % 2 == 0, 1.0, 100.0)
    red = duv.encode(depth, np.zeros((4, 4), np.uint8), 1, 1)[0, 0, 0]
    ends = {int(value) for value in duv.encode(np.array([[1.0, 100.0]]), np.zeros((1, 2), np.uint8))[0, :, 0]}
    assert int(red) in ends


def test_classes_lie_on_the_grid_green_first():
    ids = np.arange(12, dtype=np.uint8)[None]
    picture = duv.encode(np.full((1, 12), 5.0), ids)
    expected = [((32, 96, 160, 224)[label % 4], (43, 128, 213)[label // 4]) for label in range(12)]
    assert [tuple(pixel) for pixel in picture[0, :, 1:].tolist()] == expected
    assert expected[duv.CLASSES.index("building")] == (160, 128)
    assert duv.decode_ids(picture).tolist() == ids.tolist()


def test_red_is_the_code_in_eight_bits():
    depth = RANDOM.uniform(0.3, 256, (1, 500))
    picture = duv.encode(depth, np.zeros((1, 500), np.uint8))
    exact = 255 * (math.log(256) - np.log(depth)) / (math.log(256) - math.log(0.3))
    assert np.abs(picture[..., 0] - exact).max() <= 0.5 + 255 / 65535
    red = math.log(256) - math.log(0.3)
    step = math.exp(red / 255)  # one code is a factor, so half a code is its root
    seen = picture[..., 0] > 0
    ratio = np.exp(math.log(256) - picture[..., 0][seen] / 255 * red) / depth[seen]
    assert ratio.max() < step**0.51 and ratio.min() > step**-0.51


def test_noisy_colours_decode_within_the_tolerance():
    ids = RANDOM.integers(0, 12, (9, 9)).astype(np.uint8)
    picture = duv.encode(np.full((9, 9), 5.0), ids).astype(int)
    noisy = (picture + RANDOM.integers(-31, 32, picture.shape)).clip(0, 255).astype(np.uint8)
    assert (duv.decode_ids(noisy, tolerance=31) == ids).all()
    with pytest.raises(UserError, match="not DUV"):
        duv.decode_ids(noisy)


def test_another_palette_is_refused_by_name():
    picture = np.zeros((2, 2, 3), np.uint8)
    picture[..., 1:] = 255
    with pytest.raises(UserError, match=r"duv\.mp4 is not DUV: 4 of 4 .*\(255, 255\)"):
        duv.decode_ids(picture, name="duv.mp4")


def test_bad_conditions_are_refused():
    with pytest.raises(UserError, match="ids run from 3 to 12"):
        duv.encode(np.ones((1, 2)), np.array([[3, 12]], np.uint8))
    with pytest.raises(UserError, match="two views of one picture"):
        duv.encode(np.ones((2, 2)), np.ones((2, 3), np.uint8))
    with pytest.raises(UserError, match="whole blocks of a 4x3 proxy"):
        duv.encode(np.ones((8, 8)), np.ones((8, 8), np.uint8), 3, 4)
