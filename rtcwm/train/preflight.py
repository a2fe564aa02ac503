"""Everything that can be wrong with a run's input, checked before anything heavy.

The checks read headers, configs and metadata, never weights. Each node reads its own files; an error on any rank ends
all of them with one message. Both programs build their plans from these checks, and open their base by what is checked.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rtcwm import __version__
from rtcwm.data.clips import Clip, open_clips
from rtcwm.data.codec import TEXT_DIM, load_codec
from rtcwm.data.make import CLIPS_AN_EPISODE, write_world
from rtcwm.data.manifest import clip_hash
from rtcwm.engine.base import BaseEngine, shard_group_size
from rtcwm.engine.device import compute_dtype
from rtcwm.engine.settings import (
    AdapterSettings,
    BaseSettings,
    default_base_config,
    read_adapter_settings,
    read_base_settings,
    shipped_config,
)
from rtcwm.engine.world import World
from rtcwm.errors import SharedError, UserError, require
from rtcwm.model.adapter_files import load_adapter
from rtcwm.model.adapter_reader import open_adapter
from rtcwm.model.attention import install
from rtcwm.model.kernels import Kernel, resolve
from rtcwm.model.layout import SPAN_CHUNKS
from rtcwm.model.loading import BaseSource, embedded_adapter, open_base
from rtcwm.model.lora import Adapter, AdapterShape
from rtcwm.model.packing import Layout, Window
from rtcwm.train.adaln import level_grid, open_table
from rtcwm.train.base_memory import check_base_room
from rtcwm.train.config import RunConfig
from rtcwm.train.dataset import load_window, start_frames
from rtcwm.train.folder import RunFolder

DEFAULT_RANK = 128
EMBEDDED_CLIPS, EMBEDDED_CHUNKS = 12, 16


@dataclass(frozen=True)
class Inputs:
    """What both programs run on.

    Attributes:
        clips: of training and validation; codec_hash: of all of them.
        span: of six chunks, the first of the first clip: what sizes are read from.
        grid: steps of the grid that noise levels are drawn on; None: any level, AdaLN is computed live.
    """

    world: World
    source: BaseSource
    base_settings: BaseSettings
    kernel: Kernel
    clips: Sequence[Clip]
    codec_hash: str
    span: Window
    grid: int | None

    @property
    def layout(self) -> Layout:
        """Of a six-chunk span, in stream order."""
        return self.span.layout(stream=True)

    def lines(self) -> list[str]:
        """What is printed of them before the first step."""
        world = self.world
        return [
            f"base: {self.source.description}, {self.source.fingerprint}",
            f"world: {world.size} ranks, {world.local_size} on this node, {world.device.type}; "
            f"shard group: {shard_group_size(world, self.base_settings)}",
            f"rows a span: {self.layout.rows:,} (first clip)",
            self.kernel.why,
            f"noise levels: {'any, AdaLN is computed live' if self.grid is None else f'multiples of 1/{self.grid}'}",
        ]

    def open_base(self, config: RunConfig, levels: Tensor) -> BaseEngine:
        """The base with its attention, its AdaLN from a table where `grid` says so. A collective.

        Args:
            levels: noise levels that the run needs besides the grid's, such as a schedule's.
        """
        table = open_table(self.world, config, self.source, self.grid, levels)
        base = BaseEngine(self.world, self.source, self.base_settings, table)
        install(base.model, self.kernel, ffn_rows=self.base_settings.activations.ffn_rows)
        return base

    def needs(self, batch: int) -> dict:
        """What both programs' needs of memory have in common, see `rtcwm.train.memory`."""
        world, settings = self.world, self.base_settings
        return {
            "config": self.source.config, "dtype": compute_dtype(world.device),
            "table": self.grid is not None, "shard": shard_group_size(world, settings), "ranks": world.size,
            "settings": settings, "layout": self.layout, "batch": batch,
        }  # fmt: skip

    def metadata(self, mask_rule: str, picture1: str) -> dict[str, str]:
        """What every adapter file of a run says of its inputs."""
        return {
            "rtcwm": __version__, "base": self.source.fingerprint,
            "base_description": Path(self.source.description).resolve().name,  # a folder's name alone
            "codec": self.codec_hash, "span": str(SPAN_CHUNKS), "mask_rule": mask_rule, "picture1": picture1,
            "text_time": "pinned",
        }  # fmt: skip


def check_settings(world: World, config: RunConfig) -> tuple[BaseSource, BaseSettings, Kernel]:
    """What needs no clips: the base engine's file, the shard group, the base's files, host memory for them, the
    attention kernel; and whether the embedded clips, where they are still to be made, would do."""
    file = Path(config.base_config) if config.base_config else default_base_config(world.device)
    settings = read_base_settings(file)
    shard = shard_group_size(world, settings)
    source = open_base(config.base)
    if config.clips == "embedded":
        require(
            source.config["text_dim"] == TEXT_DIM,
            f"--clips embedded has text of width {TEXT_DIM}, the base takes {source.config['text_dim']}: name "
            "prepared clips",
        )
        most = EMBEDDED_CLIPS - CLIPS_AN_EPISODE
        require(
            config.val_clips <= most,
            f"--val-clips {config.val_clips} would hold out every one of the {EMBEDDED_CLIPS} embedded clips: at most "
            f"{most}",
        )
    table = level_grid(config, source) is not None
    check_base_room(source, world.device, settings, table, shard, world.local_size)
    kernel = resolve(config.attn, world.device, config.compile)
    require(
        settings.activations.policy != "save_attention" or kernel.forward is not None,
        f"{file}: activation_checkpointing.policy 'save_attention' cannot keep outputs of --attn {kernel.name}, which "
        "gives no logsumexp: choose another kernel, or the policy 'recompute'",
    )
    return source, settings, kernel


def adapter_settings(config: str | None) -> AdapterSettings:
    """An adapter engine's file, the shipped one by default."""
    return read_adapter_settings(Path(config) if config else shipped_config("adapter"))


def clip_root(world: World, clips: str, out: str) -> Path:
    """The folder of clips; the embedded world's are made once a node, in the run's folder. A collective."""
    if clips != "embedded":
        return Path(clips)
    root = Path(out) / "clips"

    def make() -> None:
        if world.local_rank == 0:
            write_world(root, EMBEDDED_CLIPS, EMBEDDED_CHUNKS, seed=0)

    world.on_all(make)
    return root


def read_inputs(
    world: World, config: RunConfig, source: BaseSource, settings: BaseSettings, kernel: Kernel, root: Path
) -> Inputs:
    """Opens the clips and holds them against the base.

    Raises:
        UserError: clips that cannot be read, of another codec than the embedded base's, or with other text than the
            base takes.
    """
    clips = open_clips(root)
    codec, expected = clips[0].codec, load_codec().identity
    if config.base == "embedded" and codec["hash"] != expected["hash"]:
        raise UserError(
            f"clip {clips[0].id} was made by codec {codec}, the embedded base reads {expected}: make the clips again "
            "with `rtcwm world`, or name the base that goes with them with --base"
        )
    first = next((clip for clip in clips if clip.chunks >= SPAN_CHUNKS), None)
    if first is None:
        raise UserError(f"{root}: no clip has the {SPAN_CHUNKS} chunks of a span; prepare longer clips")
    window = load_window(first, 0, start_frames(first)[0], picture1=config.picture1)
    width = window.text.shape[2]
    if width != source.config["text_dim"]:
        raise UserError(
            f"clip {first.id} has text of width {width}, the base takes {source.config['text_dim']}: the clips were "
            "prepared with another text encoder than this base's"
        )
    return Inputs(world, source, settings, kernel, clips, codec["hash"], window, level_grid(config, source))


def adapter_path(name: str | None, base: str, default: str) -> str | None:
    """The file that an adapter flag names: itself, "released" for the embedded base's own, None for "none".

    Args:
        name: as given, or None; base: ``--base``; default: what None stands for on another base than the embedded one,
            whose default is "released".

    Raises:
        UserError: "released" on another base.
    """
    name = name or ("released" if base == "embedded" else default)
    if name == "released":
        if base != "embedded":
            raise UserError(
                "'released' names the embedded base's own adapter; on another --base name the adapter's file"
            )
        return str(embedded_adapter())
    return None if name == "none" else name


def check_adapter(path: str, source: BaseSource, **expected: str | None) -> AdapterShape:
    """Holds an adapter file against a base and against expected metadata (None: no expectation).

    What the file does not say is accepted: adapters of other trainers carry no such metadata.

    Raises:
        UserError: the file, its shapes, its values, its base or one of the expected entries does not fit.
    """
    file = open_adapter(Path(path))
    shape, metadata = file.shape(source.config), file.metadata
    file.check_values()
    if metadata.get("base") not in (None, source.fingerprint):
        raise UserError(
            f"{path} was trained on base {metadata['base']} ({metadata.get('base_description', 'no description')}); "
            f"--base is {source.description}, {source.fingerprint}"
        )
    for key, value in expected.items():
        if value is not None and metadata.get(key) not in (None, value):
            raise UserError(f"{path} was made with {key} {metadata[key]}, this run has {value}: they must agree")
    return shape


def read_adapter(world: World, path: str, source: BaseSource) -> Adapter:
    """Loads an adapter on every rank; an error on one is raised on all. A collective."""
    return world.on_all(lambda: load_adapter(Path(path), source.config))


def new_adapter_shape(source: BaseSource, rank: int | None) -> AdapterShape:
    """Shape of a new adapter: rank 128, or a quarter of a narrower base's width, unless one is asked for."""
    return AdapterShape.of(source.config, rank or min(DEFAULT_RANK, source.config["hidden_size"] // 4))


def digest(clips: Sequence[Clip], samples: object) -> str:
    """Hash of what a run trains on: the clips' identities and its list of samples."""
    state = hashlib.blake2b(digest_size=16)
    for clip in sorted(clips, key=lambda clip: clip.id):
        state.update(repr((clip.id, clip.chunks, clip.episode, clip.starts, sorted(clip.flagged))).encode())
    state.update(repr(samples).encode())
    return state.hexdigest()


def claim(
    world: World,
    config: RunConfig,
    engines: Mapping,
    identity: Mapping,
    clips: Sequence[Clip],
    held_out: Sequence[Clip],
) -> None:
    """Compares the run's settings and identity across ranks and claims its folder. A collective; see `RunFolder.claim`.

    ``engines`` are numbers of the JSON files that all ranks must share though they may change on resume. Contents of
    the clips count too: one rank of every node hashes a sample of their bytes (`manifest.clip_hash`).
    """
    paths = ("out", "clips", "base", "adaln_dir") + tuple(
        name for name in vars(config) if name.endswith(("_lora", "_config"))
    )
    decisive = {name: value for name, value in vars(config).items() if name not in paths}
    world.same("settings", decisive | dict(engines))
    world.same("base, clips or samples", identity)
    contents = world.gather(_contents(clips) if world.local_rank == 0 else None)
    for rank, found in enumerate(contents):
        if found not in (None, contents[0]):
            raise SharedError(
                f"the clips that rank {rank} reads have other contents than those of rank 0: copy them again"
            )
    folder = RunFolder(config.out)
    if world.on_main(lambda: folder.claim(config, {**identity, "contents": contents[0]})):
        world.print(f"continuing the run in {config.out}")
        return
    held = [{"clip": clip.id, "episode": clip.episode} for clip in held_out]
    world.on_main(lambda: folder.write_json("val_samples.json", held))


def file_hash(path: str | None) -> str | None:
    """Hash of an adapter's whole file, or None for no file."""
    return None if path is None else open_adapter(Path(path)).hash


def _contents(clips: Sequence[Clip]) -> str:
    """Hash over a sample of the bytes of every clip."""
    state = hashlib.blake2b(digest_size=16)
    for clip in sorted(clips, key=lambda clip: clip.id):
        state.update(clip_hash(clip.path).encode())
    return state.hexdigest()
