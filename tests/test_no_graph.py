"""Forwards without a graph: no node, nothing saved, and the values of those with one."""

import pytest
import torch
from small import CONFIG, random_adapter, random_window, small_model
from stream_reference import noise, request

from rtcwm.model.attention import install, make_attend, resolve
from rtcwm.model.blocks import predict_velocity
from rtcwm.model.lora import AdapterShape, inject
from rtcwm.model.sampler import Stream
from rtcwm.model.schedule import SamplerConfig

KERNEL = resolve("sdpa", "cpu")


def adapted(ffn_rows: int = 0):
    """A small base with an adapter that does something bound for good."""
    model = small_model()
    install(model, KERNEL, ffn_rows=ffn_rows)
    slot = inject(model)
    slot.active = random_adapter(AdapterShape.of(CONFIG, 4), seed=1, size=0.2)
    return model


def count_saved(function) -> tuple[torch.Tensor, int]:
    """What a call gives, and how many tensors graphs saved meanwhile."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        return function(), len(saved)


@pytest.mark.parametrize("ffn_rows", [0, 7])
def test_nothing_is_saved_and_values_are_the_same(ffn_rows):
    model, window = adapted(ffn_rows), random_window(10)
    layout = window.layout(stream=True)

    def velocity() -> torch.Tensor:
        return predict_velocity(
            model, window, layout, torch.tensor([0.3, 0.8]), make_attend(KERNEL, layout, "E")
        )  # fmt: skip

    with_graph, many = count_saved(velocity)
    with torch.no_grad():
        without, none = count_saved(velocity)
    assert torch.equal(with_graph, without)
    assert many > 10 * CONFIG["num_layers"] and none == 0
    assert with_graph.grad_fn is not None and without.grad_fn is None


def test_a_chunk_with_a_graph_has_the_values_of_one_without():
    """Through the cache; a stream of chunks without graphs saves nothing."""
    model, chunks = adapted(), {}
    for graph in (False, True):
        conditions, proxy = request(3)
        stream = Stream(model, KERNEL, conditions, SamplerConfig(steps=2), noise)
        parts = proxy.split(5, dim=2)
        _, saved = count_saved(lambda: [stream.next_chunk(part) for part in parts[:2]])
        assert saved == 0
        chunks[graph], saved = count_saved(lambda: stream.next_chunk(parts[2], graph=graph))
        assert (saved > 0) == graph == chunks[graph].requires_grad
    assert torch.equal(chunks[True], chunks[False])
