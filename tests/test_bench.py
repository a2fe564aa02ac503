"""`rtcwm bench` through its command line, and its formulas against the known figures of the released model."""

import json
import math
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from launch import environment
from ranks import CONTEXT
from small import CONFIG, drawn, random_window, small_model
from torch.utils.flop_counter import FlopCounterMode

from rtcwm.bench import measure, profile, report, work
from rtcwm.bench.command import DistillBench, TrainBench
from rtcwm.bench.distill import no_grad_stream
from rtcwm.bench.inputs import Case, files
from rtcwm.bench.sides import check_room, compare, summary
from rtcwm.bench.work import Sizes, Work, rollout_work, span_pairs
from rtcwm.data.clips import open_clips
from rtcwm.engine.activations import Activations
from rtcwm.engine.settings import POLICIES, ActivationSettings
from rtcwm.errors import UserError
from rtcwm.model.attention import install
from rtcwm.model.blocks import run_blocks
from rtcwm.model.kernels import KERNELS, resolve
from rtcwm.model.layout import RELEASED, Geometry
from rtcwm.model.loading import SeededSource, build_base, parameter_count, read_config
from rtcwm.model.lora import Adapter, AdapterShape, inject
from rtcwm.model.masks import RULES, boolean_mask
from rtcwm.model.packing import stream_layout
from rtcwm.model.sampler import Conditions, rollout
from rtcwm.model.schedule import SamplerConfig

SMALL = {"height": 64, "width": 96, "text-rows": 5, "layers": 2, "steps": 2, "warmup": 1}


@pytest.fixture(scope="module")
def released(tmp_path_factory) -> Sizes:
    path = tmp_path_factory.mktemp("released") / "config.json"
    path.write_text("{}")
    return Sizes.of(read_config(path), rank=128)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "base.json"
    path.write_text(json.dumps(CONFIG | {"num_layers": 3}))
    return path


def _call(words: list[str], log: Path) -> None:
    """Runs the command line in this process, its output into a file; leaves with its exit code."""
    from rtcwm.bench import attention
    from rtcwm.cli import main

    attention.parity = partial(attention.parity, geometry=Geometry(4, 6, 2, 3), heads=2, width=64)  # sooner on a CPU
    own = environment()
    os.environ.clear()
    os.environ.update(own)
    torch.set_num_threads(1)
    sys.argv = ["rtcwm", "bench", *words]
    with log.open("w") as text, redirect_stdout(text), redirect_stderr(text):
        main()


def bench(command: str, base: Path, out: Path, **flags: object) -> tuple[dict, str]:
    """The command in a process of its own (forked from one that has imported the packages): its JSON and its output."""
    given = SMALL | {"base": base, "out": out} | flags
    words = [command, *(word for name, value in given.items() for word in (f"--{name}", str(value)))]
    log = out.with_suffix(".log")
    process = CONTEXT.Process(target=_call, args=(words, log))
    process.start()
    process.join(120)
    process.kill()
    assert process.exitcode == 0, log.read_text()
    return json.loads(out.read_text()), log.read_text()


def test_work_of_the_released_step(released):
    """At 33,248 rows without proxies: 1.28 PFLOP a linear pass, 0.91 an attention pass, 5.75 needed."""
    rows, static, chunk = 33_248, 3_008, 5_040
    pairs = static**2 + sum(chunk * (static + k * chunk) for k in range(1, 7))
    assert 0.565 < pairs / rows**2 < 0.575
    once, needed = released.forward(rows, pairs), released.trained(rows, pairs)
    assert round(once.linear / 1e15, 2) == 1.28 and round(once.attention / 1e15, 2) == 0.91
    assert round((needed.linear + needed.attention) / 1e15, 2) in (5.74, 5.75)
    assert released.adapter == 596_377_600
    assert needed.adapter == 6 * rows * 596_377_600
    assert released.trained(rows, pairs, work.WHOLE_BLOCKS) == needed + once


@pytest.mark.parametrize(
    "given",
    [
        *({"policy": policy, "ffn_rows": rows} for policy in POLICIES for rows in (0, 4)),
        {"policy": "save_attention", "keep_products": 1},
        {"policy": "save_attention", "keep_products": 2, "ffn_rows": 4},
        {"policy": "save_attention", "keep_products": 99},
    ],
)
def test_work_done_is_what_torch_counts(given):
    """Products of two blocks more, forward and backward, as torch's counter sees them; attention, as a kernel does."""
    for lasting in (False, True):
        check_work(ActivationSettings(**given), lasting)


def check_work(settings: ActivationSettings, lasting: bool) -> None:
    counted, seen = [], []
    for layers in (3, 5):
        config = read_config_of(CONFIG | {"num_layers": layers})
        products, passes = count(config, settings, lasting)
        counted.append(products)
        seen.append(passes)
    rows, sizes = 9, [Sizes.of(CONFIG | {"num_layers": layers}, rank=4) for layers in (3, 5)]
    acting = settings.lasting if lasting else settings
    done = [size.trained(rows, rows * rows, size.repeated(acting)) for size in sizes]
    found = counted[1] - counted[0]
    assert done[1].linear + done[1].adapter - done[0].linear - done[0].adapter == pytest.approx(found, rel=1e-12)
    forwards = [size.repeated(acting).attention * size.layers + size.layers for size in sizes]
    assert seen == pytest.approx(forwards)


def read_config_of(config: dict) -> dict:
    return {name: value.default for name, value in signature(MiniMaxH3Transformer3DModel).parameters.items()} | config


def count(config: dict, settings: ActivationSettings, lasting: bool) -> tuple[int, int]:
    """FLOP of products, but for AdaLN's, and forward calls of attention, of a pass over the blocks with a gradient."""
    model = build_base(SeededSource(config), torch.device("cpu"), torch.float32)
    kernel, calls = resolve("sdpa", "cpu"), []
    forward = kernel.forward
    install(model, replace(kernel, forward=lambda *args: calls.append(1) or forward(*args)), settings.ffn_rows)
    adapter = Adapter(AdapterShape.of(config, rank=4))
    run = Activations(settings, inject(model), blocks=model.transformer_blocks).runner(
        adapter, save_attention=not lasting
    )
    hidden = torch.randn(1, 9, config["hidden_size"], requires_grad=True)
    index, temb = torch.zeros(9, dtype=torch.long), torch.randn(1, config["time_embed_dim"])
    rotary = model.rope(torch.rand(9, 3))
    for block in model.transformer_blocks:  # a table of one row in place of its product
        rows = block.adaln_proj(temb)
        block.adaln_proj.forward = lambda _, rows=rows: rows
    in_place = {torch.ops.aten.addmm_: lambda out, a, b, *_, **__: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        run_blocks(model, hidden, temb, index, rotary, None, run).square().sum().backward()
    return counter.get_total_flops(), len(calls)


@pytest.mark.parametrize("rule", RULES)
def test_pairs_are_those_of_the_mask(rule):
    layout = stream_layout(Geometry(4, 6, 2, 3), (4, 6), 7, (1,) * 5, 3)
    assert span_pairs(layout, rule) == int(boolean_mask(layout, rule).sum())


@pytest.mark.parametrize("rule", ["E", "own"])
def test_work_of_a_rollout_is_what_its_blocks_run(rule):
    """Rows that blocks get and pairs that the kernel gets, in a real rollout past a full window."""
    model, rows, pairs = small_model(), [], []
    kernel = resolve("sdpa", "cpu")

    def counted(q, k, v):
        pairs.append(q.shape[1] * k.shape[1])
        return kernel.forward(q, k, v)

    spy = replace(kernel, forward=counted)
    install(model, spy)
    window = random_window(latents=30)

    def run(block, hidden, *rest):
        rows.append(hidden.shape[1])
        return block(hidden, *rest)

    stops = (1, 0, 2, 3, 0, 1, 2, 0)
    proxy = random_window(latents=5 * len(stops)).proxy
    given = (Conditions.of(window), proxy, SamplerConfig(rule=rule), drawn(torch.Generator().manual_seed(0)), stops)
    rollout(model, spy, *given, run=run)
    text = len(window.text_tags) ** 2  # the text refiner's one block attends too, and is not counted as work
    sizes, layout = Sizes.of(model.config, rank=4), window.layout(stream=True)
    forward, backward = rollout_work(sizes, layout, stops, (), rule)
    assert forward.linear == 2 * sizes.weights * sum(rows)
    assert forward.attention == 4 * sizes.width * (sum(pairs) - text)
    assert backward.total == 0
    graphs = rollout_work(sizes, layout, stops, (6, 7), rule)[1]
    once = sizes.forward(layout.target_chunk, layout.target_chunk * layout.rows)
    assert graphs == Work(2 * once.linear, 5 * once.attention, 4 * once.adapter)


def test_rows_of_the_default_case():
    assert stream_layout(RELEASED, (48, 84), 6, (1,) * 400, 170).rows == 33_968


def test_attention(base, tmp_path):
    found, text = bench("attention", base, tmp_path / "attention.json")
    assert set(found["kernels"]) == {"sdpa", "flex"}
    for name in set(KERNELS) - {"sdpa", "flex"}:
        assert f"{name} is left out" in text
    layout = stream_layout(Geometry(4, 6, 1, 2), (4, 6), 6, (1,) * 5, 170)
    pairs = int(boolean_mask(layout, "E").sum())
    assert found["case"]["rows"] == layout.rows and found["case"]["pairs"] == pairs
    for kernel in found["kernels"].values():
        for part, products in (("forward", 2), ("both", 7)):
            flop = products * 2 * pairs * CONFIG["num_attention_heads"] * CONFIG["attention_head_dim"]
            rate = flop / kernel[part]["seconds"]["median"] / 1e12
            assert kernel[part]["tflops"] == pytest.approx(rate)
        assert set(kernel["parity"]) == set(RULES)
        assert all(0 <= error < 1e-5 for errors in kernel["parity"].values() for error in errors.values())


def test_train_takes_the_same_steps_on_both_sides(base, tmp_path):
    found, text = bench("train", base, tmp_path / "train.json", profile=tmp_path / "kernels.txt")
    assert "ONLY 2 of 3 blocks are used" in text and found["case"]["whole_layers"] == 3
    sides, sizes = found["sides"], Sizes.of(CONFIG, rank=12)
    assert list(sides) == ["plain", "ours"] and sizes.layers == 2
    for key in ("loss", "grad_norm"):
        losses = [sides[name]["numbers"][key] for name in sides]
        assert len(losses[0]) == SMALL["steps"] + SMALL["warmup"]
        assert losses[0] == pytest.approx(losses[1], rel=2e-5)
        assert found["difference"][key]["most"] < 2e-5
    assert len(set(sides["ours"]["numbers"]["loss"])) == 3, "every step has noise of its own"
    rows, pairs = found["case"]["rows"], found["case"]["pairs"]
    repeated = {"plain": work.WHOLE_BLOCKS, "ours": sizes.repeated(ActivationSettings())}
    for name, side in sides.items():
        assert side["needed_flop"] == sizes.trained(rows, pairs).total
        assert side["done_flop"] == sizes.trained(rows, pairs, repeated[name]).total
        rate = found["ceilings"]["matmul_tflops"]
        share = side["needed_flop"] / (side["seconds"]["median"] * rate * 1e12)
        assert side["share"]["matmul_tflops"]["needed"] == pytest.approx(share)
        assert side["peak"]["allocated_gib"] is None and side["peak"]["host_gib"] > 0.1
        kernels = side["kernels"]
        assert sum(kernels["by_class"].values()) == pytest.approx(kernels["wall"], rel=0.02)
        assert kernels["by_class"]["attention backward"] > 0 and kernels["by_class"]["matmul"] > 0
    ratio = sides["ours"]["seconds"]["median"] / sides["plain"]["seconds"]["median"]
    assert found["ratio"] == pytest.approx(ratio)
    assert "ours, one step" in text and "aten::mm" in (tmp_path / "kernels.txt").read_text()


def test_distill_takes_the_same_iterations_on_both_sides(base, tmp_path):
    """Our side reads AdaLN from a table; both draw noise levels on its grid."""
    flags = {"chunks": 8, "grad-chunks": 2, "critic-per-gen": 2, "steps": 1, "adaln": "table", "adaln-times": 50}
    found, text = bench("distill", base, tmp_path / "distill.json", **flags)
    assert set(found["sides"]) == {"plain", "ours"} and found["ratio"] > 0
    for key in ("dmd", "student_norm", "critic", "critic_norm"):
        plain, ours = (found["sides"][name]["numbers"][key] for name in ("plain", "ours"))
        assert len(plain) == 2 and min(plain) > 0 and plain == pytest.approx(ours, rel=1e-3)
    sizes, case = Sizes.of(CONFIG, rank=12), found["case"]
    for name, repeated in (("plain", work.WHOLE_BLOCKS), ("ours", sizes.repeated(ActivationSettings()))):
        side = found["sides"][name]
        assert list(side["parts"]) == list(found["part_ratios"]) == ["rollout", "scores", "student", "critic"]
        update = sizes.trained(case["window_rows"], case["window_rows"] ** 2, repeated)
        assert side["parts"]["critic"]["done_flop"] == 2 * update.total
        parts = [part["seconds"]["median"] for part in side["parts"].values()]
        assert sum(parts) == pytest.approx(side["seconds"]["median"], rel=0.1)
        chunk = side["no_grad_chunk"]
        assert chunk["share_of_ceilings"] == pytest.approx(chunk["least_by_ceilings"] / chunk["seconds_a_chunk"])
        assert f"{name}: " in text
    assert "noise levels: multiples of 1/50" in text


def test_distill_with_a_causal_teacher(base, tmp_path):
    flags = {"chunks": 6, "grad-chunks": 1, "critic-per-gen": 1, "steps": 1, "warmup": 0, "teacher-kind": "causal"}
    found, said = bench("distill", base, tmp_path / "distill.json", **flags, stops="last", **{"joint-scores": "on"})
    assert "teacher and critic score in one pass" in said
    assert found["case"]["window_rows"] == found["case"]["rows"]
    assert found["difference"]["critic"]["most"] < 1e-3 and found["difference"]["dmd"]["most"] < 1e-3


def test_streams_are_the_same_on_both_sides(base, tmp_path):
    found, text = bench("stream", base, tmp_path / "stream.json", chunks=8, steps=1)
    sizes, layout = Sizes.of(CONFIG, rank=12), stream_layout(Geometry(4, 6, 1, 2), (4, 6), 6, (1,) * 5, 170)
    assert found["case"]["chunk_plays"] == 17 / 24
    assert found["difference"]["mean_square"]["most"] < 1e-3
    for side in found["sides"].values():
        assert list(side["parts"]) == [f"chunk {chunk}" for chunk in range(8)]
        # A steady chunk: four steps of its target, and one forward of the target before it and of its own proxy.
        targets = sizes.forward(layout.target_chunk, layout.target_chunk * layout.rows) * 5
        keys = layout.static + 6 * layout.proxy_chunk
        expected = targets + sizes.forward(layout.proxy_chunk, layout.proxy_chunk * keys)
        assert side["parts"]["chunk 7"]["needed_flop"] == expected.total
        assert side["steady"]["speed"] == pytest.approx(17 / 24 / side["steady"]["seconds_a_chunk"])
    assert "of real time" in text


def test_one_side_alone_on_engines(base, tmp_path):
    """Our stream on training's base engine."""
    settings = tmp_path / "base.json"
    settings.write_text(json.dumps({"shard_group": 1}))
    flags = {"sides": "ours", "base-config": settings, "steps": 1, "warmup": 0, "chunks": 7, "adaln": "table"}
    found, _ = bench("stream", base, tmp_path / "stream.json", **flags)
    assert set(found["sides"]) == {"ours"} and "ratio" not in found and found["sides"]["ours"]["steady"]["speed"] > 0


def test_kernels_are_told_apart():
    """Names that torch 2.11, cuDNN, FlashAttention and NCCL give their kernels on Hopper."""
    names = {
        "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT": "matmul",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas": "matmul",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x128_4x1x1": "attention forward",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_128x64x128": "attention backward",
        "kernel_cutlass_kernel_flash_attncuteflash_fwdFlashAttentionForwardSm90_object_at__tensor": "attention forward",
        "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90": "attention backward",
        "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits>": "attention backward",
        "triton_red_fused_add_mul_rsqrt_0": "compiled glue",
        "Memcpy HtoD (Pinned -> Device)": "copies",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<...>": "copies",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "NCCL",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>": "optimizer",
        "void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel>": "elementwise",
    }
    assert {name: profile.classify(name) for name in names} == names


def test_a_loss_that_is_not_finite_is_told_and_loses_no_result(tmp_path):
    """Our programs log None for such a number, the obvious loop has it as it is."""
    took = {"seconds": {"median": 2.0, "each": (2.0,)}}
    sides = {"plain": took | {"numbers": {"loss": [math.inf]}}, "ours": took | {"numbers": {"loss": [None]}}}
    found = summary(sides)
    assert math.isnan(found["difference"]["loss"]["first"]) and found["ratio"] == 1.0
    report.write(tmp_path / "found.json", found | {"sides": sides})
    told = json.loads((tmp_path / "found.json").read_text())
    assert told["sides"]["plain"] == {"seconds": {"median": 2.0, "each": [2.0]}, "numbers": {"loss": [None]}}
    assert told["difference"] == {"loss": {"first": None, "most": None}} and told["ratio"] == 1.0
    with pytest.raises(UserError, match="do not compute the same: loss of their first steps differs by nan"):
        compare(torch.device("cpu"), found, "loss", {"cpu": 1.0})


def test_a_stream_after_distillation_hears_the_silence_of_a_span(base, tmp_path):
    """Its clip is as long as a rollout; 170 latents a channel are those of 102 frames."""
    given = {name.replace("-", "_"): value for name, value in SMALL.items()}
    settings = DistillBench(base=str(base), chunks=8, **given)
    with files(Case.of(settings), 8, 0, 1) as made:
        clip = open_clips(made.clips)[0]
        plan = SimpleNamespace(starts=[(clip, 0)], sampler=SamplerConfig())
        case = no_grad_stream(settings, plan, torch.device("cpu"))
    assert case.chunks == 9 and case.span.audio.shape == (1, 2 * 170, 32)


def test_seconds_covered_by_overlapping_kernels():
    assert measure.Seconds((3.0, 1.0, 2.0)).median == 2.0
    assert profile.covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.6)]) == 4.0


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"layers": 9}, "--layers 9: the base has 3 blocks"),
        ({"sides": "ours,theirs"}, "--sides ours,theirs: expected plain, ours, or plain,ours"),
        ({"base": "weights.safetensors"}, "expected a config .json or 'embedded'"),
        ({"out": "result.txt"}, "expected the name of a .json file"),
        ({"height": 65}, "height and width must be multiples of 32"),
    ],
)
def test_bad_flags_are_told(base, tmp_path, flags, told):
    given = {name.replace("-", "_"): value for name, value in (SMALL | {"base": str(base)} | flags).items()}
    if "out" in given:
        given["out"] = Path(given["out"])
    with pytest.raises(UserError, match=told):
        Case.of(TrainBench(**given))


def test_a_base_that_the_cpu_cannot_hold_is_refused(monkeypatch):
    case, world = Case.of(TrainBench(layers=1)), SimpleNamespace(device=torch.device("cpu"))
    needed = 4 * parameter_count(case.config)
    free = SimpleNamespace(available=needed + 1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    check_room(world, case)
    free.available = needed
    with pytest.raises(UserError, match=r"\(33.1B\) in fp32 takes [\d.]+ GiB.*--base embedded"):
        check_room(world, case)
    free.available = 3 * needed
    check_room(world, case, copies=2)
    with pytest.raises(UserError, match=r"\(33.1B\) in fp32, whole on each of 3 ranks, takes"):
        check_room(world, case, copies=3)
    check_room(SimpleNamespace(device=torch.device("cuda")), case)
