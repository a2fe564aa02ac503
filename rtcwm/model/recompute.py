"""What the recompute of a block takes from its forward in place of computing it again.

A block that is checkpointed runs twice. Of its second run the outputs of attention and of linear layers are what costs
time, and everything that the gradient needs follows from them by elementwise work. `KeptOutputs` keeps them from one
run to the next. At the release's 33,968 rows that is 0.49 GB a block for attention, and another 3.8 GB for the linear
layers before the last, which is not computed again anyway. A block that kept everything would hold 7.3 GB.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

_bound: list["KeptOutputs"] = []


class KeptOutputs:
    """Outputs of one block's attention, and of its linear layers if asked for, from its forward to its recompute.

    The first `bind` records what is computed inside it, every later one gives it back, in the same order, in place of
    running a kernel. Recording takes references, no copies; `keep` and `give` may be overridden to put them elsewhere
    meanwhile. Bound by whoever recomputes, in the recomputed function: an operator cannot know whether it runs for the
    first time.

    Attributes:
        products: outputs of linear layers are kept as well.
        bytes: kept of "attention" and of "products".
    """

    def __init__(self, products: bool = False) -> None:
        self.products = products
        self.outputs: list[Any] = []
        self.bytes = {"attention": 0, "products": 0}
        self._ahead: deque[Any] | None = None
        self._recorded = False

    @contextmanager
    def bind(self) -> Iterator[None]:
        """Inside, calls are those of this block. An exception ends it too: checkpointing stops a recompute by one, as
        soon as nothing is missing."""
        self._ahead = deque(self.outputs) if self._recorded else None
        _bound.append(self)
        try:
            yield
        finally:
            _bound.remove(self)
            self._recorded = True

    def keep(self, *outputs: Tensor) -> Any:
        """What stands for the results of one call until the recompute: (out, logsumexp) of attention, (out,) of a
        linear layer."""
        return outputs

    def give(self, kept: Any) -> tuple[Tensor, ...]:
        """The results that `keep` was given."""
        return kept

    def outputs_of(self, what: str, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """The results of this call of "attention" or of "products", computed if this is the forward.

        Raises RuntimeError where a recompute makes more calls than the forward did.
        """
        if self._ahead is None:
            outputs = compute()
            # Aliases: the results themselves get the node of the graph, which must not be held from outside of it.
            self.outputs.append(self.keep(*(out.detach() for out in outputs)))
            self.bytes[what] += sum(out.nbytes for out in outputs)
            return outputs
        if not self._ahead:
            raise RuntimeError(f"a recomputed block calls {what} more often than its forward did")
        return tuple(out.detach() for out in self.give(self._ahead.popleft()))


def attention_outputs(compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(out, logsumexp) of an attention call: computed, or what the block's forward kept."""
    return _bound[-1].outputs_of("attention", compute) if _bound else compute()


def product_output(compute: Callable[[], Tensor]) -> Tensor:
    """Output of a linear layer: computed, or what the block's forward kept."""
    if not _bound or not _bound[-1].products:
        return compute()
    return _bound[-1].outputs_of("products", lambda: (compute(),))[0]
