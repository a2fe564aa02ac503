"""Several adapters in one pass over the base: what each part of the batch gets, what it moves, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from small import CONFIG, random_adapter, random_window, small_model

from rtcwm.model.adapter_files import save_adapter
from rtcwm.model.attention import install, make_attend, resolve
from rtcwm.model.block import feed_forward
from rtcwm.model.blocks import predict_velocity
from rtcwm.model.lora import Adapter, AdapterShape, inject
from rtcwm.train.config import DistillConfig
from rtcwm.train.distill import Distiller
from rtcwm.train.distill_plan import prepare
from rtcwm.train.draws import Draws

KERNEL = resolve("sdpa", "cpu")


def adapter(seed: int, rank: int, alpha: float, config: dict = CONFIG) -> Adapter:
    """One of a rank and a scale of its own."""
    return random_adapter(AdapterShape.of(config, rank, alpha), seed, size=0.2)


def velocity(model, slot, adapters, batch: int = 1, stream: bool = False) -> torch.Tensor:
    window = random_window(10, batch=batch)
    layout = window.layout(stream=stream)
    times = torch.tensor([0.3, 0.8]) if stream else torch.tensor(0.4)
    attend = make_attend(KERNEL, layout, "E") if stream else None
    with slot.bind(*adapters), torch.no_grad():
        text_time = "pinned" if stream else "video"
        return predict_velocity(model, window, layout, times, attend, text_time, copies=len(adapters))


@pytest.mark.parametrize("ffn_rows", [0, 17])
@pytest.mark.parametrize("stream", [False, True])
def test_each_part_of_the_batch_equals_a_pass_of_its_own(ffn_rows, stream):
    """Ranks and scales differ, and one part has no adapter; rows of the feed-forward cut across the parts' bound."""
    model = small_model()
    install(model, KERNEL, ffn_rows=ffn_rows)
    slot, adapters = inject(model), (adapter(1, 4, 6.0), None, adapter(2, 3, 3.0))
    alone = [velocity(model, slot, (one,), batch=2, stream=stream) for one in adapters]
    together = velocity(model, slot, adapters, batch=2, stream=stream)
    assert torch.equal(together, torch.cat(alone))
    assert not torch.allclose(alone[0], alone[2], atol=1e-2)


def test_equal_rows_are_needed_and_no_graph_is_made():
    model = small_model()
    install(model, KERNEL)
    slot, pair = inject(model), (adapter(1, 4, 4.0), adapter(2, 4, 4.0))
    rows = torch.zeros(1, 3, CONFIG["hidden_size"])
    layer = model.transformer_blocks[0].attn.to_qkv
    with slot.bind(*pair):
        with torch.no_grad(), pytest.raises(ValueError, match="3 rows in 2 equal parts"):
            layer(rows)
        with pytest.raises(RuntimeError, match="no gradient together"):
            layer(rows[:, :2])
    with slot.bind(*pair), pytest.raises(RuntimeError, match="no gradient together"):
        feed_forward(model.transformer_blocks[0].ff, rows[:, :2], False, 2)


def scored(world, options: dict, base: dict, settings: tuple[str, ...], folder: str) -> dict:
    """For each value of the setting: this rank's scores of one rollout's window, the passes, and what they moved."""
    found = {}
    for joint in settings:
        path = Path(folder) / f"{joint}{world.rank}.json"
        path.write_text(json.dumps(base))
        out = str(Path(folder) / joint)
        config = DistillConfig(**options, joint_scores=joint, base_config=str(path), out=out)
        trainer = Distiller(world, config, prepare(world, config))
        visits = [trainer.sampler.next(world.rank) for _ in range(config.batch)]
        with torch.no_grad():
            _, rolled = trainer._roll_out(visits, Draws(8, (0,) * 8))
        window = trainer.teacher.window(rolled, 0)
        carrier = trainer.base.carrier
        before = (carrier.fetches, carrier.moved_bytes) if carrier else None
        scores = trainer._score(visits, window, 0)
        after = (carrier.fetches, carrier.moved_bytes) if carrier else None
        moved = tuple(b - a for a, b in zip(before, after)) if carrier else None
        found[joint] = {"scores": scores, "passes": len(trainer.run_scores), "moved": moved}
        trainer.record.close()
    return found


HOST = {"shard_group": 1, "zero_optimization": {"offload_param": {"device": "cpu"}}}
BASES = {
    "whole": (1, {"shard_group": 1}), "each": (2, {"shard_group": 1}), "shared": (2, {"shard_group": 2}),
    "host": (1, HOST),
}  # fmt: skip
DEEP = CONFIG | {"num_layers": 4, "text_dim": 64}  # more blocks than the device holds of a base in parts


@pytest.mark.parametrize("name", BASES)
def test_joint_scores_are_those_of_two_passes(name, clips_root, tmp_path):
    """Bit for bit, and each block fetched once where it was fetched twice; "auto" is joint where blocks are fetched."""
    ranks, base = BASES[name]
    fetched = name in ("shared", "host")
    settings = ("auto", "off") if fetched else ("on", "auto")
    options = {
        "clips": str(clips_root), "base": str(tmp_path / "base.json"), "val_clips": 1, "min_chunks": 8, "max_chunks": 8,
        "batch": 2,
    }  # fmt: skip
    Path(options["base"]).write_text(json.dumps(DEEP))
    for seed, role in enumerate(("student", "teacher", "critic")):
        options[f"{role}_lora"] = str(tmp_path / f"{role}.safetensors")
        save_adapter(Path(options[f"{role}_lora"]), adapter(seed, 4 + seed, 4.0, DEEP), {})
    for found in run_ranks(ranks, scored, options, base, settings, str(tmp_path)):
        joint, apart = (found[setting] for setting in settings)
        assert (joint["passes"], apart["passes"]) == (1, 2)
        for one, other in zip(joint["scores"], apart["scores"], strict=True):
            assert torch.equal(one, other)
        assert not torch.equal(*joint["scores"])
        if fetched:
            (once, once_bytes), (twice, twice_bytes) = joint["moved"], apart["moved"]
            assert (once, twice) == (DEEP["num_layers"], 2 * DEEP["num_layers"]) and 2 * once_bytes == twice_bytes > 0
        else:
            assert joint["moved"] is apart["moved"] is None
