"""Two kinds of randomness, always named.

*Shared* draws decide which forwards run and with what shapes; they are the same on every rank, or ranks wait for each
other in collectives that never match. *Own* draws (noise, noise levels, start frames, clips) belong to one sample, and
no two samples share them.

Both are counter-based: a generator is made from (seed, kind, name, index) whenever it is needed. What has to be saved
of a stream is therefore its counter alone, and an own draw that is indexed by a sample's position in the run, rather
than by a rank, is the same for any number of ranks.
"""

import hashlib

import torch


class Streams:
    """All random streams of a run.

    Args:
        seed: of the run.
    """

    def __init__(self, seed: int):
        self.seed = seed

    def shared(self, name: str, index: int) -> torch.Generator:
        """The generator of draw ``index`` of a shared stream: equal on all ranks."""
        return self._generator("shared", name, index)

    def own(self, name: str, position: int) -> torch.Generator:
        """The generator of one sample's own stream; ``position`` counts samples over all ranks and steps."""
        return self._generator("own", name, position)

    def _generator(self, kind: str, name: str, index: int) -> torch.Generator:
        digest = hashlib.blake2b(f"{self.seed}/{kind}/{name}/{index}".encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
