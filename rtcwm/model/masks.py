"""Who sees whom in a stream: the rule, the dense calls that carry it out, and two references they must equal.

Rows are ordered `[static | proxy 0, target 0 | proxy 1, target 1 | ...]`. Static rows see static rows. Target k sees
static, proxies <= k and targets max(0, k - 5)..k. What proxy k sees besides static is the rule:

- "E": proxies <= k, a causal proxy (the default);
- "own": proxy k alone;
- "ahead1": proxies <= k + 1. This holds in every block, so through n blocks the look-ahead adds up to n chunks.

No mask exists on the fast path. In stream order the keys of target k <= 5 are every row up to its own end, a prefix
that needs no copy; later targets skip the oldest targets. Proxy rows see no targets, so they and static rows use one
compact copy `[static | proxies]` (330 rows a chunk at the released size), of which their keys are again slices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from torch import Tensor

from rtcwm.errors import UserError
from rtcwm.model.layout import SPAN_CHUNKS
from rtcwm.model.packing import PROXY, STATIC, TARGET, Layout

Rule = Literal["E", "own", "ahead1"]
RULES: tuple[str, ...] = get_args(Rule)
Label = TypeVar("Label", Tensor, int)
HISTORY_CHUNKS = SPAN_CHUNKS - 1


@dataclass(frozen=True)
class Group:
    """One dense attention call: the queries `rows` against the keys at `keys`.

    `store` names what the keys are cut from: "all" rows, or the "compact" copy made of the rows of all compact groups,
    in order (so of static and the proxies).
    """

    rows: slice
    keys: tuple[slice, ...]
    store: Literal["all", "compact"]


def check_rule(rule: str) -> None:
    """Raises UserError for a name that is no rule."""
    if rule not in RULES:
        raise UserError(f"proxy rule {rule!r} is not one of {', '.join(RULES)}")


def groups(layout: Layout, rule: Rule) -> tuple[Group, ...]:
    """Dense calls that cover every row of a stream layout once, in the order of the rows.

    Raises UserError for an unknown rule, ValueError for a layout in stock order.
    """
    check_rule(rule)
    if not layout.stream:
        raise ValueError("prefix calls need a layout in stream order")
    static, proxy, target = layout.static, layout.proxy_chunk, layout.target_chunk
    starts = [static + k * (proxy + target) for k in range(layout.chunks)]
    calls = [Group(slice(0, static), (slice(0, static),), "compact")]
    for k, start in enumerate(starts):
        first, last = {"E": (0, k), "own": (k, k), "ahead1": (0, k + 1)}[rule]
        own = slice(static + first * proxy, static + (min(last, layout.chunks - 1) + 1) * proxy)
        calls.append(Group(slice(start, start + proxy), _merged([slice(0, static), own]), "compact"))
        oldest = max(0, k - HISTORY_CHUNKS)
        skipped = [slice(begin, begin + proxy) for begin in starts[:oldest]]
        end = start + proxy + target
        keys = _merged([slice(0, static), *skipped, slice(starts[oldest], end)])
        calls.append(Group(slice(start + proxy, end), keys, "all"))
    return tuple(calls)


def _merged(pieces: list[slice]) -> tuple[slice, ...]:
    """Ascending slices with touching neighbours joined."""
    merged = [pieces[0]]
    for piece in pieces[1:]:
        if piece.start == merged[-1].stop:
            merged[-1] = slice(merged[-1].start, piece.stop)
        else:
            merged.append(piece)
    return tuple(merged)


def sees(part_q: Label, chunk_q: Label, part_k: Label, chunk_k: Label, rule: Rule) -> Label:
    """Whether a query row sees a key row, from the labels of both: tensors (bool, broadcast), or plain numbers."""
    if rule == "own":
        proxy_to_proxy = chunk_k == chunk_q
    else:
        proxy_to_proxy = chunk_k <= chunk_q + (1 if rule == "ahead1" else 0)
    by_proxy = (part_q == PROXY) & (part_k == PROXY) & proxy_to_proxy
    in_reach = (part_k == PROXY) | ((part_k == TARGET) & (chunk_k >= chunk_q - HISTORY_CHUNKS))
    by_target = (part_q == TARGET) & in_reach & (chunk_k <= chunk_q)
    return (part_k == STATIC) | by_proxy | by_target


def boolean_mask(layout: Layout, rule: Rule) -> Tensor:
    """The rule as a mask [S, S], True where the query (first axis) sees the key. Any order of rows; for small S."""
    check_rule(rule)
    part, chunk = layout.part, layout.chunk
    return sees(part[:, None], chunk[:, None], part[None], chunk[None], rule)


def flex_mask_mod(layout: Layout, rule: Rule) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The rule as a `mask_mod(batch, head, query, key)` for `torch.nn.attention.flex_attention`."""
    check_rule(rule)
    part, chunk = layout.part, layout.chunk

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(part[query], chunk[query], part[key], chunk[key], rule)

    return mask_mod
