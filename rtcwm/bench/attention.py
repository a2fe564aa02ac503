"""`rtcwm bench attention`: the prefix calls of one span, every kernel that is installed.

Rates count the pairs (query, key) that the rule really needs; a kernel that computes masked pairs too has a lower one.
Parity is at a small size, in the dtype of training, against a boolean mask in fp32: relative errors in the 2-norm.
"""

import torch
from torch import Tensor

from rtcwm.bench import measure, report
from rtcwm.bench.command import Settings
from rtcwm.bench.inputs import Case
from rtcwm.bench.work import span_pairs
from rtcwm.engine.device import compute_dtype, release
from rtcwm.engine.world import program
from rtcwm.errors import UserError
from rtcwm.model.attention import make_attend
from rtcwm.model.kernels import KERNELS, Kernel, resolve
from rtcwm.model.masks import RULES
from rtcwm.model.parity import parity

BACKWARD = 2.5
"""Work of attention's backward pass over its forward pass: five products for two."""


INNER = {"cuda": 5, "cpu": 1}
"""Calls in a row that one time is the mean of."""


def bench(settings: Settings) -> None:
    """Times and checks the kernels, prints a table and writes the JSON file."""
    with program("rtcwm bench attention") as world:
        case, device = Case.of(settings), world.device
        result = report.opening("attention", settings, case.as_dict(), world)
        result["case"]["pairs"] = span_pairs(case.layout, "E")
        result["ceilings"] = measure.ceilings(device)
        world.print(f"{report.versions_line(result['machine'])}\n{case.line()}")
        result["kernels"] = {}
        for name in KERNELS if settings.attn == "auto" else [settings.attn]:
            try:
                kernel = resolve(name, device)
            except UserError as missing:
                if settings.attn != "auto":
                    raise
                world.print(f"{name} is left out: {missing}")
                continue
            world.print(f"{name} ...")
            errors = {rule: parity(kernel, device, compute_dtype(device), rule)._asdict() for rule in RULES}
            result["kernels"][name] = measured(kernel, case, settings, device) | {"parity": errors}
        world.print(kernel_table(result))
        report.write(settings.out, result)


def measured(kernel: Kernel, case: Case, settings: Settings, device: torch.device) -> dict:
    """Seconds and TFLOP/s of one block's attention over a span, forward, and forward with backward."""
    layout, inner = case.layout.to(device), case.config["num_attention_heads"] * case.config["attention_head_dim"]
    attend = make_attend(kernel, layout, "E")
    width = case.config["attention_head_dim"]
    q, k, v = random_qkv(layout.rows, case.config["num_attention_heads"], width, device, settings.seed)
    gradient = torch.randn_like(q)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    flop = 4.0 * span_pairs(case.layout, "E") * inner

    @torch.no_grad()
    def forward() -> None:
        attend(q, k, v, None)

    def both() -> None:
        for leaf in leaves:
            leaf.grad = None
        attend(*leaves, None).backward(gradient)

    found = {"why": kernel.why}
    for name, call, work in (("forward", forward, flop), ("both", both, flop * (1 + BACKWARD))):
        release(device)
        measure.reset_peaks(device)
        try:
            seconds = measure.timed(call, device, settings.warmup, settings.steps, INNER[device.type])
        except torch.OutOfMemoryError:
            found[name] = {"failed": "out of memory"}
            continue
        found[name] = {
            "seconds": seconds.as_dict(), "tflops": work / seconds.median / 1e12, "peak": measure.peaks(device),
        }  # fmt: skip
    return found


def random_qkv(rows: int, heads: int, width: int, device: torch.device, seed: int) -> list[Tensor]:
    """q, k, v as the blocks make them, slices of one fused projection."""
    draw = torch.Generator(device).manual_seed(seed)
    fused = torch.randn(1, rows, 3 * heads * width, generator=draw, device=device).to(compute_dtype(device))
    return [x.unflatten(-1, (heads, width)) for x in fused.chunk(3, dim=-1)]


def kernel_table(result: dict) -> str:
    columns = "kernel; forward ms; TFLOP/s; with backward ms; TFLOP/s; error out; error dq dk dv, most; peak GiB"
    rows = [columns.split("; ")]
    for name, found in result["kernels"].items():
        cells = []
        for part in ("forward", "both"):
            if "failed" in found[part]:
                cells += [found[part]["failed"], "-"]
            else:
                cells += [f"{found[part]['seconds']['median'] * 1e3:.3f}", f"{found[part]['tflops']:.4g}"]
        errors = found["parity"].values()
        worst = max(error[key] for error in errors for key in ("dq", "dk", "dv"))
        rows.append(
            [
                name,
                *cells,
                f"{max(error['out'] for error in errors):.2e}",
                f"{worst:.2e}",
                report.number(found["both"].get("peak", {}).get("allocated_gib"), "{:.2f}"),
            ]
        )
    ceiling = result["ceilings"]["matmul_tflops"]
    return f"{report.table(rows)}\na large matrix product here: {ceiling:.4g} TFLOP/s"
