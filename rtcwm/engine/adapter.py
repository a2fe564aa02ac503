"""One trainable adapter as a DeepSpeed engine of its own.

Adapter weights are fp32 and whole on every rank (the base's hooks read them); ZeRO-1 or 2 partitions gradients and
moments over all ranks. Student and critic are separate engines: two parameter groups in one engine would decay and move
the other adapter at every step.

The state of an engine is what a step needs, independent of the number of ranks: whole weights, both moments and the
optimizer's step count. It is read and written through DeepSpeed's tensor fragment functions.
"""

from dataclasses import dataclass

import deepspeed
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)

from rtcwm.engine.settings import AdapterSettings
from rtcwm.engine.world import World
from rtcwm.model.lora import Adapter

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Update:
    """What one optimizer step did.

    Attributes:
        grad_norm: global norm before clipping; infinite when the step was skipped.
        skipped: a gradient was not finite anywhere in the world; weights and moments are as before.
    """

    grad_norm: float
    skipped: bool


class AdapterEngine:
    """Trains one adapter. Call ``backward`` once a micro-step, then ``step`` once a step.

    Args:
        adapter: moved to the world's device and broadcast from rank 0.
        settings: its JSON file; lr and the betas' default come from the program.
    """

    def __init__(self, world: World, adapter: Adapter, settings: AdapterSettings):
        self.world = world
        self.accumulation = settings.accumulation
        self.adapter = adapter.to(world.device)
        self.engine = deepspeed.initialize(model=self.adapter, config=settings.deepspeed)[0]
        self._micro_steps = 0
        self._updates = 0

    def backward(self, loss: torch.Tensor) -> None:
        """Adds this micro-step's gradient, a mean over ranks and micro-steps. loss: a scalar with a graph.

        A loss that is not finite poisons the whole gradient, so that no rank steps on a part of it.
        """
        loss = loss * torch.where(torch.isfinite(loss.detach()), 1.0, float("nan"))
        self._micro_steps += 1
        self.engine.set_gradient_accumulation_boundary(self._micro_steps == self.accumulation)
        self.engine.backward(loss)
        if self._micro_steps < self.accumulation:
            self.engine.step()

    def step(self, lr: float) -> Update:
        """Clips and applies the accumulated gradient with this learning rate."""
        if self._micro_steps != self.accumulation:
            raise RuntimeError(f"step after {self._micro_steps} of {self.accumulation} micro-steps")
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        self._micro_steps = 0
        skipped = bool(self.engine.optimizer.overflow)
        self._updates += not skipped
        return Update(float("inf") if skipped else float(self.engine.get_global_grad_norm()), skipped)

    def park(self) -> None:
        """Moves the optimizer's moments to host memory, through DeepSpeed's own state offload; no-op before the first
        step and on the CPU, where they are there already."""
        if self._updates and self.world.device.type != "cpu":
            self.engine.offload_states(include=[OffloadStateTypeEnum.optim_states], pin_memory=True)

    def unpark(self) -> None:
        """Brings parked moments back; to be called before ``step``."""
        if self._updates and self.world.device.type != "cpu":
            self.engine.reload_states()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Weights and moments, fp32, whole, on the CPU of rank 0 (empty elsewhere), and the count of updates; a
        collective."""
        state = {}
        for name, parameter in self.adapter.named_parameters():
            values = {name: safe_get_full_fp32_param(parameter)}
            if self._updates:
                values |= {f"{name}.{key}": safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
            if self.world.is_main:
                state |= {key: value.cpu() for key, value in values.items()}
        if self.world.is_main:
            state["updates"] = torch.tensor(self._updates)
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restores what ``state_dict`` gave on rank 0 (other ranks pass anything), on any number of ranks; a
        collective."""
        self._updates = self.world.on_main(lambda: int(state["updates"]))
        if self._updates:
            self._make_moments()
        for name, parameter in self.adapter.named_parameters():
            value = self._broadcast(state, name, parameter)
            parameter.data.copy_(value)
            safe_set_full_fp32_param(parameter, value)
            if self._updates:
                for key in MOMENTS:
                    value = self._broadcast(state, f"{name}.{key}", parameter)
                    safe_set_full_optimizer_state(parameter, value, key)

    def _broadcast(self, state: dict[str, torch.Tensor], name: str, like: torch.Tensor) -> torch.Tensor:
        value = state[name].to(like.device) if self.world.is_main else torch.empty_like(like)
        torch.distributed.broadcast(value, src=0)
        return value

    def _make_moments(self) -> None:
        """Gives the optimizer the moments that its first step would make, so that they can be filled."""
        zero, optimizer = self.engine.optimizer, self.engine.optimizer.optimizer
        for partition in zero.single_partition_of_fp32_groups:
            optimizer.state[partition] = {"step": torch.tensor(float(self._updates))} | {
                key: torch.zeros_like(partition) for key in MOMENTS
            }
        zero._lazy_init_hp_params_optimizer_state()
