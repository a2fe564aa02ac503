"""Holds what a run needs of card and host (`rtcwm.train.memory`) against what is there, before anything is built."""

from rtcwm.engine.memory import GIB, check_host_room, room_for_tensors
from rtcwm.engine.world import World
from rtcwm.errors import UserError
from rtcwm.train.memory import DistillNeeds, Moment, Needs, TrainNeeds

TIGHT = 0.93
"""Share of a card above which fragments of the allocator may be what does not fit."""


def largest(needs: Needs) -> Moment:
    """The worst moment of all."""
    return max(needs.worst(), key=lambda moment: moment.total)


def check_memory(needs: TrainNeeds | DistillNeeds, world: World) -> tuple[str, ...]:
    """Holds a run's needs against card and host; what is printed of them. Raises UserError where they do not fit."""
    return *check_card(needs, room_for_tensors(world, needs.settings.memory_limit_gib)), *check_host(needs, world)


def check_card(needs: Needs, room: int | None) -> list[str]:
    """Holds a run's needs against the memory of its card.

    Args:
        room: bytes that the allocator may take; None: not known, nothing is refused.

    Returns:
        What is printed before the first step.

    Raises:
        UserError: it cannot fit; what would change that is listed with the memory it would take.
    """
    worst = largest(needs)
    if room is not None and worst.total > room:
        others = [(largest(other).total, text) for text, other in needs.alternatives()]
        better = sorted((total, text) for total, text in others if total < worst.total)
        listed = "; ".join(f"{text}: {total / GIB:.1f} GiB" for total, text in better)
        raise UserError(
            f"this run needs about {worst.total / GIB:.1f} GiB on a card, at its worst in the {worst}, and this one "
            f"has {room / GIB:.1f} GiB. With one change alone it would be: {listed or 'no less'}"
        )
    tight = room is not None and worst.total > TIGHT * room
    card = "" if room is None else f", of {room / GIB:.1f} GiB"
    note = "; tight, PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may help" if tight else ""
    lines = [f"memory of a card, by formula: {worst.total / GIB:.2f} GiB{card}, in the {worst.name}{note}"]
    return lines + [f"  {moment}" for moment in needs.worst()]


def check_host(needs: TrainNeeds | DistillNeeds, world: World) -> list[str]:
    """Holds what a run sends to host memory, for all ranks of this machine, against what is free there.

    Returns:
        What is printed before the first step; nothing on a CPU, or where nothing is sent.

    Raises:
        UserError: there is too little; what each key takes is listed.
    """
    parts = {key: size for key, size in needs.host().items() if size}
    if world.device.type != "cuda" or not parts:
        return []
    total = sum(parts.values())
    listed = ", ".join(f"{key} {size / GIB:.2f}" for key, size in sorted(parts.items(), key=lambda part: -part[1]))
    ranks = f", for {world.local_size} ranks of this machine {world.local_size * total / GIB:.2f} GiB"
    free = check_host_room(
        world.local_size * total,
        f"what this run keeps away from the card ({listed}, GiB a rank)",
        "take one of these keys out of the engines' files, or share the machine among fewer ranks",
    )
    return [
        f"host memory of a rank, by formula: {total / GIB:.2f} GiB ({listed}){ranks if world.local_size > 1 else ''}; "
        f"{free / GIB:.1f} GiB are free"
    ]
