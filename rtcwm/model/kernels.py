"""Dense attention kernels by name, the choice among those that are there, and what is compiled beside them.

A kernel takes q [B, Sq, H, D] and k, v [B, Sk, H, D], computes softmax(q k^T / sqrt(D)) v without a mask, and is
differentiable. Nothing falls back in silence: a kernel asked for by name is used or is an error, and "auto" says what
it took, by which measurement, and what it passed over.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Literal

import torch

from rtcwm.errors import UserError
from rtcwm.model import dense
from rtcwm.model.dense import Backward, Dense, DenseAttention, Forward, Unavailable

Compile = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class Kernel:
    """A dense kernel: its name, the plain differentiable call, and a line for people: which one, of what version, why.

    `forward` and `backward` are its two halves (`rtcwm.model.dense`). A kernel without them is run by the plain call,
    and its outputs cannot be kept for a recompute. `compiled`: so is what lies between a block's matrix products
    (`rtcwm.model.glue`).
    """

    name: str
    fn: DenseAttention
    why: str
    forward: Forward | None = None
    backward: Backward | None = None
    compiled: bool = False


KERNELS: dict[str, Callable[[torch.device], Dense]] = {
    "fa4": dense.open_fa4,
    "fa3": dense.open_fa3,
    "cudnn": dense.open_cudnn,
    "fa2": dense.open_fa2,
    "sdpa": dense.open_sdpa,
    "flex": dense.open_flex,
}
_ON_ANY_DEVICE = ("sdpa", "flex")
# TFLOP/s of the prefix calls of 56 heads x 128 over 33,968 rows: forward, forward and backward. sdpa takes torch's own
# FlashAttention-2 there. flex runs the rule as a block mask instead, cannot be kept for a recompute, and is a reference
# that is only taken by name. fa3 has not been measured, so "auto" does not take it either.
MEASURED: dict[str, dict[str, tuple[int, int]]] = {
    "H200": {"fa4": (643, 597), "cudnn": (546, 506), "flex": (390, 346), "fa2": (342, 313), "sdpa": (342, 313)},
}
_NEVER_AUTO = ("flex",)


def resolve(name: str, device: torch.device | str, compile: Compile = "off") -> Kernel:
    """The kernel `name` ("auto", fa4, fa3, cudnn, fa2, sdpa, flex) for a device; `compile` as of `compiles`.

    Raises UserError for an unknown name and for a named kernel that cannot run there, with what to install or change.
    """
    device = torch.device(device)
    kernel, (compiled, why) = _resolve(name, device), compiles(compile, device)
    return replace(kernel, compiled=compiled, why=f"{kernel.why}; {why}")


def compiles(setting: Compile, device: torch.device) -> tuple[bool, str]:
    """Whether what lies between a block's matrix products is compiled on a device, and that in words: "auto" does so on
    CUDA.

    Raises UserError for "on" where what the compiler needs is not installed.
    """
    if device.type == "cuda":
        lacking = None if find_spec("triton") else "triton, which comes with torch's builds for CUDA"
    else:
        lacking = None if shutil.which("g++") or shutil.which("clang++") else "a C++ compiler, such as g++"
    if setting == "on" and lacking:
        raise UserError(f"--compile on needs {lacking}: install it, or set --compile off")
    compiled = setting == "on" or (setting == "auto" and device.type == "cuda" and not lacking)
    missing = f" (there is no {lacking})" if setting == "auto" and device.type == "cuda" and lacking else ""
    return compiled, f"elementwise pieces of blocks: {'compiled' if compiled else 'not compiled'}{missing}"


def _resolve(name: str, device: torch.device) -> Kernel:
    if name == "auto":
        return _fastest(device) if device.type == "cuda" else _on_other_devices(device)
    if name not in KERNELS:
        raise UserError(f"attention kernel {name!r} is not one of auto, {', '.join(KERNELS)}")
    try:
        return _kernel(name, device, f"{name}, as asked for")
    except Unavailable as missing:
        raise UserError(f"attention kernel {name!r} cannot run here: {missing}; or ask for 'auto'") from missing


def _kernel(name: str, device: torch.device, why: str, remarks: list[str] | None = None) -> Kernel:
    if device.type != "cuda" and name not in _ON_ANY_DEVICE:
        raise Unavailable(f"it needs a CUDA device, this one is {device.type}")
    opened = KERNELS[name](device)
    line = "; ".join([f"attention: {why} ({opened.description})", *(remarks or [])])
    return Kernel(name, opened.fn, line, opened.forward, opened.backward)


def _on_other_devices(device: torch.device) -> Kernel:
    return _kernel("sdpa", device, f"sdpa, the one for {device.type}")


def _fastest(device: torch.device) -> Kernel:
    """The fastest kernel that is there, by the measurement of this card or, where there is none, of another."""
    card = torch.cuda.get_device_name(device)
    measured_on = next((known for known in MEASURED if known in card), None)
    remarks = [] if measured_on else [f"no measurement on {card}, so by that of another card"]
    speeds = MEASURED[measured_on or next(iter(MEASURED))]
    names = sorted((name for name in speeds if name not in _NEVER_AUTO), key=lambda name: speeds[name][1], reverse=True)
    for name in names:
        forward, both = speeds[name]
        why = (
            f"{name}, the fastest of {', '.join(names)} that is there on {device.type}: {forward} TFLOP/s forward, "
            f"{both} with backward on {measured_on or next(iter(MEASURED))}"
        )
        try:
            return _kernel(name, device, why, remarks)
        except Unavailable as missing:
            remarks.append(f"{name}: {missing}")
    raise UserError(f"no attention kernel for {device}: {'; '.join(remarks)}")
