"""What the gathers of a shared base move, and how long computation waits for them.

Blocks come through the `Carrier`, which times its own waits. The small layers around them (the text refiner of the
release is the largest, 1.5 GB) are gathered by DeepSpeed when they are entered; what passes on the compute stream
between the request and its end counts as waited for, an upper bound.
"""

import time

import torch
from deepspeed.runtime.zero.parameter_offload import z3_leaf_module
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from torch import nn

from rtcwm.engine.base import BaseEngine


class Traffic:
    """Counts from `start` on; `total` gives what came since. It stays in its place.

    Args:
        base: one whose weights are whole on every rank gives zeros.
    """

    def __init__(self, base: BaseEngine):
        self._base, self._device = base, base.world.device
        self._bytes, self._host_seconds, self._events = 0, 0.0, []
        self._before = 0
        if base.whole:
            return
        self._carried = set() if base.carrier is None else set(base.model.transformer_blocks.parameters())
        self._coordinator = base.engine.optimizer.get_param_coordinator()
        self._fetch = self._coordinator.fetch_sub_module
        self._coordinator.fetch_sub_module = self._timed_fetch

    def start(self) -> None:
        """From here on."""
        self._bytes, self._host_seconds, self._events = 0, 0.0, []
        self._base.activations.measure()
        if self._base.carrier is not None:
            self._before = self._base.carrier.moved_bytes

    def total(self) -> dict[str, float]:
        """Bytes that became whole on this rank since the start, of blocks and of other layers, and the seconds that
        computation waited for each; waits for the device."""
        carrier, device = self._base.carrier, self._device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        waited = self._host_seconds + sum(before.elapsed_time(after) for before, after in self._events) / 1000
        return {
            "block_bytes": 0 if carrier is None else carrier.moved_bytes - self._before,
            "block_waited": 0.0 if carrier is None else carrier.side.waited_seconds(),
            "other_bytes": self._bytes,
            "other_waited": waited,
        }

    def _timed_fetch(self, module: nn.Module, forward: bool) -> None:
        lacking = [
            parameter
            for parameter in iter_params(module, recurse=z3_leaf_module(module))
            if parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE and parameter not in self._carried
        ]
        if not lacking:
            self._fetch(module, forward)
            return
        self._bytes += sum(parameter.ds_numel * parameter.element_size() for parameter in lacking)
        if self._device.type == "cuda":
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            self._fetch(module, forward)
            after.record()
            self._events.append((before, after))
            return
        began = time.perf_counter()
        self._fetch(module, forward)
        self._host_seconds += time.perf_counter() - began
