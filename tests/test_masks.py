"""The rule: against a loop over its words, against the dense calls, and as leaks through a whole small model."""

import dataclasses

import pytest
import torch
from small import random_window

from rtcwm.errors import UserError
from rtcwm.model import blocks
from rtcwm.model.attention import make_attend, resolve
from rtcwm.model.layout import Geometry
from rtcwm.model.masks import RULES, boolean_mask, flex_mask_mod, groups
from rtcwm.model.packing import PROXY, TARGET, row_times, stock_layout, stream_layout

CHUNKS = (1, 2, 6, 8)
TINY = Geometry(2, 4, 1, 3)  # 10 target and 10 proxy rows a chunk


def tiny_layout(chunks: int):
    return stream_layout(TINY, (2, 2), chunks, (1, 0, 1), 2)


def rows_of(chunks: int) -> list[tuple[str, int]]:
    """(part, chunk) of every row: 3 text, 1 picture and 4 audio rows, then the chunks."""
    rows = [("static", -1)] * 8
    for k in range(chunks):
        rows += [("proxy", k)] * 10 + [("target", k)] * 10
    return rows


def allowed(query: tuple[str, int], key: tuple[str, int], rule: str) -> bool:
    """The rule in words, one pair of rows at a time."""
    (part, k), (other, j) = query, key
    if other == "static":
        return True  # every row sees the static rows
    if part == "static":
        return False  # and static rows see nothing else
    if part == "proxy":
        if other == "target":
            return False
        if rule == "own":
            return j == k
        if rule == "ahead1":
            return j <= k + 1
        return j <= k
    if other == "proxy":
        return j <= k
    return max(0, k - 5) <= j <= k


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_boolean_mask_is_the_rule(rule, chunks):
    rows = rows_of(chunks)
    expected = torch.tensor([[allowed(query, key, rule) for key in rows] for query in rows])
    layout = tiny_layout(chunks)
    assert torch.equal(boolean_mask(layout, rule), expected)
    index = torch.arange(len(rows))
    assert torch.equal(flex_mask_mod(layout, rule)(None, None, index[:, None], index[None]), expected)


@pytest.mark.parametrize("rule", RULES)
def test_boolean_mask_follows_the_rows_of_stock_order(rule):
    stream, stock = tiny_layout(8), stock_layout(TINY, (2, 2), 40, (1, 0, 1), 2)
    order = torch.empty(stream.rows, dtype=torch.long)  # where the stock sequence has each row of the stream
    for name in ("text_rows", "audio_rows", "video_rows"):
        order[getattr(stream, name)] = getattr(stock, name)
    assert torch.equal(boolean_mask(stock, rule)[order][:, order], boolean_mask(stream, rule))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_groups_cover_the_rule_exactly(rule, chunks):
    layout = tiny_layout(chunks)
    calls = groups(layout, rule)
    every_row = torch.arange(layout.rows)
    store = {
        "all": every_row,
        "compact": torch.cat([every_row[call.rows] for call in calls if call.store == "compact"]),
    }
    assert torch.equal(store["compact"], torch.cat([every_row[: layout.static], layout.proxy_rows.sort().values]))
    mask = torch.zeros(layout.rows, layout.rows, dtype=torch.long)
    for call in calls:
        for keys in call.keys:
            mask[call.rows, store[call.store][keys]] += 1
    assert torch.equal(mask, boolean_mask(layout, rule).long())
    assert torch.equal(torch.cat([every_row[call.rows] for call in calls]), every_row)


def test_keys_of_a_span_are_prefixes():
    """Up to six chunks a target needs one prefix of all rows, and a causal proxy one of the compact copy."""
    for call in groups(tiny_layout(6), "E"):
        (keys,) = call.keys
        assert keys.start == 0 and (call.store == "compact" or keys.stop == call.rows.stop)


def test_released_span_computes_little_more_than_half_the_pairs():
    """Without proxies the six prefixes over 3,008 static rows and chunks of 5,040 cover 0.57 of the pairs."""
    layout = stream_layout(Geometry(48, 84, 1, 1), (48, 84), 6, (1,) * 1660, 170)
    assert layout.static == 3008
    pairs = sum(
        (call.rows.stop - call.rows.start) * sum(keys.stop - keys.start for keys in call.keys)
        for call in groups(layout, "E")
    )
    assert pairs / layout.rows**2 == pytest.approx(0.57, abs=0.005)


def test_wrong_rules_and_orders_are_refused():
    with pytest.raises(UserError, match="proxy rule 'e' is not one of E, own, ahead1"):
        groups(tiny_layout(1), "e")
    with pytest.raises(UserError, match="is not one of"):
        boolean_mask(tiny_layout(1), "causal")
    with pytest.raises(ValueError, match="stream order"):
        groups(stock_layout(TINY, (2, 2), 5, (1,), 1), "E")


def hidden_after(model, window, rule: str) -> tuple[torch.Tensor, torch.Tensor, object]:
    """Rows after the last block, the velocity, and the layout."""
    layout = window.layout(stream=True)
    kept = []

    def run(block, hidden, *rest):
        kept.append(block(hidden, *rest))
        return kept[-1]

    attend = make_attend(resolve("sdpa", "cpu"), layout, rule)
    times = torch.linspace(0.1, 0.9, layout.chunks)
    velocity = blocks.predict_velocity(model, window, layout, times, attend, run=run)
    return kept[-1], velocity, layout


def changed_chunks(before: torch.Tensor, after: torch.Tensor, layout, part: int) -> set[int]:
    """Chunks whose rows of this part differ in any bit."""
    differs = (before != after).any(dim=2).any(dim=0) & (layout.part == part)
    return set(layout.chunk[differs].tolist())


CHUNKS_OF_TEST = 8
# Chunks that a change in proxy 4 reaches within the two blocks of the model: in the proxy rows, and in the targets.
# Under ahead1 the first block takes it to proxy 3 and the second to proxy 2; target 3 reads proxy 3.
REACH_OF_PROXY = {
    "E": (set(range(4, 8)), set(range(4, 8))),
    "own": ({4}, set(range(4, 8))),
    "ahead1": (set(range(2, 8)), set(range(3, 8))),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_change_of_a_proxy_reaches_the_stated_chunks(model, rule):
    window = random_window(5 * CHUNKS_OF_TEST, geometry=Geometry(2, 4, 1, 3))
    proxy = window.proxy.clone()
    proxy[:, :, 20:25] += 1.0
    before, _, layout = hidden_after(model, window, rule)
    after, _, _ = hidden_after(model, dataclasses.replace(window, proxy=proxy), rule)
    in_proxies, in_targets = REACH_OF_PROXY[rule]
    assert changed_chunks(before, after, layout, PROXY) == in_proxies
    assert changed_chunks(before, after, layout, TARGET) == in_targets
    assert torch.equal(before[:, : layout.static], after[:, : layout.static])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("chunk", [0, 3, 7])
def test_a_change_of_a_target_never_reaches_an_earlier_chunk(model, rule, chunk):
    window = random_window(5 * CHUNKS_OF_TEST, geometry=Geometry(2, 4, 1, 3))
    video = window.video.clone()
    video[:, :, 5 * chunk : 5 * chunk + 5] += 1.0
    before, velocity, layout = hidden_after(model, window, rule)
    after, changed_velocity, _ = hidden_after(model, dataclasses.replace(window, video=video), rule)
    assert changed_chunks(before, after, layout, PROXY) == set()
    assert changed_chunks(before, after, layout, TARGET) == set(range(chunk, CHUNKS_OF_TEST))
    assert torch.equal(before[:, : layout.static], after[:, : layout.static])
    assert torch.equal(velocity[:, :, : 5 * chunk], changed_velocity[:, :, : 5 * chunk])


def test_one_block_sees_five_chunks_back(model):
    """After a single block, the change of target 1 has reached chunks 1..6 and not 7."""
    window = random_window(5 * CHUNKS_OF_TEST, geometry=Geometry(2, 4, 1, 3))
    layout = window.layout(stream=True)
    attend = make_attend(resolve("sdpa", "cpu"), layout, "E")
    video = window.video.clone()
    video[:, :, 5:10] += 1.0
    times, time_index = row_times(layout, torch.tensor(0.5))
    made = blocks.modulate(model, times, time_index, layout.tags)
    rest = (made.blocks, made.adaln_index, model.rope(layout.position_ids), attend)
    before, after = (
        model.transformer_blocks[0](blocks.embed(model, layout, w), *rest)
        for w in (window, dataclasses.replace(window, video=video))
    )
    assert changed_chunks(before, after, layout, TARGET) == set(range(1, 7))
