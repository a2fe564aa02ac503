"""All attention of a block as one differentiable operator whose outputs can be kept: `rtcwm::prefix_attention`.

A rule is carried out as dense calls over groups of rows (`rtcwm.model.masks`). As separate calls they cost more than
their kernels: autograd fills and adds a buffer of all rows for each of them, concatenates outputs, and under
checkpointing everything runs twice. One operator around them

- writes every group's output and logsumexp into one buffer each;
- reads keys and values of targets as views. Static and proxy rows share one compact copy [static | proxies], and only
  targets of spans over six chunks, whose keys lie in several pieces, have a copy of their own;
- collects dK and dV in place: the call with the most keys goes first, and its gradient, which covers every row of a
  span of up to six chunks, becomes the buffer that the others are added to;
- gives (out, logsumexp), all that its backward needs besides q, k and v. `recompute.KeptOutputs` keeps the two of a
  block from its forward to its recompute, which then runs no attention kernel. At the release's 33,968 rows out is 487
  MB a block, 24 GB for 50 blocks, the logsumexp 8 MB; what it saves is a whole attention forward a step.

The sums are in the dtype of the kernels' gradients (bf16 on GPUs). At 34,000 rows x 7,168 the five additions to dK and
to dV move 8 GB, 2 ms a block; sums in float32 would move 19 GB and hold 2 GB where these hold 1. What bf16 sums cost in
exactness is within the rounding of the terms, which the kernels give in bf16 anyway: see the test of that name.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from rtcwm.model.kernels import Kernel
from rtcwm.model.masks import Group
from rtcwm.model.recompute import attention_outputs

_STORES = ("all", "compact")
_kernels: dict[str, Kernel] = {}  # an operator takes names, not functions


def encode(calls: Sequence[Group]) -> tuple[int, ...]:
    """Groups as an operator takes them: for each the rows' start and stop, the store, the number of pieces of its keys,
    and start and stop of every piece."""
    plan: list[int] = []
    for group in calls:
        plan += [group.rows.start, group.rows.stop, _STORES.index(group.store), len(group.keys)]
        plan += [bound for keys in group.keys for bound in (keys.start, keys.stop)]
    return tuple(plan)


@lru_cache(maxsize=256)
def decode(plan: tuple[int, ...]) -> tuple[Group, ...]:
    """The groups that `encode` was given."""
    calls, numbers = [], iter(plan)
    for start in numbers:
        stop, store, pieces = (next(numbers) for _ in range(3))
        keys = tuple(slice(next(numbers), next(numbers)) for _ in range(pieces))
        calls.append(Group(slice(start, stop), keys, _STORES[store]))
    return tuple(calls)


def attention(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, plan: Sequence[int] = ()) -> Tensor:
    """Attention output [B, Sq, H, D] of q [B, Sq, H, D] and k, v [B, Sk, H, D] through the operator; without a graph
    around it.

    `plan` from `encode`; without one every query sees every key. A kernel without halves of its own (flex attention,
    one wrapped by a caller) is run by its plain call, which nothing keeps.
    Raises ValueError for such a kernel with a plan.
    """
    if kernel.forward is None or kernel.backward is None:
        if plan:
            raise ValueError(f"kernel {kernel.name} has no forward and backward of its own and cannot carry out a plan")
        return kernel.fn(q, k, v)
    if not torch.is_grad_enabled():  # an operator costs more of the host than a small kernel takes
        return _forward(q, k, v, decode(tuple(plan)), kernel)[0]
    _kernels[kernel.name] = kernel
    return torch.ops.rtcwm.prefix_attention(q, k, v, plan, kernel.name)[0]


@torch.library.custom_op("rtcwm::prefix_attention", mutates_args=())
def prefix_attention(q: Tensor, k: Tensor, v: Tensor, plan: Sequence[int], kernel: str) -> tuple[Tensor, Tensor]:
    """(out [B, Sq, H, D], logsumexp [B, H, Sq]) by the plan of `encode`; `kernel` as `attention` registered it."""
    return attention_outputs(lambda: _forward(q, k, v, decode(tuple(plan)), _kernels[kernel]))


@prefix_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, plan: Sequence[int], kernel: str) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), _new_lse(q)


@torch.library.custom_op("rtcwm::prefix_attention_backward", mutates_args=())
def prefix_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: Sequence[int], kernel: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), of the shapes of q, k and v and contiguous."""
    return _backward(dout.contiguous(), q, k, v, out, lse, decode(tuple(plan)), _kernels[kernel])


@prefix_attention_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: Sequence[int], kernel: str
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.plan, ctx.kernel = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: torch.autograd.function.FunctionCtx, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 5
    grads = torch.ops.rtcwm.prefix_attention_backward(dout, *ctx.saved_tensors, ctx.plan, ctx.kernel)
    return *grads, None, None


prefix_attention.register_autograd(_differentiate, setup_context=_save)


def _new_lse(q: Tensor) -> Tensor:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=dtype)


class _Stores:
    """Keys and values that groups are cut from: all rows, and the compact copy of the rows of all compact groups."""

    def __init__(self, k: Tensor, v: Tensor, calls: Sequence[Group]) -> None:
        self.compact_rows = [group.rows for group in calls if group.store == "compact"]
        self._of = {"all": (k, v)}
        if self.compact_rows:
            self._of["compact"] = tuple(_pick(x, self.compact_rows) for x in (k, v))

    def keys_and_values(self, group: Group) -> list[Tensor]:
        return [_pick(x, group.keys) for x in self._of[group.store]]

    def rows(self, store: str) -> int:
        return self._of[store][0].shape[1]


def _pick(x: Tensor, pieces: Sequence[slice]) -> Tensor:
    """These rows of x: a view where they are one piece."""
    return x[:, pieces[0]] if len(pieces) == 1 else torch.cat([x[:, piece] for piece in pieces], dim=1)


class _Sum:
    """Gradients of slices of rows, added up in one buffer [B, rows, H, D]. The first, if it covers every row, becomes
    that buffer, so that nothing is filled with zeros."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.total: Tensor | None = None

    def add(self, pieces: Sequence[slice], grad: Tensor) -> None:
        """Adds a gradient that owns its memory and has the rows of the pieces one after the other."""
        if self.total is None:
            if grad.shape[1] == self.rows and len(pieces) == 1:
                self.total = grad.contiguous()
                return
            self.total = grad.new_zeros(grad.shape[0], self.rows, *grad.shape[2:])
        for piece, part in zip(pieces, grad.split([piece.stop - piece.start for piece in pieces], dim=1), strict=True):
            self.total[:, piece] += part


def _forward(q: Tensor, k: Tensor, v: Tensor, calls: Sequence[Group], kernel: Kernel) -> tuple[Tensor, Tensor]:
    if not calls:
        out, lse = kernel.forward(q, k, v)
        return out.contiguous(), lse.contiguous()
    stores = _Stores(k, v, calls)
    out, lse = q.new_empty(q.shape), _new_lse(q)
    for group in calls:
        part = kernel.forward(q[:, group.rows], *stores.keys_and_values(group))
        out[:, group.rows], lse[:, :, group.rows] = part
    return out, lse


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    calls: Sequence[Group],
    kernel: Kernel,
) -> tuple[Tensor, Tensor, Tensor]:
    if not calls:
        return tuple(grad.contiguous() for grad in kernel.backward(dout, q, k, v, out, lse))
    stores = _Stores(k, v, calls)
    dq = q.new_empty(q.shape)
    sums = {store: (_Sum(stores.rows(store)), _Sum(stores.rows(store))) for store in {group.store for group in calls}}
    for group in sorted(calls, key=_width, reverse=True):
        rows = group.rows
        # Contiguous: no copies in a batch of one, and no kernel has to be trusted with the strides of a wider buffer.
        inputs = dout[:, rows].contiguous(), q[:, rows], *stores.keys_and_values(group), out[:, rows].contiguous()
        dq[:, rows], *grads = kernel.backward(*inputs, lse[:, :, rows].contiguous())
        for total, grad in zip(sums[group.store], grads, strict=True):
            total.add(group.keys, grad)
    if "all" not in sums:
        sums["all"] = _Sum(k.shape[1]), _Sum(v.shape[1])
    for total, compact in zip(sums["all"], sums.get("compact", ())):
        total.add(stores.compact_rows, compact.total)
    return dq, *(total.total for total in sums["all"])


def _width(group: Group) -> int:
    return sum(keys.stop - keys.start for keys in group.keys)
