"""What is alive in memory while torch computes: a dispatch mode that knows every tensor made under it."""

import weakref
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tracker(TorchDispatchMode):
    """Tensor memory that was made under it and is still alive, held by Python or by a graph: bytes by shape."""

    def __init__(self):
        super().__init__()
        self.live: dict[weakref.ref, tuple[torch.Size, int]] = {}
        self.known = weakref.WeakSet()
        self.total = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.note(out, (args, kwargs))
        return out

    def note(self, out: object, given: object) -> None:
        """Remembers the memory of what an operation made of what it was given."""
        given = {x.untyped_storage() for x in tree_leaves(given) if isinstance(x, torch.Tensor)}
        for made in tree_leaves(out):
            if isinstance(made, torch.Tensor):
                storage = made.untyped_storage()
                if storage not in given and storage not in self.known:
                    self.known.add(storage)
                    entry = (made.shape, storage.nbytes())
                    self.live[weakref.ref(storage, self._forget)] = entry
                    self.total += storage.nbytes()

    def _forget(self, reference: weakref.ref) -> None:
        self.total -= self.live.pop(reference)[1]

    def bytes(self, *tail: int) -> int:
        """Bytes alive in tensors whose shape ends so; all of them without an argument."""
        return sum(size for shape, size in self.live.values() if not tail or shape[-len(tail) :] == tail)

    def hook(self, run, *tail: int):
        """A way to run blocks that notes, between them, the most that is alive in tensors whose shape ends so."""

        def sampled(block, hidden, *rest):
            hidden = run(block, hidden, *rest)
            self.peak = max(self.peak, self.bytes(*tail))
            return hidden

        return sampled


class Peak(Tracker):
    """Also notes the most that is alive after any operation. `as_one` counts a function as one operation, whose own
    temporaries are not seen, as in a compiled piece."""

    def __init__(self):
        super().__init__()
        self.quiet = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self.quiet:
            return function(*args, **(kwargs or {}))
        out = super().__torch_dispatch__(function, types, args, kwargs)
        self.peak = max(self.peak, self.total)
        return out

    def as_one(self, function: Callable) -> Callable:
        def run(*args):
            self.quiet = True
            try:
                out = function(*args)
            finally:
                self.quiet = False
            self.note(out, args)
            self.peak = max(self.peak, self.total)
            return out

        return run
