"""AdaLN from a table: the rows, the files and their faults, a base without the weights, levels on the grid, a run."""

import re

import launch
import pytest
import torch
from ranks import run_ranks
from safetensors import safe_open
from small import CONFIG, drawn, random_window

from rtcwm.engine.base import BaseEngine
from rtcwm.engine.settings import ActivationSettings, BaseSettings
from rtcwm.errors import UserError
from rtcwm.model.attention import install, make_attend, resolve
from rtcwm.model.blocks import predict_velocity
from rtcwm.model.loading import SeededSource, build_base, open_base
from rtcwm.model.matching import score_level
from rtcwm.model.modulation import AdalnTable, ensure_table, grid_times, table_bytes, write_table
from rtcwm.model.objectives import on_grid
from rtcwm.model.sampler import Conditions, Stream
from rtcwm.model.schedule import SamplerConfig, schedule

CPU, KERNEL = torch.device("cpu"), resolve("sdpa", "cpu")
WIDTH = 6 * CONFIG["hidden_size"]
TRAIN = "rtcwm.train.train"


@pytest.fixture(scope="module")
def source(base_config) -> SeededSource:
    return SeededSource(open_base(str(base_config)).config | {"text_dim": CONFIG["text_dim"]}, seed=2)


@pytest.fixture
def path(tmp_path, source):
    (path,), made = ensure_table(tmp_path, source, grid_times(20, [0.4321]), torch.float32, CPU)
    assert made == 23  # 0, 1/20, ... 1, then 0.999 and 0.4321
    return path


def table_of(*paths, source, dtype=torch.float32) -> AdalnTable:
    return AdalnTable(paths, source, dtype, CPU)


def test_the_grid_holds_levels_as_they_are_fed():
    """1 - sigma in float32 of every drawn level, and the exact levels of references, clean rows and a schedule."""
    sigmas = schedule(4, 5.0)
    times = grid_times(1000, (1 - sigmas).tolist())
    draw = torch.Generator().manual_seed(0)
    drawn_levels = on_grid(torch.rand(5000, generator=draw) ** 3, 1000)
    scores = torch.tensor([score_level(draw, 12.0, 1000)[0] for _ in range(50)])
    for level in (drawn_levels, scores, sigmas, torch.tensor([0.0, 1.0, 1 - 0.999])):
        assert torch.isin(1 - level, times).all()
    assert len(times) == 1001 + 2  # of 1, .9375, .8333, .625, 0, the second and third are between the grid's levels
    assert (drawn_levels * 1000 - (drawn_levels * 1000).round()).abs().max() < 1e-3
    assert on_grid(torch.tensor(0.1234), None) == torch.tensor(0.1234)
    assert torch.equal(on_grid(torch.tensor([0.1234, 0.1236]), 1000), torch.tensor([0.123, 0.124]))


def test_rows_are_those_of_the_blocks(path, source):
    model, table = build_base(source, CPU, torch.float32), table_of(path, source=source)
    level = 1 - torch.tensor(13 / 20)  # 0.35, as it is fed
    times = torch.tensor([0.999, 0.999, 1.0, level, 0.4321, level])
    rows, which = table.rows(times)
    assert rows.shape == (CONFIG["num_layers"], 4 * 3, WIDTH) and rows.dtype == torch.float32
    assert torch.equal(table.times[table._entries(times)], times)
    distinct = torch.tensor([level, 0.4321, 0.999, 1.0])
    assert torch.equal(distinct[which], times)
    # To the last bit those of a live AdaLN that is given all times at once; other products round differently.
    temb = [model.time_embedder(model.time_proj(times)) for times in (table.times, distinct)]
    at = torch.searchsorted(table.times, distinct)
    for index, block in enumerate(model.transformer_blocks):
        found = table.stand_in(index)(rows)
        for part, whole, few in zip(found, *map(block.adaln_proj, temb), strict=True):
            assert torch.equal(part, whole.unflatten(0, (-1, 3))[at].flatten(0, 1))
            torch.testing.assert_close(part, few, rtol=1e-5, atol=1e-6)
    assert table.moved_bytes == rows.nbytes == 4 * table_bytes(source.config, 1, torch.float32)


def test_missing_times_alone_are_computed(path, source):
    times = grid_times(20, [0.4321, 0.777, 0.123])
    assert ensure_table(path.parent, source, grid_times(10), torch.float32, CPU) == ([path], 0)
    paths, made = ensure_table(path.parent, source, times, torch.float32, CPU)
    assert made == 2 and len(paths) == 2 and path in paths
    assert ensure_table(path.parent, source, times, torch.float32, CPU)[1] == 0
    table = table_of(*paths, source=source)
    assert torch.equal(table.times, times)
    whole = path.parent / "whole" / "table.safetensors"
    write_table(whole, source, times, torch.float32, CPU)
    both = [t.rows(torch.tensor([0.123, 0.4321, 0.5]))[0] for t in (table, table_of(whole, source=source))]
    torch.testing.assert_close(*both, rtol=1e-5, atol=1e-6)
    with safe_open(whole, "pt") as file:  # the library reads what is written here by hand
        assert torch.equal(file.get_tensor("times"), times) and len(list(file.keys())) == 1 + CONFIG["num_layers"]
    assert not [file for file in path.parent.iterdir() if file.name.startswith(".")]


def test_other_bases_and_dtypes_have_files_of_their_own(path, source):
    other = SeededSource(source.config, seed=3)
    paths, made = ensure_table(path.parent, other, grid_times(5), torch.float32, CPU)
    assert made == 7 and path not in paths
    paths, made = ensure_table(path.parent, source, grid_times(5), torch.bfloat16, CPU)
    assert made == 7 and path not in paths
    rows, _ = table_of(*paths, source=source, dtype=torch.bfloat16).rows(torch.tensor([0.2]))
    model = build_base(source, CPU, torch.bfloat16)
    expected = model.transformer_blocks[0].adaln_proj(model.time_embedder(model.time_proj(torch.tensor([0.2]))))
    torch.testing.assert_close(rows[0], torch.cat(expected, dim=-1), rtol=2**-7, atol=1e-3)


def damage(path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "truncated":
        del data[-1000:]
    elif how == "changed":
        data[-1] ^= 1
    elif how == "zeros":
        data[-WIDTH * 3 * 4 :] = bytes(WIDTH * 3 * 4)
    elif how == "header":
        data[0:8] = (2**40).to_bytes(8, "little")
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["truncated", "changed", "zeros", "header"])
def test_a_damaged_file_is_named(path, source, how):
    damage(path, how)
    for use in (
        lambda: table_of(path, source=source),
        lambda: ensure_table(path.parent, source, grid_times(20), torch.float32, CPU),
    ):
        with pytest.raises(UserError, match=f"{re.escape(str(path))} is damaged.*delete it"):
            use()


def test_a_foreign_file_is_refused(path, source):
    other = SeededSource(source.config, seed=3)
    with pytest.raises(
        UserError, match=f"not the AdaLN table of .*base {source.fingerprint}, expected {other.fingerprint}"
    ):
        table_of(path, source=other)
    with pytest.raises(UserError, match="dtype torch.float32, expected torch.bfloat16"):
        table_of(path, source=source, dtype=torch.bfloat16)


def test_a_folder_that_cannot_be_written_is_named(tmp_path, source):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the AdaLN table .*--adaln-dir"):
        ensure_table(tmp_path / "file" / "inner", source, grid_times(3), torch.float32, CPU)


def test_a_level_off_the_grid_is_an_error(path, source):
    model = build_base(source, CPU, torch.float32, adaln=table_of(path, source=source).stand_in)
    install(model, KERNEL)
    window = random_window(5)
    layout = window.layout(stream=True)
    for sigma, message in ((0.51, r"0\.51 \(model time 0\.49\)"), (-0.2, r"model time 1\.2")):
        with pytest.raises(UserError, match=f"noise level .*{message}.*--adaln-times"):
            predict_velocity(model, window, layout, torch.tensor([1 - sigma]), None)
    predict_velocity(model, window, layout, torch.tensor([0.55]), None)


def both_ways(world, source: SeededSource, folder, shard_group: int) -> dict:
    """Velocities and a stream's chunk with AdaLN live and from a table, through the engine; what the base holds."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "memory_efficient_linear": False}
    zero |= {
        "leaf_module": {"classes": ["diffusers.models.transformers.transformer_minimax_h3.MiniMaxH3TransformerBlock"]}
    }
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    settings = BaseSettings(config, shard_group, ActivationSettings())
    sampler = SamplerConfig(steps=2)
    times = grid_times(8, (1 - sampler.sigmas).tolist())
    if world.is_main:
        ensure_table(folder, source, times, torch.float32, CPU)
    world.barrier()
    table = AdalnTable(ensure_table(folder, source, times, torch.float32, CPU)[0], source, torch.float32, CPU)
    window, found = random_window(30), {}
    conditions = Conditions.of(window)
    layout = window.layout(stream=True)
    for name, given in (("live", None), ("table", table)):
        base = BaseEngine(world, source, settings, given)
        install(base.model, KERNEL)
        run = base.activations.runner(None)
        video = window.video.clone().requires_grad_()
        noisy = type(window)(**(vars(window) | {"video": video}))
        levels = torch.tensor([1.0, 0.25, 0.5, 0.0, 0.625, 0.125])
        velocity = predict_velocity(base.model, noisy, layout, 1 - levels, make_attend(KERNEL, layout, "E"), run=run)
        velocity.square().mean().backward()
        base.finish_backward()
        stream = Stream(base.model, KERNEL, conditions, sampler, drawn(torch.Generator().manual_seed(1)), run=run)
        chunks = [stream.next_chunk(window.proxy[:, :, :5]) for _ in range(2)]
        names = [name for name, _ in base.model.named_parameters() if "adaln_proj" in name]
        held = sum(parameter.ds_numel for parameter in base.model.parameters())
        found[name] = (velocity.detach(), video.grad, torch.stack(chunks), names, held, base.gathered())
    return found | {"moved": table.moved_bytes}


def test_a_sharded_base_without_the_weights_gives_the_same(tmp_path, source):
    for shard_group in (2, 1):
        for found in run_ranks(2, both_ways, source, tmp_path, shard_group):
            live, table = found["live"], found["table"]
            for first, second in zip(live[:3], table[:3], strict=True):
                assert first.abs().max() > 0
                torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5 * first.abs().max())
            hidden, blocks = CONFIG["hidden_size"], CONFIG["num_layers"]
            assert len(live[3]) == 2 * blocks and table[3] == []
            assert live[4] - table[4] == blocks * (CONFIG["time_embed_dim"] + 1) * 18 * hidden
            assert live[5] == table[5] == 0
            # Distinct times: 7 of the span; then 2 for what each of two chunks follows and 3 for each of two steps,
            # whose rows the second chunk meets again.
            assert found["moved"] == (7 + 2 * 2 + 2 * 3) * table_bytes(source.config, 1, torch.float32)


def test_a_run_with_a_table(tmp_path, clips_root, base_config):
    """Through the command line: levels on the grid, the table made once, and found again by another run."""
    arguments = dict(
        clips=clips_root, base=base_config, val_clips=0, rank=2, adaln="table", adaln_times=16, steps=1,
        adaln_dir=tmp_path / "tables",
    )  # fmt: skip
    outs = [tmp_path / name for name in "ab"]
    said = [launch.run(1, TRAIN, arguments | {"out": out}, tmp_path / "log") for out in outs]
    assert "18 model times computed" in said[0] and "noise levels: multiples of 1/16" in said[0]
    assert "times computed" not in said[1]
    assert launch.numbers(outs[0]) == launch.numbers(outs[1])
