"""What the flags of `rtcwm clips` default to, apart from the work, which brings PyTorch along."""

import math
from dataclasses import dataclass

from rtcwm.errors import UserError

EPISODE = r"(.*clip_\d{6})_\d+"
"""Names of published clips: windows of one episode differ in what follows."""


@dataclass(frozen=True)
class Limits:
    """From where on a chunk is flagged, and a clip's statistics are a fault.

    Attributes:
        dark: detail of the video below this; empty_proxy: detail of the proxy below this.
        static: motion below this; cut: alike below this.
        rms_low, rms_high: root mean square of a clip's normalised video and proxy; proxies get to twice `rms_high`.
        mean_high: mean of any channel of the video (a proxy's few colours may lie anywhere).
    """

    dark: float = 0.08
    static: float = 0.05
    cut: float = 0.2
    empty_proxy: float = 0.05
    rms_low: float = 0.3
    rms_high: float = 3.0
    mean_high: float = 3.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not math.isfinite(value) or value < 0:
                raise UserError(f"--{name} {value}: expected a number of 0 or more")
