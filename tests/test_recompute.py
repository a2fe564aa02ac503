"""What a recompute takes from the forward: the same bits, no product twice, and nothing that outlives its graph."""

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from rtcwm.model.adapted import Layer, adapted
from rtcwm.model.recompute import KeptOutputs

ROWS, WIDTH, INNER, RANK = 5, 6, 10, 2


def layers() -> list[Layer]:
    draw = torch.Generator().manual_seed(0)

    def weight(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=draw)

    return [
        Layer(weight(out, inp), weight(RANK, inp).requires_grad_(), weight(out, RANK).requires_grad_(), 0.5)
        for inp, out in ((WIDTH, INNER), (INNER, WIDTH), (WIDTH, WIDTH))
    ]


def run(x: Tensor, given: list[Layer], kept: KeptOutputs | None) -> Tensor:
    def forward() -> Tensor:
        hidden = x
        for layer in given:
            hidden = adapted(hidden.sin(), layer)
        return hidden.sin()

    if kept is None:
        return checkpoint(forward, use_reentrant=False)

    def keeping() -> Tensor:
        with kept.bind():
            return forward()

    return checkpoint(keeping, use_reentrant=False)


def gradients(kept: KeptOutputs | None) -> tuple[list[Tensor], int]:
    given = layers()
    x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).requires_grad_()
    leaves = [x, *(weight for layer in given for weight in (layer.down, layer.up))]
    in_place = {torch.ops.aten.addmm_: lambda out, a, b, *_, **__: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        found = torch.autograd.grad(run(x, given, kept).square().sum(), leaves)
    return list(found), counter.get_total_flops()


def test_kept_products_are_not_computed_again():
    kept = KeptOutputs(products=True)
    (plain, whole), (same, untouched), (found, less) = (
        gradients(None), gradients(KeptOutputs(products=False)), gradients(kept),
    )  # fmt: skip
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(plain, same, found, strict=True))
    assert untouched == whole and plain[0].abs().sum() > 0
    # The last layer's output is needed by the sine after it; all three products and their upper halves are spared.
    sizes = [(WIDTH, INNER), (INNER, WIDTH), (WIDTH, WIDTH)]
    assert whole - less == 2 * ROWS * sum(out * (inp + RANK) for inp, out in sizes)
    assert kept.bytes == {"attention": 0, "products": 4 * ROWS * sum(out for _, out in sizes)}


def test_kept_products_end_with_their_graph():
    """Without the garbage collector: no cycle may hold 3.8 GB a block."""
    gc.collect()
    gc.disable()
    try:
        kept = KeptOutputs(products=True)
        loss = run(torch.ones(ROWS, WIDTH, requires_grad=True), layers(), kept).sum()
        outputs = [weakref.ref(out) for (out,) in kept.outputs]
        del kept
        assert len(outputs) == 3 and None not in [out() for out in outputs]
        loss.backward()
        assert [out() for out in outputs] == [None] * 3
    finally:
        gc.enable()


def test_a_recompute_with_more_products_is_an_error():
    kept = KeptOutputs(products=True)
    x, given = torch.ones(ROWS, WIDTH, requires_grad=True), layers()
    with kept.bind():
        adapted(x, given[2])
    with kept.bind(), pytest.raises(RuntimeError, match="calls products more often than its forward did"):
        adapted(adapted(x, given[2]), given[2])
