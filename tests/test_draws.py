"""Where the chunks of a rollout stop: the distributions, and what they share."""

import math

import pytest

from rtcwm.engine.streams import Streams
from rtcwm.train.config import DistillConfig
from rtcwm.train.draws import Draws

ITERATIONS = 600


def stops_of(setting: str, seed: int = 1, steps: int = 4) -> list[tuple[int, ...]]:
    config = DistillConfig(out="x", student_lora="y", stops=setting, steps=steps, min_chunks=8, max_chunks=14)
    return [Draws.of(config, Streams(seed), iteration).stops for iteration in range(ITERATIONS)]


@pytest.mark.parametrize("steps", [2, 4])
@pytest.mark.parametrize("setting", ["random", "late", "last"])
def test_shares_of_the_steps(setting, steps):
    """Within five standard deviations of a binomial count, at a fixed seed; chunks of a rollout are independent."""
    drawn = stops_of(setting, steps=steps)
    flat = [stop for stops in drawn for stop in stops]
    random = {"random": 1.0, "late": 0.25, "last": 0.0}[setting]
    for step in range(steps):
        share = random / steps + (1 - random) * (step == steps - 1)
        assert abs(flat.count(step) / len(flat) - share) <= 5 * math.sqrt(share * (1 - share) / len(flat))
    last = random / steps + 1 - random
    both = sum(stops[0] == stops[1] == steps - 1 for stops in drawn) / len(drawn)
    assert abs(both - last**2) <= 5 * math.sqrt(last**2 * (1 - last**2) / len(drawn))


def test_late_stops_are_the_random_ones_moved_to_the_last_step():
    """The same lengths and the same draws, so that two settings differ in nothing else; and every seed has its own."""
    for late, random in zip(stops_of("late"), stops_of("random"), strict=True):
        assert len(late) == len(random) and all(a in (b, 3) for a, b in zip(late, random))
    assert stops_of("late") == stops_of("late") != stops_of("late", seed=2)
