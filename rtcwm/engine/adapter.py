"""One trainable adapter as a DeepSpeed engine of its own.

Adapter weights are fp32 and whole on every rank (the base's hooks read them); ZeRO-1 or 2 partitions gradients and
moments over all ranks. Student and critic are separate engines: two parameter groups in one engine would decay and move
the other adapter at every step.

A card holds of an adapter with n weights, on N ranks: 4n bytes of weights, 4n of gradients (in ZeRO-2 4n / N once they
are averaged), and 8n / N of moments, which may stay in host memory but for the optimizer's step: both ways they take
less time than a step on the CPU takes to read and write everything, by the ratio of the memories' speeds.

The state of an engine is what a step needs, independent of the number of ranks: whole weights, both moments and the
optimizer's step count. It is read and written through DeepSpeed's tensor fragment functions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)

from rtcwm.engine.copies import HostMemory, Stored
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
        self.park_moments = settings.park_moments
        self.engine = deepspeed.initialize(model=self.adapter, config=settings.deepspeed)[0]
        self._share_weights()
        self._host = HostMemory(pinned=world.device.type != "cpu")
        self._parked: list[tuple[dict, str, Stored]] = []
        self._micro_steps = 0
        self.updates = 0

    @property
    def host_bytes(self) -> int:
        """Host memory that moments have been parked in."""
        return self._host.bytes

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
        self.unpark()
        self.engine.step()
        self._micro_steps = 0
        skipped = bool(self.engine.optimizer.overflow)
        self.updates += not skipped
        if self.park_moments:
            self.park()
        return Update(float("inf") if skipped else float(self.engine.get_global_grad_norm()), skipped)

    def park(self) -> None:
        """Moves the optimizer's moments to host memory, page-locked on GPUs and kept for the next time, until `unpark`.
        There are none before the first update.

        The fragments through which a checkpoint reads the moments would keep the device memory, and later save the
        moments of the first update. So they are let go here and linked anew in `unpark`.
        """
        if not self.updates or self._parked:
            return
        for parameter in self.adapter.parameters():
            if parameter._hp_mapping is not None:
                parameter._hp_mapping.optim_fragment = None
        for state in self.engine.optimizer.optimizer.state.values():
            for key in MOMENTS:
                # On the compute stream: nothing waits, and the memory is handed on in order.
                self._parked.append((state, key, Stored(self._host, state[key])))
                state[key] = None

    def unpark(self) -> None:
        """Brings parked moments back; ``step`` and ``state_dict`` do so themselves."""
        if not self._parked:
            return
        for state, key, stored in self._parked:
            state[key] = torch.empty(stored.shape, dtype=stored.dtype, device=stored.device)
            stored.load(state[key])
        self._parked = []
        self._link_moments()

    @contextmanager
    def _with_moments(self) -> Iterator[None]:
        """What is inside finds the moments on the device; they are parked again afterwards, where they were."""
        parked = bool(self._parked)
        self.unpark()
        yield
        if parked:
            self.park()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Weights and moments, fp32, whole, on the CPU of rank 0 (empty elsewhere), and the count of updates; a
        collective."""
        state = {}
        with self._with_moments():
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
        self.unpark()
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
        if self.park_moments:
            self.park()

    def _share_weights(self) -> None:
        """Lets the optimizer update this rank's part of the weights in place. DeepSpeed keeps a copy of it for weights
        in half precision; ours are fp32, and the copy would be the same numbers twice."""
        zero = self.engine.optimizer
        rank = torch.distributed.get_rank()
        for master, parts in zip(
            zero.single_partition_of_fp32_groups, zero.parallel_partitioned_bit16_groups, strict=True
        ):
            master.data = parts[rank]
        zero._link_all_hp_params()

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
