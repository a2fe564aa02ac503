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

    Attributes:
        updates: optimizer steps that were really made, skipped ones left out.

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
        self.updates = 0
        self._parked = False

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
        self.updates += not skipped
        return Update(float("inf") if skipped else float(self.engine.get_global_grad_norm()), skipped)

    def park(self) -> None:
        """Moves the optimizer's moments to host memory, through DeepSpeed's own state offload, until `unpark`. There are
        none before the first update.

        DeepSpeed replaces the moments' tensors in both directions but not the fragments through which a checkpoint
        reads them: those would keep the device memory, and later save the moments of the first update. So the fragments
        are let go here and linked anew in `unpark`.
        """
        if self.updates and not self._parked:
            for parameter in self.adapter.parameters():
                if parameter._hp_mapping is not None:
                    parameter._hp_mapping.optim_fragment = None
            self.engine.offload_states(include=[OffloadStateTypeEnum.optim_states], pin_memory=False)
            self._parked = True

    def unpark(self) -> None:
        """Brings parked moments back; to be called before ``step`` and ``state_dict``."""
        if self._parked:
            self.engine.reload_states()
            self._link_moments()
            self._parked = False

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Weights and moments, fp32, whole, on the CPU of rank 0 (empty elsewhere), and the count of updates; a
        collective. Not while the moments are parked."""
        state = {}
        for name, parameter in self.adapter.named_parameters():
            values = {name: safe_get_full_fp32_param(parameter)}
            if self.updates:
                values |= {f"{name}.{key}": safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
            if self.world.is_main:
                state |= {key: value.cpu() for key, value in values.items()}
        if self.world.is_main:
            state["updates"] = torch.tensor(self.updates)
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restores what ``state_dict`` gave on rank 0 (other ranks pass anything), on any number of ranks; a
        collective."""
        self.updates = self.world.on_main(lambda: int(state["updates"]))
        if self.updates:
            self._make_moments()
        for name, parameter in self.adapter.named_parameters():
            value = self._broadcast(state, name, parameter)
            parameter.data.copy_(value)
            safe_set_full_fp32_param(parameter, value)
            if self.updates:
                for key in MOMENTS:
                    value = self._broadcast(state, f"{name}.{key}", parameter)
                    safe_set_full_optimizer_state(parameter, value, key)

    def _broadcast(self, state: dict[str, torch.Tensor], name: str, like: torch.Tensor) -> torch.Tensor:
        value = state[name].to(like.device) if self.world.is_main else torch.empty_like(like)
        torch.distributed.broadcast(value, src=0)
        return value

    def _make_moments(self) -> None:
        """Gives the optimizer the moments that its first step would make, so that they can be filled."""
        for partition in self.engine.optimizer.single_partition_of_fp32_groups:
            self.engine.optimizer.optimizer.state[partition] = {"step": torch.tensor(float(self.updates))} | {
                key: torch.zeros_like(partition) for key in MOMENTS
            }
        self._link_moments()

    def _link_moments(self) -> None:
        """Makes each parameter's fragment a view of the moments that the optimizer has now, and its step a CPU number
        as torch makes it (a reload moves it to the device)."""
        zero = self.engine.optimizer
        for state in zero.optimizer.state.values():
            state["step"] = state["step"].cpu()
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()
