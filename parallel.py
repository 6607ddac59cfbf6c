"""Several processes train one model:  torchrun --nproc-per-node=N train.py ...

Every rank (process) reads all chats and knows the groups of every step, takes every N-th group, and a step's gradients are sums
over tokens that are added up over the ranks once. So N ranks make the model that one makes, but for rounding, and no rank
ever waits for data that another one does not have.

Without --shard each rank holds the whole model (data parallel). With --shard (FSDP2) it holds 1/N of every weight, gradient
and AdamW moment, and gathers a layer's weights only while that layer computes: what a 7B model needs.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from model import Qwen2, UserError


def join(device: str) -> tuple[int, int, str]:
    """(rank, number of ranks, device of this rank). Under torchrun the ranks find each other; else (0, 1, device)."""
    if "RANK" not in os.environ:
        return 0, 1, device
    cuda = device == "cuda" or device == "auto" and torch.cuda.is_available()
    if cuda:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    elif device not in ("auto", "cpu"):
        raise UserError(f"--device {device}: with torchrun cuda, where every rank takes its own, or cpu")
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(hours=2))  # one rank may save for a while
    return dist.get_rank(), dist.get_world_size(), device if cuda else "cpu"


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def add_up(model, totals: torch.Tensor, args) -> torch.Tensor:
    """Sum the gradients and `totals` (on the CPU) over all ranks. Sharded gradients were summed during the backward pass."""
    if args.n_ranks == 1:
        return totals
    totals = totals.to(args.device)
    waits = [dist.all_reduce(totals, async_op=True)]
    if not args.shard:
        waits += [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
    for wait in waits:
        wait.wait()
    return totals.cpu()


def any_rank(flag: bool, args) -> bool:
    """Whether the flag is set on any rank. All ranks wait for each other here."""
    if args.n_ranks == 1:
        return flag
    flags = torch.tensor(float(flag), device=args.device)
    dist.all_reduce(flags)
    return bool(flags)


def shard(model: Qwen2, args) -> None:
    """Split every weight over the ranks, in place: one gathering per layer, one for embedding, head and last norm."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(args.device.type, (args.n_ranks,))
    # weights and AdamW in float32; gathered, and all that is computed with them, in args.dtype; gradients are added up in float32
    policy = MixedPrecisionPolicy(param_dtype=None if args.dtype == torch.float32 else args.dtype, reduce_dtype=torch.float32)
    for part in [*model.model.layers, model]:
        fully_shard(part, mesh=mesh, mp_policy=policy)
    for part in [*model.model.layers, model]:
        part.set_gradient_divide_factor(1.0)  # a sum, not a mean ...
        part.set_force_sum_reduction_for_comms(True)  # ... in one operation that gloo has too
    for method in ("logits", "token_losses"):  # what is called from outside: its weights are gathered first
        register_fsdp_forward_method(model, method)


def is_split(x) -> bool:
    return hasattr(x, "full_tensor")  # a DTensor, whose module takes a while to import


def whole(x):
    """The full tensor of a split one (all ranks must ask for it together); anything else as it is."""
    return x.full_tensor() if is_split(x) else x


def like(full: torch.Tensor, x):
    """A full tensor split in the way x is."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, x.device_mesh, x.placements) if is_split(x) else full


def on_rank_0(x):
    """The whole tensor on the CPU of rank 0, None elsewhere: a host holds one model, not one for each of its ranks."""
    full = whole(x)
    return full.cpu() if dist.get_rank() == 0 else None


def whole_model(model: Qwen2) -> Qwen2 | None:
    """The model to be saved: itself, or of a sharded one a copy on the CPU of rank 0. All ranks must ask for it together."""
    if not any(map(is_split, model.parameters())):
        return model
    weights = {name: on_rank_0(p.detach()) for name, p in model.state_dict().items()}
    if dist.get_rank() > 0:
        return None
    with torch.device("meta"):
        copy = Qwen2(model.config)
    copy.load_state_dict(weights, assign=True)
    if model.config.tie_word_embeddings:
        copy.lm_head.weight = copy.model.embed_tokens.weight
    return copy


def optimizer_state(optimizer) -> dict:
    """optimizer.state_dict() with whole tensors on rank 0, whatever the number of ranks."""
    state = optimizer.state_dict()
    full = lambda v: on_rank_0(v) if is_split(v) else v
    return state | {"state": {i: {k: full(v) for k, v in of.items()} for i, of in state["state"].items()}}


def load_optimizer_state(optimizer, state: dict) -> None:
    """Take what optimizer_state returned, split again as the weights now are."""
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    spread = lambda v, p: like(v.to(p.device), p) if is_split(p) and v.shape == p.shape else v.clone()  # let the file go
    moments = {i: {k: spread(v, weights[i]) for k, v in of.items()} for i, of in state["state"].items()}
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
