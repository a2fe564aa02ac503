"""Device memory of one block at work, by formula: what lives at the worst moment beside weights, caches and block
inputs.

A row is counted in numbers of the block's widths: h hidden, a = heads x head width, f of the feed-forward. What is
alive follows from the block's own forward (`rtcwm.model.block`) with its pieces compiled, which keep no temporaries;
eager ones add a few tensors more. Per row:

- forward, attention: the block's input and normed rows 2h; fused qkv 3a; normed q and k 2a; output a; and a more where
  q is rotated by itself, as beside a cache;
- forward, feed-forward: input, residual, normed rows and attention's output 4h; both halves of the first layer 2f,
  their product f. In parts, these and the part's before, 6f, for the rows of a part alone;
- backward, feed-forward: kept rows 4h and gradients 2h; kept qkv, q, k and output 6a; kept first layer 2f, gradients of
  the second's input f and of the first's output 2f. In parts, two more rows h, and 9f for the rows of a part: what is
  left of the part before among them;
- backward, attention: kept rows and gradients 5h; qkv, q, k and output 6a; gradients of output, q, k and v 4a.

Attention outputs that are kept for the recompute count as kept, not here. Keys that are put together for a block count
2a a key in a forward, and in a backward pass, with their gradients, 5a.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BlockSizes:
    """Widths of a block, its number format, and the rows that go through a feed-forward at a time (0: all)."""

    layers: int
    hidden: int
    inner: int
    ffn: int
    itemsize: int
    ffn_rows: int

    @classmethod
    def of(cls, config: Mapping, dtype: torch.dtype, ffn_rows: int) -> "BlockSizes":
        """From the config of `MiniMaxH3Transformer3DModel`."""
        inner = config["num_attention_heads"] * config["attention_head_dim"]
        return cls(
            config["num_layers"], config["hidden_size"], inner, config["ffn_dim"], dtype.itemsize, ffn_rows
        )  # fmt: skip

    def _part(self, rows: int) -> int:
        return min(rows, self.ffn_rows) if self.ffn_rows else rows

    def forward(self, rows: int, keys: int = 0) -> int:
        """Bytes of a forward without a graph. ``keys``: rows of keys that it puts together, of a cache and its own."""
        h, a, f = self.hidden, self.inner, self.ffn
        attention = rows * (2 * h + (7 if keys else 6) * a) + 2 * keys * a
        return self.itemsize * max(attention, rows * 4 * h + self._part(rows) * (6 if self.ffn_rows else 3) * f)

    def backward(self, rows: int, keys: int = 0) -> int:
        """Bytes of a block's recompute and backward pass."""
        h, a, f = self.hidden, self.inner, self.ffn
        attention = rows * (5 * h + 10 * a) + 5 * keys * a
        kept = rows * ((8 if self.ffn_rows else 6) * h + 6 * a) + 2 * keys * a
        return self.itemsize * max(attention, kept + self._part(rows) * (9 if self.ffn_rows else 5) * f)

    def inputs(self, rows: int) -> int:
        """Bytes of the inputs of all blocks, kept for their recompute."""
        return self.itemsize * self.layers * rows * self.hidden

    def outputs(self, rows: int) -> int:
        """Bytes of all blocks' outputs of attention, where they are kept; the logsumexp is a hundredth of them."""
        return self.itemsize * self.layers * rows * self.inner

    def products(self, rows: int) -> int:
        """Bytes of the outputs of a block's linear layers before the last, where they are kept: qkv, attention's, and
        the feed-forward's first, which one in parts computes again."""
        return self.itemsize * rows * (3 * self.inner + self.hidden + (0 if self.ffn_rows else 2 * self.ffn))

    def activations(self, rows: int) -> int:
        """Bytes that a block without recompute keeps: rows 4h, qkv, q, k and output 6a, feed-forward 3f."""
        wide = 0 if self.ffn_rows else 3 * self.ffn
        return self.itemsize * rows * (4 * self.hidden + 6 * self.inner + wide)
