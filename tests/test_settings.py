"""The two DeepSpeed JSON files and the programs' settings: what is taken, and what is refused by name."""

import json
import math
import subprocess
import sys

import pytest
import torch

from rtcwm.engine.settings import default_base_config, read_adapter_settings, read_base_settings, shipped_config
from rtcwm.engine.world import _option
from rtcwm.errors import UserError
from rtcwm.train.config import TrainConfig, learning_rate, parse

HOST = {"zero_optimization": {"offload_param": {"device": "cpu"}}}


def write(tmp_path, config) -> object:
    path = tmp_path / "ds.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


@pytest.mark.parametrize("name", sorted(path.stem for path in shipped_config("base_cpu").parent.glob("base_*.json")))
def test_shipped_base_configs_are_valid(name):
    settings = read_base_settings(shipped_config(name))
    zero = settings.deepspeed["zero_optimization"]
    assert zero["stage"] == 3 and zero["stage3_param_persistence_threshold"] == 0
    assert zero["leaf_module"]["classes"][0].endswith("MiniMaxH3TransformerBlock")
    assert not {"shard_group", "activation_checkpointing"} & set(settings.deepspeed)
    assert settings.activations.cpu_checkpointing == ("1x" in name or "80gb" in name)
    assert settings.offload == settings.pin_base == (name in ("base_1x24gb", "base_1x80gb_distill"))
    assert name in (shipped_config("base_cpu").parent / "README.md").read_text()


def test_own_keys_of_the_base(tmp_path):
    settings = read_base_settings(
        write(tmp_path, {
            "prefetch": True, "device_blocks": 9, "memory_limit_gib": 22.3,
            "zero_optimization": {"offload_param": {"device": "cpu", "pin_memory": True}},
        })
    )  # fmt: skip
    assert (settings.prefetch, settings.device_blocks, settings.memory_limit_gib) == (True, 9, 22.3)
    assert settings.offload and settings.pin_base
    # DeepSpeed knows none of them, and does not lock memory itself.
    assert not {"prefetch", "device_blocks", "memory_limit_gib"} & set(settings.deepspeed)
    assert settings.deepspeed["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": False}
    plain = read_base_settings(write(tmp_path, {}))
    assert (plain.prefetch, plain.device_blocks, plain.memory_limit_gib, plain.offload) == (True, 2, None, False)
    off = read_base_settings(write(tmp_path, {"zero_optimization": {"offload_param": {"device": "none"}}}))
    assert not off.offload and not off.pin_base
    assert not read_base_settings(write(tmp_path, {"prefetch": False})).prefetch
    assert not read_base_settings(write(tmp_path, {"shard_group": 1, "prefetch": False, **HOST})).prefetch


@pytest.mark.parametrize("read", [read_base_settings, read_adapter_settings])
def test_keys_that_say_what_holds_anyhow_are_taken(tmp_path, read):
    """Defaults of DeepSpeed, and what is off: neither reaches it, and the section is as without them."""
    idle = {
        "allgather_partitions": True, "sub_group_size": 1_000_000_000, "offload_optimizer": None, "cpu_offload": False,
        "zero_hpz_partition_size": 1, "zero_quantized_gradients": False,
    }  # fmt: skip
    given = read(write(tmp_path, {"zero_optimization": idle})).deepspeed["zero_optimization"]
    assert given == read(write(tmp_path, {})).deepspeed["zero_optimization"]


def test_what_an_adapter_takes_of_deepspeed_reaches_it(tmp_path):
    zero = {
        "stage": 2, "reduce_bucket_size": 1000, "allgather_bucket_size": 2000, "overlap_comm": True,
        "reduce_scatter": False, "contiguous_gradients": False, "use_multi_rank_bucket_allreduce": False,
    }  # fmt: skip
    assert read_adapter_settings(write(tmp_path, {"zero_optimization": zero})).deepspeed["zero_optimization"] == zero
    # The formulas of memory count with the bucket.
    written = read_adapter_settings(write(tmp_path, '{"zero_optimization": {"reduce_bucket_size": 2e7}}'))
    bucket = written.deepspeed["zero_optimization"]["reduce_bucket_size"]
    assert bucket == 20_000_000 and isinstance(bucket, int)


def test_the_adapter_of_a_small_card_is_the_recipe_but_for_where_its_moments_are():
    small, plain = (read_adapter_settings(shipped_config(name)) for name in ("adapter_24gb", "adapter"))
    assert small.park_moments and not plain.park_moments
    assert small.deepspeed["optimizer"] == plain.deepspeed["optimizer"]
    assert (small.accumulation, small.clipping) == (plain.accumulation, plain.clipping)
    assert "park_moments" not in small.deepspeed


def test_shipped_adapter_config_is_the_recipe():
    settings = read_adapter_settings(shipped_config("adapter"))
    assert (settings.accumulation, settings.clipping) == (1, 1.0)
    params = settings.deepspeed["optimizer"]["params"]
    assert params == {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "torch_adam": True}
    assert default_base_config(torch.device("cpu")).name == "base_cpu.json"


@pytest.mark.parametrize("given", [{}, {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.999]}}}])
def test_what_a_file_leaves_out_stands_as_if_it_were_written(tmp_path, given):
    """A run goes on with a file that writes the same numbers out, or leaves them out; they are torch's own."""
    plain, written = (
        read_adapter_settings(path).deepspeed for path in (write(tmp_path, given), shipped_config("adapter"))
    )
    for key in ("optimizer", "gradient_clipping"):
        assert plain[key] == written[key]
    torchs = torch.optim.AdamW([torch.zeros(1)]).defaults
    assert {key: torchs[key] for key in ("eps", "weight_decay")}.items() <= plain["optimizer"]["params"].items()


def test_integer_betas_become_floats(tmp_path):
    settings = read_adapter_settings(write(tmp_path, {"optimizer": {"type": "AdamW", "params": {"betas": [0, 0.999]}}}))
    betas = settings.deepspeed["optimizer"]["params"]["betas"]
    assert betas == [0.0, 0.999] and isinstance(betas[0], float)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected an object"),
        ('{"shard_group": 1, "prefetch": true, "shard_group": 2}', "the key 'shard_group' stands twice"),
        ('{"zero_optimization": {"stage": 2, "stage": 3}}', "the key 'stage' stands twice in one object: keep one"),
        ({"shard_groups": 2}, "unknown key 'shard_groups'"),
        ({"bf16": {"enabled": True}}, "'bf16' is not used here"),
        ({"optimizer": {}}, "unknown key 'optimizer'"),
        ({"zero_optimization": {"stage": 2}}, "stage is 2"),
        ({"zero_optimization": {"stage3_prefetch": 1}}, "zero_optimization.stage3_prefetch"),
        ({"zero_optimization": {"memory_efficient_linear": True}}, "memory_efficient_linear has to be false"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "it needs an optimizer; set shard_group; remove it"),
        ({"zero_optimization": []}, r"zero_optimization is \[\], expected an object"),
        ({"zero_optimization": {"stage": "3"}}, "stage is '3'"),
        ({"zero_optimization": {"leaf_module": {"classes": ["nope.Nope"]}}}, "leaf_module is fixed"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "offload_param.device is 'nvme'"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "no longer be the released one"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "offload_optimizer .* a base has no optimizer",
        ),
        ({"zero_optimization": {"cpu_offload_param": True}}, "cpu_offload_param is not used here: set offload_param"),
        (
            {"zero_optimization": {"reduce_bucket_size": 1000}},
            "reduce_bucket_size .* no effect .* has: leaf_module, mem",
        ),
        ({"zero_optimization": {"overlap_comm": True}}, "overlap_comm is not used here: it has no effect"),
        ({"zero_optimization": {"param_persistence_threshold": 7}}, "stage3_param_persistence_threshold 0"),
        ({"zero_optimization": {"stage3_max_live_parameters": "auto"}}, "is 'auto', which nothing fills in"),
        ({"zero_optimization": {"offload_param": True}}, "zero_optimization.offload_param: "),
        (
            {"zero_optimization": {"offload_param": {"device": "cpu", "nvme_path": "/x"}}},
            "offload_param.nvme_path is not used here: .* what has: device, pin_memory; remove it",
        ),
        ({"zero_optimization": {"offload_param": {"device": "cpu", "buffer_count": 9}}}, "offload_param.buffer_count"),
        (
            {"zero_optimization": {"offload_param": {"device": "cpu", "pin_memory": "no"}}},
            "offload_param.pin_memory is 'no', expected true or false",
        ),
        ({"zero_optimization": {"offload_param": {"pin_memory": True}}}, "whose device is 'cpu', and it is 'none'"),
        ({"prefetch": False, "device_blocks": 3, **HOST}, "device_blocks are those that prefetch brings"),
        ({"shard_group": 1, "device_blocks": 3}, "have no effect with shard_group 1 and no offload_param"),
        ({"shard_group": 1, "prefetch": False}, "have no effect with shard_group 1 and no offload_param"),
        ({"activation_checkpointing": {"pin_memory": True}}, "cpu_checkpointing moves to, which is not on"),
        (
            {"activation_checkpointing": {"pin_memory": False, "cpu_checkpointing": False}},
            "set it true, or remove pin_memory",
        ),
        ({"activation_checkpointing": None}, "activation_checkpointing is None, expected an object"),
        ({"memory_breakdown": "x"}, "memory_breakdown is 'x'"),
        ({"steps_per_print": 10}, "unknown key 'steps_per_print'"),
        ({"comms_logger": {}}, "unknown key 'comms_logger'"),
        ({"shard_group": -1}, "shard_group is -1"),
        ({"prefetch": 1}, "prefetch is 1, expected true or false"),
        ({"device_blocks": 1}, "device_blocks is 1"),
        ({"device_blocks": True}, "device_blocks is True"),
        ({"memory_limit_gib": 0}, "memory_limit_gib is 0"),
        ({"memory_limit_gib": "24"}, "memory_limit_gib is '24'"),
        (
            {
                "zero_optimization": {"offload_param": {"device": "cpu"}},
                "activation_checkpointing": {"policy": "none"},
            },
            "offload_param excludes",
        ),
        ({"shard_group": "node"}, "shard_group is 'node'"),
        ({"train_micro_batch_size_per_gpu": 2}, "has to be 1"),
        ({"activation_checkpointing": {"partition_activations": True}}, "is not applied by rtcwm"),
        ({"activation_checkpointing": {"cpu_checkpoint": True}}, r"unknown keys \['cpu_checkpoint'\]"),
        ({"activation_checkpointing": {"cpu_checkpointing": 1}}, "expected true or false"),
        ({"activation_checkpointing": {"policy": "all"}}, "policy is 'all'"),
        ({"activation_checkpointing": {"policy": "none", "cpu_checkpointing": True}}, "recomputes none"),
        (
            {"activation_checkpointing": {"offload_attention": True, "cpu_checkpointing": True}},
            "policy 'save_attention'",
        ),
        (
            {"activation_checkpointing": {"offload_attention": True, "policy": "save_attention"}},
            "cpu_checkpointing true, or remove it",
        ),
    ],
)
def test_bad_base_configs(tmp_path, config, message):
    path = write(tmp_path, config)
    with pytest.raises(UserError, match=message) as caught:
        read_base_settings(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"gradient_clip": 1.0}, "unknown key 'gradient_clip'"),
        ({"park_moments": "cpu"}, "park_moments is 'cpu', expected true or false"),
        ({"scheduler": {}}, "'scheduler' is not used here"),
        ({"activation_checkpointing": {}}, "unknown key 'activation_checkpointing'"),
        ({"zero_optimization": {"stage": 3}}, "adapter engines use stage 1 or 2"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "offload_optimizer .*: set park_moments"),
        ({"zero_optimization": {"cpu_offload": True}}, "cpu_offload is not used here: set park_moments, "),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "offload_param .* a key of the base's file"),
        (
            {"zero_optimization": {"zero_quantized_gradients": True}},
            "zero_quantized_gradients is not used here: it has",
        ),
        ({"zero_optimization": {"allgather_partitions": False}}, "allgather_partitions is not used here: it has"),
        ({"zero_optimization": {"compute_grad_norm": False}}, "every step logs the norm"),
        ({"zero_optimization": {"reduce_bucket_size": "auto"}}, "is 'auto', which nothing fills in"),
        ({"zero_force_ds_cpu_optimizer": False}, "unknown key 'zero_force_ds_cpu_optimizer'"),
        ({"steps_per_print": "x"}, "steps_per_print is 'x'"),
        ({"optimizer": {"type": "Adam"}}, "expected {'type': 'AdamW'"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}, "comes from the command line"),
        ({"optimizer": {"type": "AdamW", "params": {"beta": []}}}, r"unknown optimizer params \['beta'\]"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}}, "expected two numbers"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0"),
        ({"gradient_clipping": -1}, "gradient_clipping is -1"),
        ({"gradient_clipping": math.nan}, "gradient_clipping is nan"),
        ({"tensorboard": {"enabled": True}}, "writes its own events into --out"),
        ({"optimizer": []}, r"optimizer is \[\], expected an object"),
        ({"optimizer": {"type": "AdamW", "params": None}}, "params is None, expected an object"),
        ({"optimizer": {"type": "AdamW", "params": {"eps": -1}}}, "eps is -1"),
        ({"optimizer": {"type": "AdamW", "params": {"weight_decay": "x"}}}, "weight_decay is 'x'"),
    ],
)
def test_bad_adapter_configs(tmp_path, config, message):
    with pytest.raises(UserError, match=message):
        read_adapter_settings(write(tmp_path, config))


def test_settings_come_from_flags_and_files(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("out: there\nlr: 1e-3\nval_clips: 1\n")
    config = parse("x", TrainConfig, ["--config", str(file), "--lr", "2e-3", "--local_rank=1"])
    assert (config.out, config.lr, config.val_clips, config.steps) == ("there", 2e-3, 1, None)


@pytest.mark.parametrize(
    "arguments", [["--out", "x", "--lrr", "1"], ["--out", "x", "--lr", "fast"], ["--out", "x", "--picture1", "4096"]]
)
def test_unknown_flags_and_types_end_with_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        parse("x", TrainConfig, arguments)
    assert caught.value.code == 2


def test_an_unknown_key_in_the_settings_file_is_named(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text("out: there\nlearning_rate: 1e-3\n")
    with pytest.raises(SystemExit) as caught:
        parse("x", TrainConfig, ["--config", str(file)])
    assert caught.value.code == 2 and "learning_rate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "--out is required"),
        ({"steps": 0}, "--steps 0"),
        ({"save_every": 0}, "--save-every 0"),
        ({"warmup": -1}, "--warmup -1"),
        ({"lr": 0.0}, "--lr 0.0"),
        ({"seed": 2**70}, "expected less than 2"),
        ({"lr": math.nan}, "--lr nan"),
        ({"lr_min": 1.0}, "--lr-min 1.0"),
        ({"level_shift": 0.5}, "--level-shift 0.5"),
        ({"rank": 4, "init_lora": "x"}, "drop one"),
    ],
)
def test_settings_that_make_no_sense(arguments, message):
    with pytest.raises(UserError, match=message):
        TrainConfig(**({"out": "x"} if arguments else {}) | arguments)


def test_learning_rate_warms_up_and_ends_at_its_minimum():
    rates = [learning_rate(step, 30, 2e-5, 1e-6, 10) for step in range(30)]
    assert rates[:3] == pytest.approx([2e-6, 4e-6, 6e-6])
    assert rates[9] == rates[10] == 2e-5
    assert rates[-1] == pytest.approx(1e-6)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    middle = 1e-6 + (2e-5 - 1e-6) * (1 + math.cos(math.pi * 5 / 19)) / 2
    assert rates[15] == pytest.approx(middle)
    assert learning_rate(0, 5, 2e-5, 1e-6, 0) == 2e-5  # no warm-up
    assert learning_rate(0, 1, 2e-5, 1e-6, 0) == 2e-5


def test_launcher_options_are_found_before_the_program():
    words = [
        "python3",
        "/venv/bin/deepspeed",
        "--hostfile",
        "hosts",
        "--module",
        "rtcwm.train.train",
        "--num_gpus",
        "3",
    ]
    assert _option(words, ("-H", "--hostfile")) == "hosts"
    assert _option(words, ("--num_gpus",)) is None
    assert _option(["python3", "deepspeed", "--hostfile=h", "x.py"], ("--hostfile",)) == "h"


CHECK = """
import sys
from rtcwm.engine.world import check_hostfile
from rtcwm.errors import UserError
for size in (4, 2):
    try:
        check_hostfile(size)
        print(size, "accepted")
    except UserError as error:
        print(size, error)
"""


def test_a_hostfile_that_asks_for_other_ranks_is_an_error(tmp_path):
    """Below a process that was started as the launcher is, with four slots in its hostfile."""
    (tmp_path / "hosts").write_text("node-a slots=2\nnode-b slots=2\n")
    (tmp_path / "check.py").write_text(CHECK)
    launcher = tmp_path / "deepspeed"
    launcher.write_text("import subprocess, sys; subprocess.run([sys.executable, 'check.py'], check=True)")
    words = [sys.executable, str(launcher), "--hostfile", "hosts", "--module", "rtcwm.train.train"]
    output = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "4 accepted" in output
    assert "2 hosts asks for 4 ranks (2 nodes), and 2 were started" in output
