"""Whether a run takes the AdaLN of its blocks from a table (`rtcwm.model.modulation`), and the table found or made."""

import os
from pathlib import Path

import torch

from rtcwm.engine.device import compute_dtype
from rtcwm.engine.world import World
from rtcwm.model.loading import SEEDED_ON_HOST, BaseSource, parameter_count
from rtcwm.model.modulation import AdalnTable, ensure_table, grid_times, table_bytes
from rtcwm.model.objectives import model_time
from rtcwm.train.config import RunConfig

LARGE_BASE = SEEDED_ON_HOST
"""Bases of more parameters than this take a table by default; smaller ones gain nothing that counts."""


def takes_table(adaln: str, source: BaseSource) -> bool:
    """Whether ``--adaln`` means a table for this base."""
    return adaln == "table" or adaln == "auto" and parameter_count(source.config) > LARGE_BASE


def level_grid(config: RunConfig, source: BaseSource) -> int | None:
    """Steps of the grid on which a run draws its noise levels; None where AdaLN is computed live, at any level."""
    return config.adaln_times if takes_table(config.adaln, source) else None


def table_folder(adaln_dir: str | None) -> Path:
    """Where tables are kept: ``--adaln-dir``, or the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(adaln_dir) if adaln_dir else Path(cache) / "rtcwm"


def open_table(
    world: World, config: RunConfig, source: BaseSource, grid: int | None, levels: torch.Tensor
) -> AdalnTable | None:
    """The table of a run, on every rank; one rank of a node computes what its folder lacks. A collective.

    Args:
        grid: from `level_grid`; None gives None.
        levels: noise levels that the run needs besides the grid's, such as a schedule's.

    Raises:
        UserError: a damaged or foreign file, or a folder that cannot be written; on all ranks.
    """
    if grid is None:
        return None
    folder = table_folder(config.adaln_dir)
    dtype = compute_dtype(world.device)
    times = grid_times(grid, model_time(levels).tolist())
    size = table_bytes(source.config, len(times), dtype)
    world.print(
        f"AdaLN: a table of {len(times):,} model times ({size:,} bytes) in {folder}; what is missing is computed"
    )

    def make() -> int:
        if world.local_rank:
            return 0
        return ensure_table(folder, source, times, dtype, world.device)[1]

    made = world.on_all(make)
    if made:
        world.print(f"AdaLN: {made:,} model times computed")
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    return world.on_all(
        lambda: AdalnTable(ensure_table(folder, source, times, dtype, world.device)[0], source, dtype, world.device)
    )
