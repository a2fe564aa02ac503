"""A running mean of an adapter's weights, kept beside training: one copy, fp32, in the host memory of rank 0."""

import torch

from rtcwm.engine.world import World
from rtcwm.model.lora import Adapter


class Average:
    """The exponential moving mean of an adapter that an engine trains.

    After update k (from 1) ``mean = d mean + (1 - d) weights`` with ``d = min(decay, k / (k + 9))``, so that a short
    run is not a mean over its starting point. Resumed runs continue it.

    Attributes:
        adapter: the mean as an adapter of its own; on rank 0 alone, None elsewhere.

    Args:
        adapter: the trained adapter, whole on every rank.
    """

    def __init__(self, world: World, adapter: Adapter, decay: float):
        self.world, self.source, self.decay = world, adapter, decay
        self.adapter = None
        if world.is_main:
            self.adapter = Adapter(adapter.shape).requires_grad_(False)
            self.adapter.load_state_dict(adapter.state_dict())

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Takes in the weights after the engine's update number ``updates``, from 1."""
        if self.adapter is None:
            return
        decay = min(self.decay, updates / (updates + 9))
        for mean, weights in zip(self.adapter.parameters(), self.source.parameters(), strict=True):
            mean.lerp_(weights.detach().to(mean.device), 1 - decay)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The mean on rank 0, empty elsewhere."""
        return dict(self.adapter.state_dict()) if self.adapter else {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restores what ``state_dict`` gave on rank 0."""
        if self.adapter:
            self.adapter.load_state_dict(state)
