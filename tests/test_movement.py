"""What moves between ranks, host memory and the device: the same numbers to the last bit, how much, and when."""

import gc
import io
import weakref
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from ranks import run_ranks
from small import CONFIG, random_adapter, random_window

from rtcwm.engine import base as base_module
from rtcwm.engine.adapter import AdapterEngine
from rtcwm.engine.base import BaseEngine
from rtcwm.engine.carrier import usable
from rtcwm.engine.copies import ALIGNMENT, PAGE_BYTES, HostMemory, Stored
from rtcwm.engine.memory import peaks
from rtcwm.engine.settings import ActivationSettings, BaseSettings, read_adapter_settings, read_base_settings
from rtcwm.model.attention import install, make_attend, resolve
from rtcwm.model.blocks import predict_velocity
from rtcwm.model.loading import SeededSource, read_config
from rtcwm.model.lora import AdapterShape

LAYERS, RANK, CHUNKS = 5, 4, 1
BOTH = ActivationSettings(policy="save_attention", cpu_checkpointing=True, offload_attention=True)
INPUT_ROWS = random_window(5 * CHUNKS).layout(stream=True).rows


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    (folder / "config.json").write_text("{}")
    (folder / "base.json").write_text("{}")
    (folder / "adapter.json").write_text("{}")
    return folder


def settings(files: Path, **changes) -> BaseSettings:
    plain = read_base_settings(files / "base.json")
    if changes.get("offload"):
        zero = plain.deepspeed["zero_optimization"] | {"offload_param": {"device": "cpu"}}
        changes["deepspeed"] = plain.deepspeed | {"zero_optimization": zero}
    return replace(plain, **changes)


class Watched:
    """A base and two adapters, and what crossed between the parameters' places meanwhile."""

    def __init__(self, world, files: Path, base_settings: BaseSettings):
        config = read_config(files / "config.json") | CONFIG | {"num_layers": LAYERS}
        self.world = world
        self.base = BaseEngine(world, SeededSource(config, seed=3), base_settings)
        self.kernel = resolve("sdpa", "cpu")
        install(self.base.model, self.kernel)
        adapter_settings = read_adapter_settings(files / "adapter.json")
        self.engines = [
            AdapterEngine(world, random_adapter(AdapterShape.of(config, RANK), seed), adapter_settings)
            for seed in (5, 6)
        ]
        self.runs = [self.base.activations.runner(engine.adapter) for engine in self.engines]
        self.blocks = list(self.base.model.transformer_blocks)
        self.whole = []  # numbers of the blocks that are whole while one computes
        self.own_gathers = 0  # bytes that DeepSpeed itself gathers, of blocks
        self.left_over = []
        for block in self.blocks:
            block.attn.to_qkv.register_forward_hook(lambda *_: self.whole.append(self._whole_blocks()))
            for param in block.parameters():
                param.all_gather_coalesced = self._counted(param.all_gather_coalesced)

    def _counted(self, gather):
        def counted(params, **options):
            if self.base.carrier is None:
                self.own_gathers += sum(
                    p.ds_tensor.numel() * p.element_size() * p.ds_zero_partition_world_size for p in params
                )
            return gather(params, **options)

        return counted

    def _whole_blocks(self) -> int:
        params = [param for block in self.blocks for param in block.parameters()]
        return sum(p.ds_numel for p in params if p.ds_status != ZeroParamStatus.NOT_AVAILABLE)

    @property
    def moved(self) -> int:
        carrier = self.base.carrier
        return self.own_gathers if carrier is None else carrier.moved_bytes

    @property
    def block_bytes(self) -> int:
        return sum(
            p.ds_tensor.numel() * p.element_size() * p.ds_zero_partition_world_size for p in self.blocks[0].parameters()
        )

    def loss(self, index: int, run) -> torch.Tensor:
        """Every rank a sample of its own."""
        window = random_window(5 * CHUNKS, seed=100 + index * self.world.size + self.world.rank)
        layout = window.layout(stream=True)
        times = torch.rand(CHUNKS, generator=torch.Generator().manual_seed(index))
        attend = make_attend(self.kernel, layout, "E")
        value = predict_velocity(self.base.model, window, layout, times, attend, run=run).square().mean()
        self.left_over.append(self.base.gathered())
        return value

    def update(self, which: int, loss: torch.Tensor) -> float:
        engine = self.engines[which]
        engine.backward(loss)
        self.base.finish_backward()
        self.left_over.append(self.base.gathered())
        return engine.step(1e-3).grad_norm


def alternate_by(world, files: Path, *ways: BaseSettings) -> list[dict]:
    return [alternate(world, files, way) for way in ways]


def alternate(world, files: Path, base_settings: BaseSettings) -> dict:
    """As distillation does: forwards with and without a graph in turn, two graphs alive under one loss, scores by other
    adapters while they live, then updates of another adapter."""
    watched = Watched(world, files, base_settings)
    student, critic = watched.runs
    bare = watched.base.activations.runner(None)
    with torch.no_grad():
        numbers = [watched.loss(0, student).item()]
    first = watched.loss(1, student)
    with torch.no_grad():
        numbers.append(watched.loss(2, critic).item())
    second = watched.loss(3, student)
    with torch.no_grad():
        numbers += [watched.loss(4, run).item() for run in (bare, critic)]
    numbers.append(watched.update(0, first + 2 * second))
    numbers.append(watched.update(1, watched.loss(5, critic)))
    with torch.no_grad():
        numbers.append(watched.loss(6, student).item())
    carrier = watched.base.carrier
    return {
        "numbers": numbers,
        "weights": [p.detach().clone() for engine in watched.engines for p in engine.adapter.parameters()],
        "left over": set(watched.left_over),
        "whole": max(watched.whole),
        "block": sum(p.ds_numel for p in watched.blocks[0].parameters()),
        "holds": None if carrier is None else (carrier.holds(), carrier.most_in_use, len(carrier._buffers)),
        "digest": watched.base.digest(),
        "moved": watched.base.activations.offloaded_bytes,
    }


@pytest.mark.parametrize(("ranks", "group"), [(4, 2), (2, 1)])
def test_prefetch_changes_no_bit_and_leaves_nothing_gathered(files, ranks, group):
    """Against DeepSpeed's own fetches. The base in host memory, in groups of two shared as well; what is kept too."""
    ways = (
        settings(files, shard_group=group, prefetch=False, offload=group == 1),
        settings(files, shard_group=group, offload=True, pin_base=True, activations=BOTH, device_blocks=4 - group),
    )
    for own, ahead in run_ranks(ranks, alternate_by, files, *ways):
        assert own["numbers"] == ahead["numbers"] and own["digest"] == ahead["digest"]
        assert all(torch.equal(a, b) for a, b in zip(own["weights"], ahead["weights"], strict=True))
        for result in (own, ahead):
            assert result["left over"] == {0}
            assert result["whole"] == result["block"]  # never more than the block that computes
        assert ahead["holds"] == (0, 1, 4 - group)
        width = CONFIG["hidden_size"] + CONFIG["num_attention_heads"] * CONFIG["attention_head_dim"]
        assert ahead["moved"] == 3 * LAYERS * INPUT_ROWS * width * 4


def traffic_by(world, files: Path, *ways: BaseSettings) -> list[dict]:
    return [traffic(world, files, way) for way in ways]


def traffic(world, files: Path, base_settings: BaseSettings) -> dict:
    """Bytes moved by each of two steps' forward and backward."""
    watched = Watched(world, files, base_settings)
    moved = [watched.moved]
    for step in range(2):
        loss = watched.loss(step, watched.runs[0])
        moved.append(watched.moved)
        watched.update(0, loss)
        moved.append(watched.moved)
    spent = [after - before for before, after in zip(moved, moved[1:])]
    carrier = watched.base.carrier
    return {
        "blocks": [bytes / watched.block_bytes for bytes in spent],
        "buffers": None if carrier is None else len(carrier._buffers) * carrier._size / watched.block_bytes,
    }


def test_a_block_is_moved_once_a_pass_and_not_at_all_where_passes_turn_around(files):
    ways = [settings(files, shard_group=2, **way) for way in ({"prefetch": False}, {}, {"device_blocks": 4})]
    own, two, four = run_ranks(2, traffic_by, files, *ways)[0]
    assert own["blocks"] == [LAYERS] * 4
    assert two["blocks"] == [LAYERS] + [LAYERS - 2] * 3
    assert four["blocks"] == [LAYERS] + [LAYERS - 4] * 3
    # Buffers of a block each, up to the alignment of eight small parameters.
    assert 2 <= two["buffers"] < 2.2 and 4 <= four["buffers"] < 4.4


def order(world, files: Path, base_settings: BaseSettings) -> dict:
    """What a step does with its blocks, one after the other; and what of it stays."""
    events, inputs, alive = [], [], []
    watched = Watched(world, files, base_settings)
    index = {block: number for number, block in enumerate(watched.blocks)}
    base, copies = watched.base, watched.base.activations.copies
    fill, fetch = base.carrier._fill, copies.fetch

    def filled(buffer, block):
        events.append(f"weights {index[block]}")
        fill(buffer, block)

    def fetched(stored):
        events.append("input")
        tensor, event = fetch(stored)
        inputs.append(weakref.ref(tensor.untyped_storage()))
        alive.append(sum(input() is not None for input in inputs))
        return tensor, event

    base.carrier._fill, copies.fetch = filled, fetched
    for block in watched.blocks:
        block.attn.to_qkv.register_forward_hook(lambda *_, block=block: events.append(f"run {index[block]}"))
    gc.collect()
    gc.disable()  # what is let go below is let go by reference counts alone
    pages = []
    for step in range(2):
        watched.update(0, watched.loss(step, watched.runs[0]))
        pages.append((copies.memory.bytes // PAGE_BYTES, len(copies.memory._free)))
        if step == 0:
            first = events.copy()
    watched.loss(2, watched.runs[0])  # a graph without a backward pass
    pages.append((copies.memory.bytes // PAGE_BYTES, len(copies.memory._free)))
    left = sum(input() is not None for input in inputs)
    gc.enable()
    base.close()
    return {"events": first, "alive": max(alive), "left": left, "pages": pages, "closed": copies.memory.bytes}


@pytest.mark.parametrize("attention", [False, True])
def test_blocks_and_what_was_kept_of_them_come_one_block_ahead_and_go_again(files, attention):
    way = settings(files, shard_group=2, activations=BOTH if attention else ActivationSettings(cpu_checkpointing=True))
    each = 1 + attention
    for result in run_ranks(2, order, files, way):
        # Forward: the next block is fetched before one runs. Backward: the last two blocks are still there; the others
        # come, with their inputs, while the block after them is recomputed.
        assert " ".join(result["events"]) == (
            "weights 0 weights 1 run 0 weights 2 run 1 weights 3 run 2 weights 4 run 3 run 4 "
            "input input run 4 input weights 2 run 3 input weights 1 run 2 input weights 0 run 1 run 0"
        ).replace("input", " ".join(["input"] * each))
        assert result["alive"] <= 2 * each and result["left"] == 0
        assert (
            result["pages"] == [(each * LAYERS, each * LAYERS)] * 3
        )  # the same pages in every step, and free after it
        assert result["closed"] == 0


def without(world, files: Path, shared: BaseSettings, whole: BaseSettings) -> tuple:
    """Bases that have no carrier: whole on the device, or under a DeepSpeed that was not tested; and what is said."""
    said = io.StringIO()
    with redirect_stdout(said):
        first = Watched(world, files, whole).base.carrier
        assert said.getvalue() == ""
        base_module.carrier.usable = lambda: False
        second = Watched(world, files, shared).base.carrier
    return first, second, said.getvalue()


def test_a_whole_base_fetches_nothing_and_another_deepspeed_gathers_by_itself(files):
    assert usable() and usable("0.19.8+cpu")
    assert not any(usable(version) for version in ("0.19.5", "0.20.0", "1.0.0", "main"))
    results = run_ranks(2, without, files, settings(files, shard_group=2), settings(files, shard_group=1))
    for rank, (whole, shared, said) in enumerate(results):
        assert whole is None and shared is None
        assert said.count("no prefetch of the base: DeepSpeed") == (rank == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [5, PAGE_BYTES // 4, PAGE_BYTES // 4 + 7])
def test_stored_tensors_come_back_from_as_few_pages_as_hold_them(dtype, count):
    memory = HostMemory(pinned=False)
    values = torch.arange(count).remainder(251).to(dtype)
    for _ in range(2):
        stored = Stored(memory, values)
        target = torch.zeros_like(values)
        stored.load(target)
        assert torch.equal(target, values)
    assert memory.bytes == -(-count * values.element_size() // PAGE_BYTES) * PAGE_BYTES


def test_pages_of_two_tensors_are_apart_and_carved_memory_is_packed(monkeypatch):
    memory = HostMemory(pinned=False)
    values = [torch.full((1000,), float(value)) for value in range(3)]
    stored = [Stored(memory, value) for value in values]
    for one, value in zip(stored, values):
        target = torch.empty(1000)
        one.load(target)
        assert torch.equal(target, value)
    # Page-locked memory is there on GPUs alone; how chunks of it are cut is the same with ordinary memory.
    ordinary = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **options: ordinary(*sizes, **options))
    locked = HostMemory(pinned=True)
    pieces = [locked.carve(size) for size in (700 * 2**20, 400 * 2**20, 300 * 2**20, 5)]
    assert [piece.numel() for piece in pieces] == [700 * 2**20, 400 * 2**20, 300 * 2**20, 5]
    assert locked.bytes == 2 * 2**30, "the third piece fits beside the first"
    starts = sorted((piece.data_ptr(), piece.data_ptr() + piece.numel()) for piece in pieces)
    assert all(end <= start for (_, end), (start, _) in zip(starts, starts[1:]))
    assert all((piece.data_ptr() - pieces[0].data_ptr()) % ALIGNMENT == 0 for piece in (pieces[2],))


def test_peaks_of_a_process_without_a_card():
    held = torch.ones(30_000_000)
    found = peaks(torch.device("cpu"))
    assert found.device_reserved == found.host_pinned == 0.0
    assert found.host_resident > held.nbytes / 2**30
    assert found.row()["host_resident_gib"] == round(found.host_resident, 3)
