"""What an adapter is, and in what two differ, whatever their layouts.

Norms are of what a layer really adds, ``scale * up @ down``: factors can be scaled against each other without a
difference. They come from the small products, ``<B1 A1, B2 A2> = sum((B1' B2) * (A1 A2'))`` in fp64, so no weight of a
layer's size is ever formed.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from rtcwm.adapters.base import head_width
from rtcwm.model.adapter_layouts import RELEASED_SIZES
from rtcwm.model.adapter_reader import AdapterFile, open_adapter
from rtcwm.model.layout import CHUNK_LATENTS, SPAN_CHUNKS, TEACHER_LATENTS
from rtcwm.model.lora import SITES, AdapterShape
from rtcwm.model.objectives import CAUSAL_OBJECTIVES

Product = tuple[torch.Tensor, torch.Tensor]
"""scale * up and down of a site, fp64."""


ANY_HEAD = 1
"""Width of a head where the order of rows makes no difference: every number of rows is of such heads."""


def product(file: AdapterFile, block: int, site: str, head: int | None) -> Product:
    """A site's factors with the scale in the up projection, fp64; `head`: as `AdapterFile.pair` takes it."""
    entry = file.names.entries[block, site][0]
    down, up = file.pair(block, site, head)
    return up.double() * (file.alpha(entry) / file.rank(entry)), down.double()


def inner(first: Product, second: Product) -> float:
    """Frobenius inner product of two sites' ``up @ down``."""
    (up1, down1), (up2, down2) = first, second
    return float(((up1.T @ up2) * (down1 @ down2.T)).sum())


def norm(pair: Product) -> float:
    """Frobenius norm of ``up @ down``."""
    return math.sqrt(max(inner(pair, pair), 0.0))


def describe(path: Path) -> Iterator[str]:
    """The lines of `rtcwm adapter show`.

    Raises:
        UserError: not an adapter of H3's blocks, or tensors that do not belong together.
    """
    file = open_adapter(path)
    sizes = file.sizes()
    dtypes = sorted({file.weights.dtypes[name] for _, _, entry in file.entries() for name in (entry.down, entry.up)})
    ranks = sorted({file.rank(entry) for _, _, entry in file.entries()})
    alphas = sorted({file.alpha(entry) for _, _, entry in file.entries()})
    held = len(list(file.entries()))
    numbers = sum(math.prod(file.weights.shapes[n]) for _, _, entry in file.entries() for n in (entry.down, entry.up))
    yield f"{path}: {file.layout} layout, {held} layers, {numbers:,} numbers, {', '.join(dtypes)}"
    yield f"rank {_joined(ranks)}, alpha {_joined(alphas)} ({file.alpha_source}), scale {_joined(_scales(file))}"
    yield f"blocks: {sizes.layers}, hidden {sizes.hidden}, inner {sizes.inner}, feed-forward {sizes.ffn}"
    yield from wants(file.metadata, sizes)
    yield from (f"metadata {key}: {value}" for key, value in sorted(file.metadata.items()))
    bad = list(file.non_finite())
    yield f"non-finite: {sum(count for _, count in bad)} values in {len(bad)} tensors"
    yield from (f"  {name}: {count}" for name, count in bad[:5])
    apart = [block for block in range(sizes.layers) if file.stacked_rank(block) != file.rank(_qkv(file, block))]
    if apart:
        most = max(file.stacked_rank(block) for block in apart)
        yield f"q, k and v have downs of their own in {len(apart)} blocks; `rtcwm adapter fuse` needs rank {most}"
    elif not bad:
        yield from _norms(file, sizes)


def _norms(file: AdapterFile, sizes: AdapterShape) -> Iterator[str]:
    """A table of norms by site, and the extremes."""
    yield f"{'site':10} {'norm of scale * up @ down: mean':>32} {'least':>10} {'most':>10} {'|down|':>9} {'|up|':>9}"
    every: list[tuple[float, int, str]] = []
    for site in SITES:
        found, downs, ups = [], [], []
        for block in range(sizes.layers):
            down, up = file.pair(block, site, ANY_HEAD)
            found.append((norm(product(file, block, site, ANY_HEAD)), block, site))
            downs.append(float(down.float().norm()))
            ups.append(float(up.float().norm()))
        every += found
        mean = sum(value for value, _, _ in found) / len(found)
        least, most = min(found)[0], max(found)[0]
        yield (
            f"{site:10} {mean:32.4g} {least:10.4g} {most:10.4g} {sum(downs) / len(downs):9.4g} "
            f"{sum(ups) / len(ups):9.4g}"
        )
    every.sort()
    yield "least: " + ", ".join(f"block {block} {site} {value:.4g}" for value, block, site in every[:3])
    yield "most: " + ", ".join(f"block {block} {site} {value:.4g}" for value, block, site in every[:-4:-1])


def wants(metadata: dict[str, str], sizes: AdapterShape) -> Iterator[str]:
    """The base and the window that an adapter was made for, as far as the file tells."""
    released = (sizes.layers, sizes.hidden, sizes.inner, sizes.ffn) == RELEASED_SIZES
    if "base" in metadata:
        yield f"base: {metadata.get('base_description', 'no description')}, {metadata['base']}"
    else:
        yield f"base: not said; the sizes are {'those' if released else 'not those'} of the released H3"
    objective = metadata.get("objective")
    causal = objective in CAUSAL_OBJECTIVES or (objective == "critic" and metadata.get("teacher_kind") == "causal")
    if causal:
        span = metadata.get("span", str(SPAN_CHUNKS))
        latents = f"{int(span) * CHUNK_LATENTS} latents" if re.fullmatch(r"[1-9]\d{0,5}", span) else "not a number"
        window = f"{span} chunks ({latents}), causal, mask rule {metadata.get('mask_rule', 'not said')}"
    elif objective in ("released", "critic"):
        window = f"{TEACHER_LATENTS} latents, every row sees every row"
    else:
        window = f"not said; adapters of other trainers know {TEACHER_LATENTS} latents, every row seeing every row"
    yield f"window: {window}"
    told = [
        f"{key} {metadata[key]}" for key in ("steps", "shift", "history", "picture1", "text_time") if key in metadata
    ]
    if objective:
        yield f"made for: {objective}, {', '.join(told)}"


@dataclass(frozen=True)
class SiteDifference:
    """Of one site: |B - A| / |A| and the cosine of what the two add (nan where one adds nothing), and whether only the
    factors differ."""

    block: int
    site: str
    relative: float
    cosine: float

    def line(self) -> str:
        return f"block {self.block} {self.site}: relative difference {self.relative:.4g}, cosine {self.cosine:.6f}"


def compare(first: Path, second: Path, base: str | None = None) -> tuple[list[str], list[SiteDifference]]:
    """Lines on what two adapters are made of, where that differs, and every site whose numbers differ.

    Metadata and layouts are told, and are no difference of the adapters themselves. `base`: as `head_width` takes it.
    """
    a, b = open_adapter(first), open_adapter(second)
    head = head_width(base, a, b)
    for file in (a, b):
        file.check_values()
    sizes, other = a.shape(), b.shape()
    lines = [
        f"{name}: {getattr(sizes, name)} and {getattr(other, name)}"
        for name in AdapterShape.__dataclass_fields__
        if getattr(sizes, name) != getattr(other, name)
    ]
    if any(getattr(sizes, name) != getattr(other, name) for name in ("hidden", "inner", "ffn")):
        return lines, []
    differences = []
    for block in range(min(sizes.layers, other.layers)):
        for site in SITES:
            if (
                not _same(a.pair(block, site, head), b.pair(block, site, head))
                or sizes.alpha / sizes.rank != other.alpha / other.rank
            ):
                differences.append(_difference(a, b, block, site, head))
    return lines, differences


def _same(first: Product, second: Product) -> bool:
    return all(x.shape == y.shape and torch.equal(x.float(), y.float()) for x, y in zip(first, second, strict=True))


def _difference(a: AdapterFile, b: AdapterFile, block: int, site: str, head: int | None) -> SiteDifference:
    one, two = product(a, block, site, head), product(b, block, site, head)
    delta = norm((torch.cat([one[0], -two[0]], dim=1), torch.cat([one[1], two[1]])))
    size, size_two = norm(one), norm(two)
    relative = delta / size if size else math.nan
    cosine = inner(one, two) / (size * size_two) if size and size_two else math.nan
    return SiteDifference(block, site, relative, cosine)


def _qkv(file: AdapterFile, block: int):
    return file.names.entries[block, "attn_qkv"][0]


def _scales(file: AdapterFile) -> list[float]:
    return sorted({file.alpha(entry) / file.rank(entry) for _, _, entry in file.entries()})


def _joined(values: list) -> str:
    return ", ".join(f"{value:g}" for value in values)


def print_differences(first: Path, second: Path, limit: int, base: str | None = None) -> bool:
    """Says in what two adapters differ, at most `limit` sites of it; whether they do."""
    a, b = open_adapter(first), open_adapter(second)
    lines, differences = compare(first, second, base)
    if a.layout != b.layout:
        print(f"layouts: {a.layout} and {b.layout}")
    for key in sorted(set(a.metadata) | set(b.metadata)):
        if a.metadata.get(key) != b.metadata.get(key):
            print(f"metadata {key}: {a.metadata.get(key, 'not there')} and {b.metadata.get(key, 'not there')}")
    for line in lines:
        print(line)
    worst = sorted(differences, key=lambda found: -found.relative if math.isfinite(found.relative) else -math.inf)
    for found in worst[:limit]:
        print(found.line())
    if len(worst) > limit:
        print(f"... and {len(worst) - limit} more sites")
    differ = bool(lines or differences)
    print(f"{len(differences)} sites differ" if differ else "the adapters are the same")
    return differ
