"""What a stream runs on, checked by headers, configs and metadata, and then built."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import MiniMaxH3Transformer3DModel

from rtcwm.engine.base import BaseEngine
from rtcwm.engine.device import compute_dtype
from rtcwm.engine.settings import BaseSettings, read_base_settings
from rtcwm.engine.world import World
from rtcwm.errors import UserError
from rtcwm.model.adapter_files import load_adapter, read_metadata
from rtcwm.model.attention import install
from rtcwm.model.blocks import Run
from rtcwm.model.kernels import Kernel, resolve
from rtcwm.model.layout import CLEAN_TIME, REFERENCE_TIME, SPAN_CHUNKS
from rtcwm.model.loading import BaseSource, build_base, open_base
from rtcwm.model.lora import Adapter, inject
from rtcwm.model.modulation import AdalnTable, ensure_table, grid_times
from rtcwm.model.objectives import model_time
from rtcwm.model.sampler import Stream
from rtcwm.stream.command import Opening
from rtcwm.stream.live import LiveStream
from rtcwm.stream.origin import Origin, open_origin
from rtcwm.train.adaln import table_folder, takes_table
from rtcwm.train.base_memory import check_base_room
from rtcwm.train.inference import Sampling, chosen_device, clip_noise, read_sampling, usual_kind
from rtcwm.train.preflight import adapter_path, check_adapter


@dataclass(frozen=True)
class Plan:
    """Checked inputs of a stream.

    Attributes:
        adapter: its file, None for the base alone; objective: what that says it was trained for.
        kind: "many" or "few"; picture1: which Picture 1 the adapter takes.
        base: settings of a base engine, None for a base that is whole on the device.
    """

    opening: Opening
    device: torch.device
    source: BaseSource
    adapter: str | None
    objective: str
    kind: str
    sampling: Sampling
    picture1: str
    kernel: Kernel
    base: BaseSettings | None
    origin: Origin

    def lines(self) -> list[str]:
        """What is printed before the first chunk."""
        told = f" ({self.objective})" if self.objective else ""
        lines = [
            f"base: {self.source.description}, {self.source.fingerprint}",
            f"adapter: {self.adapter or 'none'}{told}; {self.kind}, {self.sampling.line()}",
            self.origin.line(),
            f"device: {self.device.type}; {self.kernel.why}",
        ]
        if self.adapter and usual_kind(self.objective) == "teacher":
            lines.append("note: the adapter's file does not say that it was trained to stream")
        return lines

    def load(self) -> LiveStream:
        """Reads the weights and opens the stream; the text encoder, where one is needed, comes and goes first."""
        given, pixels = self.origin.open(self.picture1, self.device)
        width, expected = given.text.shape[2], self.source.config["text_dim"]
        if width != expected:
            raise UserError(
                f"the text encoder gives rows of width {width}, the base takes {expected}: name another one"
            )
        adapter = load_adapter(Path(self.adapter), self.source.config) if self.adapter else None
        if adapter is not None:
            adapter.requires_grad_(False).to(self.device, compute_dtype(self.device))
        model, run = self._whole(adapter) if self.base is None else self._engine(adapter)
        install(model, self.kernel, ffn_rows=self.base.activations.ffn_rows if self.base else 0)
        noise = clip_noise(self.opening.seed, [self.origin.name])
        stream = Stream(model, self.kernel, given, self.sampling, noise, run)
        return LiveStream(stream, pixels, self.device, self._leave)

    def _whole(self, adapter: Adapter | None) -> tuple[MiniMaxH3Transformer3DModel, Run]:
        table = self._table()
        model = build_base(self.source, self.device, compute_dtype(self.device), adaln=table and table.stand_in)
        return model, inject(model).runner(adapter)

    def _engine(self, adapter: Adapter | None) -> tuple[MiniMaxH3Transformer3DModel, Run]:
        engine = BaseEngine(World.start(), self.source, self.base, self._table())
        engine.activations.measure(False)  # nobody asks for the waits of a stream, and their events would pile up
        return engine.model, engine.activations.runner(adapter)

    def _table(self) -> AdalnTable | None:
        """Of the few model times that the schedule needs, which a run's table may hold already."""
        if not takes_table(self.opening.adaln, self.source):
            return None
        levels = torch.stack([*self.sampling.sigmas, self.sampling.history_level(1)])
        times = grid_times(1, [*model_time(levels).tolist(), REFERENCE_TIME, CLEAN_TIME])
        dtype = compute_dtype(self.device)
        paths, _ = ensure_table(table_folder(self.opening.adaln_dir), self.source, times, dtype, self.device)
        return AdalnTable(paths, self.source, dtype, self.device)

    def _leave(self) -> None:
        if self.base is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def prepare(opening: Opening) -> Plan:
    """Checks all that can be told before a weight is read.

    Raises:
        UserError: any of it does not fit.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("a stream runs on one rank: start it without a launcher")
    source = open_base(opening.base_name)
    base = read_base_settings(Path(opening.base_config)) if opening.base_config else None
    device = chosen_device(opening.device)
    if base is not None and device.type != chosen_device("auto").type:
        raise UserError("--device cpu with --base-config: a base engine runs on the GPU where there is one; drop one")
    check_base_room(source, device, base, takes_table(opening.adaln, source))
    adapter = adapter_path(str(opening.adapter), opening.base_name, "none")
    if adapter is not None and not Path(adapter).exists():
        raise UserError(f"--adapter {adapter}: there is no such file; name one, or 'none' for the base alone")
    metadata = read_metadata(Path(adapter)) if adapter else {}
    picture1 = metadata.get("picture1", "native")
    origin = open_origin(opening, picture1, source.config["text_dim"])
    if adapter:
        check_adapter(adapter, source, codec=origin.codec["hash"], span=str(SPAN_CHUNKS))
    objective = metadata.get("objective", "")
    if objective == "critic" and opening.kind == "auto":
        raise UserError(f"--adapter {adapter} is a critic: name the student beside it, or a --kind")
    usual = usual_kind(objective)
    kind = opening.kind if opening.kind != "auto" else "many" if usual == "teacher" else usual
    given = {name: getattr(opening, name) for name in ("steps", "shift", "history", "kv_reuse")}
    given = {name: str(value) for name, value in given.items() if value is not None}
    sampling = read_sampling("--", kind, given, metadata, source)
    kernel = resolve(opening.attn, device, opening.compile)
    return Plan(opening, device, source, adapter, objective, kind, sampling, picture1, kernel, base, origin)
