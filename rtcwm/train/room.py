"""Holds what a run needs of card and host (`rtcwm.train.memory`) against what is there, before anything is built."""

from collections.abc import Iterable
from dataclasses import replace

from rtcwm.engine.host import GIB, check_host_room
from rtcwm.engine.memory import room_for_tensors
from rtcwm.engine.settings import read_adapter_settings, read_base_settings, shipped_config
from rtcwm.engine.world import World
from rtcwm.errors import UserError
from rtcwm.train.memory import DistillNeeds, Moment, Needs, TrainNeeds

TIGHT = 0.93
"""Share of a card above which fragments of the allocator may be what does not fit."""
PROCESS_BYTES = 4 * GIB
"""What a rank takes of the host besides, Python and CUDA above all: 3.4 GiB were measured in training."""


def largest(needs: Needs) -> Moment:
    """The worst moment of all."""
    return max(needs.worst(), key=lambda moment: moment.total)


def check_memory(needs: TrainNeeds | DistillNeeds, world: World) -> tuple[str, ...]:
    """Holds a run's needs against card and host; what is printed of them. Raises UserError where they do not fit."""
    return *check_card(needs, room_for_tensors(world, needs.settings.memory_limit_gib)), *check_host(needs, world)


def check_card(needs: TrainNeeds | DistillNeeds, room: int | None) -> list[str]:
    """Holds a run's needs against the memory of its card.

    Args:
        room: bytes that the allocator may take; None: not known, nothing is refused.

    Returns:
        What is printed before the first step.

    Raises:
        UserError: it cannot fit; what would change that is listed with the memory it would take.
    """
    worst, limit = largest(needs), needs.settings.memory_limit_gib
    if room is not None and worst.total > room:
        limited = limit is not None and room == int(limit * GIB)
        raise UserError(
            f"this run needs about {worst.total / GIB:.1f} GiB on a card, at its worst in the {worst}, and "
            f"{'memory_limit_gib in --base-config leaves it' if limited else 'this one has'} {room / GIB:.1f} GiB. "
            + _advice(needs, room)
        )
    tight = room is not None and worst.total > TIGHT * room
    card = "" if room is None else f", of {room / GIB:.1f} GiB"
    note = "; tight, PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may help" if tight else ""
    lines = [f"memory of a card, by formula: {worst.total / GIB:.2f} GiB{card}, in the {worst.name}{note}"]
    return lines + [f"  {moment}" for moment in needs.worst()]


def _advice(needs: TrainNeeds | DistillNeeds, room: int) -> str:
    """What one change would take instead: what fits, what does not; and all together, if no change alone is enough."""
    found = [(largest(other).total, text) for text, other in (*needs.alternatives(), *_shipped(needs))]
    better = sorted((total, text) for total, text in found if total < largest(needs).total)
    said = []
    for which, listed in (
        ("What would fit: ", [one for one in better if one[0] <= room]),
        ("Not enough alone: ", [one for one in better if one[0] > room]),
    ):
        if listed:
            said.append(which + "; ".join(f"{text}: {total / GIB:.1f} GiB" for total, text in listed))
    if not better or better[0][0] > room:
        least = largest(_least(needs)).total
        said.append(
            f"All of it together: {least / GIB:.1f} GiB" + (", more than there is as well" if least > room else "")
        )
    return ". ".join(said)


def _shipped(needs: TrainNeeds | DistillNeeds) -> Iterable[tuple[str, TrainNeeds | DistillNeeds]]:
    """The run with the engines' files that are shipped for one card, the smallest last."""
    distils = isinstance(needs, DistillNeeds)
    for name in ("base_1x141gb_distill", "base_1x80gb_distill") if distils else ("base_1x141gb", "base_1x80gb"):
        yield f"--base-config {name}.json of ds_configs", _with_file(needs, name)
    if not distils:
        small = read_adapter_settings(shipped_config("adapter_24gb"))
        smallest = replace(_with_file(needs, "base_1x24gb"), adapter_settings=small)
        yield "--base-config base_1x24gb.json and --adapter-config adapter_24gb.json", smallest


def _with_file(needs: TrainNeeds | DistillNeeds, name: str) -> TrainNeeds | DistillNeeds:
    return replace(needs, settings=read_base_settings(shipped_config(name)), shard=1)


def _least(needs: TrainNeeds | DistillNeeds) -> TrainNeeds | DistillNeeds:
    """The run with everything at its smallest."""
    *_, (_, found) = _shipped(needs)
    activations = replace(found.settings.activations, ffn_rows=4096)
    found = replace(found, batch=1, settings=replace(found.settings, activations=activations))
    if isinstance(found, DistillNeeds):
        found = replace(found, grad_chunks=1, chunks=found.shortest, joint=False)
    return found


def check_host(needs: TrainNeeds | DistillNeeds, world: World) -> list[str]:
    """Holds what a run keeps in host memory, for all ranks of this machine, against what is free there.

    Returns:
        What is printed before the first step; nothing on a CPU, or where nothing is sent.

    Raises:
        UserError: there is too little; what each key takes is listed.
    """
    parts = {key: size for key, size in needs.host().items() if size}
    if world.device.type != "cuda" or not parts:
        return []
    total = sum(parts.values()) + PROCESS_BYTES
    listed = ", ".join(f"{key} {size / GIB:.2f}" for key, size in sorted(parts.items(), key=lambda part: -part[1]))
    listed += f", the process {PROCESS_BYTES / GIB:.0f}"
    advice = "take one of these keys out of the engines' files, or give the machine fewer ranks"
    if needs.settings.offload and needs.shard < world.local_size:
        shared = sum(replace(needs, shard=world.local_size).host().values()) + PROCESS_BYTES
        advice += f", or let its ranks share a copy of the base, shard_group 0: {shared / GIB:.2f} GiB a rank"
    whole = world.local_size * total + needs.saved()
    ranks = "" if world.local_size == 1 else f", for {world.local_size} ranks of this machine"
    text = (
        f"{total / GIB:.2f} GiB a rank ({listed}){ranks}, and {needs.saved() / GIB:.2f} while a checkpoint is written"
    )
    free = check_host_room(whole, f"what this run keeps away from the card, {text},", advice)
    return [f"host memory by formula: {text}: {whole / GIB:.2f} GiB, of {free / GIB:.1f} that are free"]
