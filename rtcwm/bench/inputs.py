"""What a benchmark runs on, made on the spot: the config of a base, clips of noise, and their sizes.

The numbers mean nothing; their shapes, types and files are those of real ones, so the real programs take them.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rtcwm.bench.command import Sized, TwoSides
from rtcwm.bench.work import Sizes
from rtcwm.data.world import proxy_size
from rtcwm.data.write import Start, write_clip
from rtcwm.engine.world import World
from rtcwm.errors import UserError
from rtcwm.model.layout import (
    CHUNK_LATENTS,
    LATENT_CHANNELS,
    SPAN_CHUNKS,
    TEXT_TAG,
    Geometry,
    audio_latents,
    frames_of,
)
from rtcwm.model.loading import EMBEDDED, read_config
from rtcwm.model.lora import Adapter, AdapterShape
from rtcwm.model.packing import Layout, stream_layout
from rtcwm.train.preflight import DEFAULT_RANK

CODEC = {"name": "noise", "hash": "0" * 32}
UP_SIZE = 0.05
"""Of a random adapter's output, about, where its input is of size one: enough to tell adapters apart."""


@dataclass(frozen=True)
class Case:
    """One size to measure.

    Attributes:
        config: of the base, with the blocks that are used; whole_layers: blocks of the base as it is described.
        rank: of the adapters; layout: of one six-chunk span.
    """

    config: dict
    whole_layers: int
    described: str
    geometry: Geometry
    text_rows: int
    rank: int
    layout: Layout

    @classmethod
    def of(cls, settings: Sized) -> "Case":
        """Raises UserError for a base that is not there, more blocks than it has, or sizes that cannot be packed."""
        described, config = base_config(settings.base)
        whole = config["num_layers"]
        layers = settings.layers or whole
        if layers > whole:
            raise UserError(f"--layers {layers}: the base has {whole} blocks")
        proxy = proxy_size(settings.height, settings.width)
        geometry = Geometry.from_pixels(settings.height, settings.width, *proxy)
        picture = (geometry.height, geometry.width)
        audio = audio_latents(frames_of(SPAN_CHUNKS * CHUNK_LATENTS))
        layout = stream_layout(geometry, picture, SPAN_CHUNKS, (TEXT_TAG,) * settings.text_rows, audio)
        rank = settings.rank or min(DEFAULT_RANK, config["hidden_size"] // 4)
        return cls(
            config | {"num_layers": layers}, whole, described, geometry, settings.text_rows, rank, layout
        )  # fmt: skip

    @property
    def sizes(self) -> Sizes:
        return Sizes.of(self.config, self.rank)

    def as_dict(self) -> dict:
        """What the report says of the case."""
        return {
            "base": self.described, "layers": self.config["num_layers"], "whole_layers": self.whole_layers,
            "height": self.geometry.height * 16, "width": self.geometry.width * 16, "text_rows": self.text_rows,
            "rank": self.rank, "adapter_parameters": self.sizes.adapter, "rows": self.layout.rows,
            "static_rows": self.layout.static,
        }  # fmt: skip

    def line(self) -> str:
        """The case in words."""
        layers = self.config["num_layers"]
        part = "" if layers == self.whole_layers else f"; ONLY {layers} of {self.whole_layers} blocks are used"
        told = self.as_dict()
        return (
            f"{self.described}, random weights, {layers} blocks{part}; {told['width']}x{told['height']}, "
            f"{self.text_rows} text rows, {self.layout.rows:,} rows a span; rank {self.rank} "
            f"({self.sizes.adapter:,} parameters)"
        )


def base_config(base: str | None) -> tuple[str, dict]:
    """What a base is called, and its config with defaults filled in."""
    if base is None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text("{}")
            return "MiniMax-H3 (33.1B)", read_config(path)
    if base == "embedded":
        return "embedded base", read_config(EMBEDDED / "embedded_base" / "config.json")
    path = Path(base)
    if path.suffix != ".json":
        raise UserError(f"--base {base}: expected a config .json or 'embedded'; weights are random in a benchmark")
    return path.name, read_config(path)


@dataclass(frozen=True)
class Files:
    """Files of a case on disk: the base's config, a folder that holds one clip, and a place for more; ``adaln`` is the
    folder of the AdaLN table, one for all ranks."""

    base: Path
    clips: Path
    root: Path
    adaln: Path

    @property
    def run(self) -> Path:
        """The folder of a run, not made yet."""
        return self.root / "run"


def shared_settings(settings: TwoSides, made: Files) -> dict:
    """What the programs' own settings (`RunConfig`) take from the flags."""
    return {
        "out": str(made.run), "clips": str(made.clips), "base": str(made.base), "val_clips": 0, "seed": settings.seed,
        "batch": settings.batch, "base_config": settings.base_config, "attn": settings.attn,
        "compile": settings.compile, "adaln": settings.adaln, "adaln_times": settings.adaln_times,
        "adaln_dir": settings.adaln_dir or str(made.adaln),
    }  # fmt: skip


@contextmanager
def rank_files(world: World, case: Case, chunks: int, seed: int) -> Iterator[Files]:
    """`files` of a program, on every rank its own, but for one folder for the AdaLN table; a collective."""
    with files(case, chunks, seed, world.size) as made:
        yield replace(made, adaln=world.on_main(lambda: made.adaln))


@contextmanager
def files(case: Case, chunks: int, seed: int, ranks: int) -> Iterator[Files]:
    """The case as files in a temporary folder: a base config, and a clip in which a window of so many chunks begins
    at as many start frames as there are ranks. The same whenever it is called."""
    with tempfile.TemporaryDirectory(prefix="rtcwm-bench-") as folder:
        root = Path(folder)
        (root / "base.json").write_text(json.dumps(case.config))
        draw = torch.Generator().manual_seed(seed)
        geometry, latents = case.geometry, (chunks + ranks - 1) * CHUNK_LATENTS

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=draw)

        start = Start(
            picture1=noise(LATENT_CHANNELS, 1, geometry.height, geometry.width),
            text=noise(case.text_rows, case.config["text_dim"]),
            text_tags=torch.full((case.text_rows,), TEXT_TAG),
            caption="noise",
        )
        video = noise(LATENT_CHANNELS, latents, geometry.height, geometry.width)
        proxy = noise(LATENT_CHANNELS, latents, geometry.proxy_height, geometry.proxy_width)
        write_clip(root / "clips", "noise", video, proxy, dict.fromkeys(range(ranks), start), "noise", CODEC)
        yield Files(root / "base.json", root / "clips", root, root / "adaln")


def random_adapter(case: Case, seed: int) -> Adapter:
    """An adapter that does something: random in both projections, frozen, on the CPU."""
    adapter = Adapter(AdapterShape.of(case.config, case.rank), seed).requires_grad_(False)
    draw = torch.Generator().manual_seed(seed + 1)
    for pair in adapter.pairs():
        pair.up.normal_(0.0, UP_SIZE / case.rank**0.5, generator=draw)
    return adapter
