"""What of a base's files a rank reads: each tensor once a shard group, by its first rank."""

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from ranks import run_ranks
from safetensors.torch import load_file
from small import CONFIG

from rtcwm.engine.base import BaseEngine
from rtcwm.engine.settings import read_base_settings
from rtcwm.model.loading import FolderSource


def readings(world, folder, settings) -> dict:
    """Bytes that this rank read of every tensor, and the sum over the base that it then has a part of."""
    found: dict[str, list[int]] = {}

    class Counted(FolderSource):
        def fill(self, name: str, target: torch.Tensor) -> None:
            super().fill(name, target)
            found.setdefault(name, []).append(target.numel() * target.element_size())

    base = BaseEngine(world, Counted(folder), settings)
    return {"rank": world.rank, "read": found, "elements": sum(p.ds_numel for p in base.model.parameters())}


@pytest.mark.parametrize("size, group", [(2, 2), (4, 2), (2, 1)])
def test_every_tensor_is_read_once_a_shard_group(tmp_path, size, group):
    torch.manual_seed(2)
    MiniMaxH3Transformer3DModel(**CONFIG).save_pretrained(tmp_path / "h3", max_shard_size="100KB")
    files = sorted((tmp_path / "h3").glob("*.safetensors"))
    assert len(files) > 2
    whole = {name: [4 * value.numel()] for file in files for name, value in load_file(file).items()}
    config = tmp_path / "base.json"
    config.write_text(f'{{"shard_group": {group}}}')
    results = run_ranks(size, readings, tmp_path / "h3", read_base_settings(config))
    for result in results:
        assert result["read"] == (whole if result["rank"] % group == 0 else {}), result["rank"]
        assert 4 * result["elements"] == sum(count for (count,) in whole.values())
