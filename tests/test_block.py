"""The forward of rtcwm's blocks against diffusers' block under plain autograd: values, gradients, and the work done."""

import json
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3AttnProcessor
from ranks import run_ranks
from small import CONFIG, random_adapter, random_window, small_model
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from rtcwm.engine.activations import Activations
from rtcwm.engine.base import BaseEngine
from rtcwm.engine.settings import ActivationSettings, BaseSettings, read_base_settings
from rtcwm.errors import UserError
from rtcwm.model import glue
from rtcwm.model.attention import Full, install, resolve
from rtcwm.model.blocks import predict_velocity
from rtcwm.model.kernels import compiles
from rtcwm.model.loading import SeededSource, build_base, read_config
from rtcwm.model.lora import SITES, Adapter, AdapterShape, adapted_layers, inject

CPU = resolve("sdpa", "cpu")
RANK, ROWS = 3, 22
LINEARS = dict(zip(SITES, ("attn.to_qkv", "attn.to_out.0", "ff.net.0.proj", "ff.net.2"), strict=True))


def adapter_of(alpha: float = 4.5, seed: int = 0) -> Adapter:
    return random_adapter(AdapterShape.of(CONFIG, RANK, alpha), seed, size=0.3).double()


def block_inputs(model: MiniMaxH3Transformer3DModel, batch: int = 1, rows: int = ROWS) -> tuple:
    """Arguments of a block, float64: the rows want a gradient."""
    draw = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    hidden, temb = normal(batch, rows, CONFIG["hidden_size"]), normal(4, CONFIG["time_embed_dim"])
    index = torch.randint(12, (rows,), generator=draw)
    return hidden.requires_grad_(), temb, index, model.rope(30 * normal(rows, 3))


def merged(block, adapter: Adapter | None, index: int, inputs: tuple) -> torch.Tensor:
    """diffusers' block whose weights have the adapter added to them, under plain autograd."""
    if adapter is None:
        return block(*inputs)
    weights = {}
    for site, name in LINEARS.items():
        pair = adapter.blocks[index][site]
        weights[f"{name}.weight"] = block.get_submodule(name).weight + adapter.scale * pair.up @ pair.down
    return functional_call(block, weights, inputs)


@pytest.fixture(scope="module")
def stock() -> MiniMaxH3Transformer3DModel:
    return small_model().double()


def ours(ffn_rows: int = 0, compiled: bool = False):
    model = small_model().double()
    install(model, replace(CPU, compiled=compiled), ffn_rows=ffn_rows)
    return model, inject(model)


def gradients_of(out: torch.Tensor, *wanted: torch.Tensor) -> list[torch.Tensor]:
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return torch.autograd.grad((out * weight.to(out.dtype)).sum(), wanted)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("ffn_rows", [0, 1, 5, 22, 100])
@pytest.mark.parametrize("trained", [True, False, None])
def test_values_and_gradients_are_those_of_merged_weights(stock, batch, ffn_rows, trained):
    """With an adapter that trains, with a frozen one (a teacher's), with none."""
    model, slot = ours(ffn_rows)
    adapter = None if trained is None else adapter_of().requires_grad_(trained)
    inputs = block_inputs(stock, batch)
    wanted = [inputs[0], *(adapter.blocks[1].parameters() if trained else ())]
    expected = merged(stock.transformer_blocks[1], adapter, 1, inputs)
    with slot.bind(adapter):
        out = model.transformer_blocks[1](*inputs, None)
        with torch.no_grad():
            assert torch.equal(model.transformer_blocks[1](*inputs, None), out)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for found, true in zip(gradients_of(out, *wanted), gradients_of(expected, *wanted), strict=True):
        torch.testing.assert_close(found, true, rtol=1e-10, atol=1e-10)


def test_rows_without_a_gradient_still_train_the_adapter(stock):
    model, slot = ours(4)
    adapter = adapter_of()
    hidden, *rest = block_inputs(stock)
    inputs = (hidden.detach(), *rest)
    with slot.bind(adapter):
        out = model.transformer_blocks[0](*inputs, None)
    wanted = list(adapter.blocks[0].parameters())
    expected = gradients_of(merged(stock.transformer_blocks[0], adapter, 0, inputs), *wanted)
    for found, true in zip(gradients_of(out, *wanted), expected, strict=True):
        torch.testing.assert_close(found, true, rtol=1e-10, atol=1e-10)


def test_attention_that_rotates_by_itself_gets_the_same():
    """A cache is handed unrotated keys and the angles: the same output and gradient as rotation with the norms."""
    model, _ = ours()
    inputs = block_inputs(model)

    class Later(Full):
        takes_rotated = False

    outs = [model.transformer_blocks[0](*inputs, attend) for attend in (Full(CPU), Later(CPU))]
    torch.testing.assert_close(*outs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*(gradients_of(out, inputs[0])[0] for out in outs), rtol=1e-10, atol=1e-10)


def test_bf16_gradients_are_no_worse_than_autograds(stock):
    """Error of the rows' gradient against float64, relative to that of diffusers' block in bf16."""
    inputs = block_inputs(stock)
    (true,) = gradients_of(stock.transformer_blocks[0](*inputs), inputs[0])
    rounded, errors = small_model().bfloat16(), {}
    hidden = inputs[0].detach().bfloat16().requires_grad_()
    given = (hidden, inputs[1].float(), *inputs[2:3], tuple(table.float() for table in inputs[3]))
    for name in ("diffusers", "ours"):
        if name == "ours":
            install(rounded, CPU)
        (found,) = gradients_of(rounded.transformer_blocks[0](*given), hidden)
        errors[name] = ((found.double() - true).norm() / true.norm()).item()
    assert errors["ours"] < 1.05 * errors["diffusers"] < 0.1


def test_weights_that_want_a_gradient_are_refused():
    model, _ = ours()
    inputs = block_inputs(model)
    for name in ("norm1.weight", "attn.norm_k.weight", "adaln_proj.linear.weight", "ff.net.2.weight"):
        weight = model.transformer_blocks[0].get_parameter(name)
        weight.requires_grad_(True)
        with pytest.raises(RuntimeError, match="gradient"):
            model.transformer_blocks[0](*inputs, None)
        weight.requires_grad_(False)
    install(model, CPU, frozen=False)
    assert isinstance(
        model.transformer_blocks[0].attn.processor, type(model.token_refiner.refiner_blocks[0].attn.processor)
    )


VIEWS = (torch.ops.aten.t.default, torch.ops.aten.detach.default)


def test_settings_of_parts_and_compilation(tmp_path, monkeypatch):
    file = tmp_path / "base.json"
    for rows in (-1, 2.5, True):
        file.write_text(json.dumps({"activation_checkpointing": {"ffn_rows": rows}}))
        with pytest.raises(UserError, match="ffn_rows is .*expected a number of rows"):
            read_base_settings(file)
    file.write_text(json.dumps({"activation_checkpointing": {"ffn_rows": 4096}}))
    assert read_base_settings(file).activations.ffn_rows == 4096
    assert [resolve("sdpa", "cpu", setting).compiled for setting in ("off", "auto", "on")] == [False, False, True]
    assert "blocks: compiled" in resolve("sdpa", "cpu", "on").why
    assert compiles("auto", torch.device("cuda"))[0] == bool(find_spec("triton"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="--compile on needs a C[+][+] compiler"):
        resolve("sdpa", "cpu", "on")


class Products(TorchDispatchMode):
    """Counts products by the shape of their second factor, and notes the most rows of a tensor of this width."""

    def __init__(self, width: int):
        super().__init__()
        self.width, self.count, self.rows = width, Counter(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.mm.out):
            self.count[tuple(args[1].shape)] += 1
        elif function is torch.ops.aten.addmm_.default:
            self.count[tuple(args[2].shape)] += 1
        out = function(*args, **(kwargs or {}))
        if function not in VIEWS and isinstance(out, torch.Tensor) and out.ndim > 1 and out.shape[-1] == self.width:
            self.rows = max(self.rows, out.numel() // self.width)
        return out


@pytest.mark.parametrize("ffn_rows", [0, 8])
def test_the_last_product_is_not_recomputed(ffn_rows):
    hidden, inner, ffn = CONFIG["hidden_size"], 64, 40  # no two products of one shape
    products = {"qkv": (hidden, 3 * inner), "out": (inner, hidden), "in": (hidden, 2 * ffn), "ffn_out": (ffn, hidden)}
    config = CONFIG | {"ffn_dim": ffn, "num_layers": 1}
    model = build_base(SeededSource(config | {"rope_theta": 1e4}), torch.device("cpu"), torch.float32).double()
    install(model, CPU, ffn_rows=ffn_rows)
    adapter = Adapter(AdapterShape.of(config, RANK)).double()
    run = Activations(ActivationSettings(), inject(model)).runner(adapter)
    inputs = block_inputs(model)
    parts = 3 if ffn_rows else 1  # 22 rows
    with Products(2 * ffn) as forward:
        out = run(model.transformer_blocks[0], *inputs, None)
    expected = {"qkv": 1, "out": 1, "in": parts, "ffn_out": parts}
    assert {name: forward.count[shape] for name, shape in products.items()} == expected
    with Products(2 * ffn) as backward:
        out.sum().backward()
    expected = {"qkv": 1, "out": 1, "in": parts, "ffn_out": 0}
    assert {name: backward.count[shape] for name, shape in products.items()} == expected
    expected = {"qkv": 1, "out": 1, "in": parts, "ffn_out": parts}  # gradients of the inputs, once
    assert {name: backward.count[shape[::-1]] for name, shape in products.items()} == expected
    assert max(forward.rows, backward.rows) == (ffn_rows or ROWS)


def test_one_compilation_serves_all_lengths_and_modes(stock):
    """Compiled pieces against the plain ones, with and without a graph, over lengths that share one compilation."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()  # of what other tests compiled
    block, outcomes = stock.transformer_blocks[0], {}
    for compiled in (False, True):
        for rows in (22, 35, 64):
            hidden, temb, index, rotary = block_inputs(stock, rows=rows)
            shift, _, gate, *_ = block.adaln_proj(temb)
            qkv = torch.cat([hidden, hidden.flip(1), 2 * hidden, hidden], -1).unflatten(-1, (3, 2, 32))
            with torch.no_grad():
                glue.Heads.apply(qkv, block.attn.norm_q, block.attn.norm_k, rotary, compiled)
            q, k, v = glue.Heads.apply(qkv, block.attn.norm_q, block.attn.norm_k, rotary, compiled)
            out = (q * k + v)[..., :24].flatten(2)
            x, normed = glue.Middle.apply(hidden, out, gate, block.norm2, shift, gate, index, compiled)
            outcomes.setdefault(rows, []).append((x, normed, *gradients_of(x + normed * normed, hidden)))
    assert counters["stats"]["unique_graphs"] == 4 and not counters["graph_break"]
    for plain, fast in outcomes.values():
        for expected, found in zip(plain, fast, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def loss_of(model, kernel, **options) -> torch.Tensor:
    window = random_window(10, seed=4)
    velocity = predict_velocity(model, window, window.layout(False), torch.tensor(0.4), None, "video", **options)
    return velocity.square().mean()


def sharded_gradients(world, config: dict, ffn_rows: int) -> tuple:
    """Gradients of a loss through a partitioned base, and what stays gathered after it and after a forward alone."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "memory_efficient_linear": False}
    block = f"{MiniMaxH3Transformer3DModel.__module__}.MiniMaxH3TransformerBlock"
    deepspeed = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero | {"leaf_module": {"classes": [block]}},
    }
    base = BaseEngine(world, SeededSource(config, seed=3), BaseSettings(deepspeed, world.size, ActivationSettings()))
    install(base.model, CPU, ffn_rows=ffn_rows)
    adapter = adapter_of().float()
    run = base.activations.runner(adapter)
    with torch.no_grad():
        loss_of(base.model, CPU, run=run)
    gathered = [base.gathered()]
    for _ in range(2):
        loss = loss_of(base.model, CPU, run=run)
        loss.backward()
        base.finish_backward()
        gathered.append(base.gathered())
    return loss.item(), [parameter.grad / 2 for parameter in adapter.parameters()], gathered


@pytest.mark.parametrize("ffn_rows", [0, 16])
def test_gradients_through_a_sharded_base_equal_plain_torch(base_config, ffn_rows):
    """Against diffusers' own blocks and processor, with the adapter's terms added by hooks, on whole weights."""
    config = read_config(base_config) | {"text_dim": CONFIG["text_dim"]}
    plain, adapter = build_base(SeededSource(config, seed=3), torch.device("cpu"), torch.float32), adapter_of().float()
    for index, block in enumerate(plain.transformer_blocks):
        for site, layer in adapted_layers(block).items():
            pair = adapter.blocks[index][site]
            layer.register_forward_hook(
                lambda _, args, out, pair=pair: out + adapter.scale * (args[0] @ pair.down.T) @ pair.up.T
            )
    assert isinstance(plain.transformer_blocks[0].attn.processor, MiniMaxH3AttnProcessor)
    expected = loss_of(plain, CPU)
    expected.backward()
    for loss, gradients, gathered in run_ranks(2, sharded_gradients, config, ffn_rows):
        assert loss == pytest.approx(expected.item(), rel=1e-6) and gathered == [0, 0, 0]
        for found, parameter in zip(gradients, adapter.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-6 * parameter.grad.abs().max())
