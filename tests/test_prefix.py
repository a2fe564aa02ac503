"""The operator of attention: equal to the mask, cheap in copies, and its outputs kept for a recompute."""

import gc
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rtcwm.model import prefix
from rtcwm.model.attention import Masked, Prefix, make_attend, resolve
from rtcwm.model.kernels import Kernel
from rtcwm.model.layout import Geometry
from rtcwm.model.masks import RULES, boolean_mask, groups
from rtcwm.model.packing import Layout, stream_layout
from rtcwm.model.parity import parity
from rtcwm.model.prefix import attention, decode, encode
from rtcwm.model.recompute import KeptOutputs

CPU = resolve("sdpa", "cpu")


def layout_of(chunks: int, geometry: Geometry = Geometry(2, 6, 3, 1)) -> Layout:
    return stream_layout(geometry, (2, 4), chunks, (1, 0, 1, 1, 1), 3)


def random_qkv(rows: int, batch: int = 2, heads: int = 2, width: int = 16, dtype=torch.float64) -> list[Tensor]:
    """q, k, v as the processor makes them: slices of one fused projection."""
    draw = torch.Generator().manual_seed(rows)
    fused = torch.randn(batch, rows, 3 * heads * width, generator=draw, dtype=dtype)
    return [x.unflatten(-1, (heads, -1)).detach().requires_grad_() for x in fused.chunk(3, dim=-1)]


class Counter:
    """A kernel that counts the calls of its halves."""

    def __init__(self, name: str = "counted") -> None:
        self.forwards, self.backwards, self.keys = 0, 0, []
        self.kernel = replace(CPU, name=name, forward=self._forward, backward=self._backward)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.forwards += 1
        self.keys.append(v)
        return CPU.forward(q, k, v)

    def _backward(self, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.backwards += 1
        return CPU.backward(*tensors)


# The operator


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("chunks", range(1, 9))
def test_operator_equals_the_mask(rule, chunks):
    layout = layout_of(chunks)
    inputs = random_qkv(layout.rows)
    out = make_attend(CPU, layout, rule)(*inputs, None)
    expected = Masked(boolean_mask(layout, rule))(*inputs, None)
    dout = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    gradients = [torch.autograd.grad(x, inputs, dout) for x in (out, expected)]
    assert [x.is_contiguous() for x in (out, *gradients[0])] == [True] * 4
    torch.testing.assert_close([out, *gradients[0]], [expected, *gradients[1]])


@pytest.mark.parametrize("rule", RULES)
def test_gradcheck(rule):
    layout = stream_layout(Geometry(2, 2, 1, 1), (2, 2), 2, (1,), 0)
    inputs = random_qkv(layout.rows, batch=1, heads=1, width=4)
    plan = encode(groups(layout, rule))
    assert torch.autograd.gradcheck(lambda *qkv: attention(CPU, *qkv, plan), inputs)


def test_gradcheck_of_queries_against_longer_keys():
    q, k, v = random_qkv(7, width=4)
    assert torch.autograd.gradcheck(lambda *qkv: attention(CPU, *qkv), (q[:, :3], k, v))


@pytest.mark.parametrize("rule", RULES)
def test_torchs_own_checks_of_an_operator(rule):
    """Schema, fake implementation, and what a compiler makes of forward and backward."""
    layout = layout_of(2)
    plan = list(encode(groups(layout, rule)))
    arguments = (*random_qkv(layout.rows, dtype=torch.float32), plan, CPU.name)
    attention(CPU, *arguments[:3])  # registers the kernel's name
    torch.library.opcheck(torch.ops.rtcwm.prefix_attention.default, arguments)


@pytest.mark.parametrize("chunks", [1, 6, 8])
def test_a_plan_holds_the_groups(chunks):
    for rule in RULES:
        calls = groups(layout_of(chunks), rule)
        assert decode(encode(calls)) == calls


def test_span_keys_are_views():
    """Six chunks need no copy of keys and values but the compact one, which the causal rule shares."""
    counter, layout = Counter(), layout_of(6)
    q, k, v = (x.detach() for x in random_qkv(layout.rows))
    Prefix(counter.kernel, groups(layout, "E"))(q, k, v, None)
    starts = [x.data_ptr() for x in counter.keys]
    compact, *targets = starts[0], *starts[2::2]
    assert len(starts) == 13 and set(targets) == {v.data_ptr()}
    assert set(starts[1::2]) == {compact} and compact != v.data_ptr()


def test_gradients_of_a_span_need_no_buffer_of_zeros(monkeypatch):
    """The longest prefix has every row, so its gradient is the buffer; eight chunks have no such prefix."""
    made = []
    zeros = Tensor.new_zeros
    monkeypatch.setattr(
        Tensor, "new_zeros", lambda x, *size, **options: made.append(size) or zeros(x, *size, **options)
    )
    for chunks, count in ((6, 0), (8, 2)):
        layout = layout_of(chunks)
        made.clear()
        make_attend(CPU, layout, "E")(*random_qkv(layout.rows), None).sum().backward()
        assert len(made) == count


def test_bf16_sums_are_near_float32_sums(monkeypatch):
    """dK and dV of a span have up to six terms, each rounded to bf16 by the kernel. Adding them in bf16 as well, rather
    than in float32 with one rounding at the end, costs less than half as much again."""
    arguments = (CPU, "cpu", torch.bfloat16)
    in_bf16 = parity(*arguments, heads=2, width=64)

    class Float32Sum(prefix._Sum):
        def add(self, pieces, grad):
            super().add(pieces, grad.float())

    monkeypatch.setattr(prefix, "_Sum", Float32Sum)
    backward = prefix._backward
    monkeypatch.setattr(prefix, "_backward", lambda *args: tuple(x.bfloat16() for x in backward(*args)))
    in_float32 = parity(*arguments, heads=2, width=64)
    assert in_bf16.dq == in_float32.dq and in_bf16.out == in_float32.out
    for name in ("dk", "dv"):
        ratio = getattr(in_bf16, name) / getattr(in_float32, name)
        assert 1.0 < ratio < 1.5


def test_nothing_but_the_output_is_made_without_a_graph():
    layout = layout_of(2)
    q, k, v = random_qkv(layout.rows)
    with torch.no_grad():
        out = make_attend(CPU, layout, "E")(q, k, v, None)
    with torch.inference_mode():
        inferred = make_attend(CPU, layout, "E")(q, k, v, None)
    assert not out.requires_grad and torch.equal(out, inferred)


def test_an_unused_output_has_no_gradient():
    q, k, v = random_qkv(5)
    out, lse = torch.ops.rtcwm.prefix_attention(q, k, v, [], CPU.name)
    assert out.requires_grad and not lse.requires_grad
    torch.testing.assert_close(lse, torch.einsum("bqhd,bkhd->bhqk", q, k).div(4).logsumexp(-1).detach())


def test_a_kernel_without_halves_cannot_carry_out_a_plan():
    layout = layout_of(1)
    plain = Kernel("plain", CPU.fn, "")
    q, k, v = random_qkv(layout.rows)
    assert torch.equal(attention(plain, q, k, v), CPU.fn(q, k, v))
    with pytest.raises(ValueError, match="kernel plain has no forward and backward"):
        Prefix(plain, groups(layout, "E"))(q, k, v, None)


@pytest.mark.parametrize("dtype, largest", [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 6e-3)])
@pytest.mark.parametrize("rule", RULES)
def test_parity(rule, dtype, largest):
    found = parity(CPU, "cpu", dtype, rule, geometry=Geometry(4, 8, 2, 4), heads=2, width=32, batch=2)
    assert 0 < max(found) < largest


def test_parity_sees_a_kernel_that_is_wrong():
    """A backward pass without the row sums of dout * out, and a scale that is off by a percent."""

    def careless(dout, q, k, v, out, lse):
        return CPU.backward(dout, q, k, v, torch.zeros_like(out), lse)

    small = dict(geometry=Geometry(4, 8, 2, 4), heads=2, width=32)
    found = parity(replace(CPU, name="careless", backward=careless), "cpu", torch.float32, **small)
    assert found.out < 1e-5 and found.dv < 1e-5 and found.dq > 0.01 and found.dk > 0.01
    off = replace(CPU, name="off", forward=lambda q, k, v: CPU.forward(q * 1.01, k, v))
    assert parity(off, "cpu", torch.float32, **small).out > 1e-3


# Outputs kept


class Block:
    """A block with attention and weights [width, 3 * width] that both need a gradient."""

    def __init__(self, kernel: Kernel, width: int = 32) -> None:
        draw = torch.Generator().manual_seed(0)
        self.layout = layout_of(3)
        self.attend = make_attend(kernel, self.layout, "E")
        self.qkv = (torch.randn(width, 3 * width, generator=draw) / 6).requires_grad_()
        self.out = torch.randn(width, width, generator=draw) / 6
        self.hidden = torch.randn(2, self.layout.rows, width, generator=draw).requires_grad_()

    def __call__(self, hidden: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (2, -1)) for x in (hidden.tanh() @ self.qkv).chunk(3, dim=-1))
        return hidden + (self.attend(q, k, v, None).flatten(2) @ self.out).sin()


def kept(block: Block, outputs: list[KeptOutputs], hidden: Tensor) -> Tensor:
    mine = KeptOutputs()
    outputs.append(mine)

    def forward() -> Tensor:
        with mine.bind():
            return block(hidden)

    return checkpoint(forward, use_reentrant=False)


def selective(block: Block, hidden: Tensor) -> Tensor:
    def policy(context, operator, *args, **kwargs) -> CheckpointPolicy:
        saved = operator is torch.ops.rtcwm.prefix_attention.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(block, hidden, use_reentrant=False, context_fn=contexts)


def test_kept_outputs_spare_the_recompute_and_change_nothing():
    """Two blocks of seven calls each; the same bits from plain, checkpointed, kept and torch's selective runs."""
    counter = Counter()
    block = Block(counter.kernel)
    runs = {
        "plain": block,
        "recomputed": lambda hidden: checkpoint(block, hidden, use_reentrant=False),
        "kept": partial(kept, block, []),
        "selective": partial(selective, block),
    }
    gradients = {}
    for name, run in runs.items():
        counter.forwards = counter.backwards = 0
        out = run(run(block.hidden))
        assert counter.forwards == 14
        gradients[name] = torch.autograd.grad(out.square().sum(), [block.hidden, block.qkv])
        assert (counter.forwards, counter.backwards) == (28 if name == "recomputed" else 14, 14), name
    for name, found in gradients.items():
        assert all(torch.equal(a, b) for a, b in zip(found, gradients["plain"])), name


def test_kept_outputs_end_with_their_graph():
    """Without the garbage collector: no cycle may hold 487 MB a block."""
    block, outputs = Block(CPU), []
    gc.collect()
    gc.disable()
    try:
        hidden = kept(block, outputs, kept(block, outputs, block.hidden))
        rows = 2 * block.layout.rows
        size = 4 * rows * (32 + 2)  # 32 channels and the logsumexp of 2 heads
        assert [x.bytes["attention"] for x in outputs] == [size] * 2
        alive = [weakref.ref(x) for x in outputs]
        outputs.clear()
        assert None not in [x() for x in alive]
        loss = hidden.sum()
        del hidden
        loss.backward()
        assert [x() for x in alive] == [None, None]
        kept(block, outputs, block.hidden)  # a graph that no backward pass goes through
        alive = weakref.ref(outputs.pop())
        assert alive() is None
    finally:
        gc.enable()


def test_two_backward_passes_read_the_same_outputs():
    counter, outputs = Counter(), []
    block = Block(counter.kernel)
    loss = kept(block, outputs, block.hidden).square().sum()
    first = torch.autograd.grad(loss, block.qkv, retain_graph=True)
    second = torch.autograd.grad(loss, block.qkv)
    assert torch.equal(first[0], second[0]) and counter.forwards == 7


def test_a_recompute_that_does_more_is_an_error():
    block, outputs = Block(CPU), KeptOutputs()
    with outputs.bind():
        block(block.hidden)
    with outputs.bind(), pytest.raises(RuntimeError, match="more often than its forward did"):
        block(block(block.hidden))


def test_a_compiled_block_keeps_its_outputs_too():
    """The operator is one node of a compiled graph, whose own code runs at every call."""
    counter = Counter()
    block = Block(counter.kernel)
    expected = torch.autograd.grad(block(block.hidden).sum(), block.qkv)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for run in (compiled, partial(kept, compiled, [])):
        counter.forwards = 0
        (found,) = torch.autograd.grad(run(block.hidden).sum(), block.qkv)
        torch.testing.assert_close(found, expected[0])
        assert counter.forwards == 7
