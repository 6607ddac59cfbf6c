"""Training: AR SFT, then MARS. One forward over two streams that share weights and positions,

    clean   x[0] ... x[L-1]            strictly causal; position t predicts x[t+1]                    -> L_AR, answer tokens only
    noisy   [M] at every answer token  in blocks of B; the mask at position t also predicts x[t+1]    -> L_mask

and L = L_mask + ar_weight * L_AR. Files go to --out: log.jsonl, one Hugging Face folder per finished stage (sft/, mars/),
STAGE-step-NNNNNN/ to resume from, and at the end result.json.

    python train.py                                        MARS for the shipped tiny model, on generated problems: minutes
    python train.py --init scratch --stages sft,mars       the same from nothing
    python train.py --init qwen2.5-0.5b                    MARS on GSM8K train
"""

import argparse
import json
import math
import os
import platform
import signal
import sys
import time
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from data import ChatTokenizer, Row, arithmetic, arithmetic_tokenizer, checksum, encode_rows, epoch_steps, load_chats, micro_batches
from model import HUB_NAMES, LOGITS_AT_ONCE, ModelConfig, Qwen2, UserError, is_out_of_memory, load_pretrained
from model import pick_device, pick_dtype, read_json, save_pretrained, write_json, write_text
from parallel import add_up, any_rank, is_split, join, leave, like, load_optimizer_state, shard, whole, whole_model
from saving import checkpoints, clean_up, load_resume, mars_record, same_settings, save_checkpoint, settings_of_log, stop_signals, writing

IGNORE = -100  # label of a position that predicts nothing

# --------------------------------------------------------------------------------------------- the mask and the loss


def block_starts(positions, response_start, block_size: int, anchor=None):
    """First position of the block of B that each noisy position belongs to (paper section 3.2).

    positions and response_start are broadcastable integer tensors (or ints). Blocks are counted from `anchor`: None = the
    start of the response (the paper), 0 = absolute positions (the authors' code). A block never begins before the response.
    """
    positions, response_start = torch.as_tensor(positions), torch.as_tensor(response_start)
    anchor = response_start if anchor is None else torch.as_tensor(anchor)
    return torch.maximum(anchor + (positions - anchor) // block_size * block_size, response_start)


def may_attend(pos_q, start_q, noisy_q, pos_k, start_k, noisy_k):
    """May query q see key k? Of each: its position, the start of its block (read of noisy ones only), whether it is noisy."""
    clean_to_clean = ~noisy_q & ~noisy_k & (pos_k <= pos_q)
    noisy_to_noisy = noisy_q & noisy_k & (start_k == start_q) & (pos_k <= pos_q)
    noisy_to_clean = noisy_q & ~noisy_k & (pos_k < start_q)
    return clean_to_clean | noisy_to_noisy | noisy_to_clean


def mars_mask(positions, starts, noisy):
    """The block-causal mask (N, T, T), True = query i (row) may attend to key j (column). Paper Figure 2.

    positions, starts, noisy: (N, T) or broadcastable; starts is read for noisy positions only.

    L = 8, all of it response, B = 4:      clean 0..7 | noisy 0..7
        clean 0  1.......|........         noisy 0  ........|1.......    block 0 sees no clean token ...
        clean 1  11......|........         noisy 1  ........|11......
        ...                                ...
        clean 7  11111111|........         noisy 4  1111....|....1...    ... block 4 the clean 0..3
    """
    query = (t[..., :, None] for t in (positions, starts, noisy))
    key = (t[..., None, :] for t in (positions, starts, noisy))
    return may_attend(*query, *key)


def flex_mask(positions, starts, noisy):
    """The same mask for FlexAttention (--attn flex), which never holds it whole and skips its empty blocks. positions, starts (N, T)."""
    from torch.nn.attention.flex_attention import create_block_mask

    N, T = positions.shape
    at = lambda b, i: (positions[b, i], starts[b, i], noisy[i])
    make = torch.compile(create_block_mask) if positions.is_cuda else create_block_mask  # uncompiled it does hold it whole
    return make(lambda b, h, q, k: may_attend(*at(b, q), *at(b, k)), N, None, T, T, device=positions.device)


class Streams(NamedTuple):
    """A micro-batch [clean | noisy]; columns 0..Tc-1 are clean, the rest noisy (none of them for SFT)."""

    input_ids: torch.Tensor  # (N, T)
    positions: torch.Tensor  # (N, T)
    starts: torch.Tensor     # (N, T) block start of noisy positions
    noisy: torch.Tensor      # (T,) bool
    labels: torch.Tensor     # (N, T) the token each position is to predict, or IGNORE

    def to(self, device) -> "Streams":
        return Streams(*(t.to(device) for t in self))


def pad_up(n: int, multiple: int | None = None) -> int:
    """n rounded up, by default to eights, and to 32s beyond 256: few shapes occur, so the allocator can reuse its memory."""
    multiple = multiple or (8 if n <= 256 else 32)
    return -(-n // multiple) * multiple


def build_streams(rows: list[Row], block_size: int | None, mask_id: int, anchor=None, multiple: int | None = None) -> Streams:
    """Rows -> one padded micro-batch. block_size None leaves the noisy stream out (SFT).

    anchor: None or a position, as in `block_starts`; or "random", for every answer 0 to B-1 positions before its start.
    Padding needs no mask of its own: a clean pad lies to the right of every query that counts, and noisy pads share block -1.
    """
    N = len(rows)
    Tc = pad_up(max(len(r.ids) for r in rows), multiple)
    Tn = 0 if block_size is None else pad_up(max(r.n_targets for r in rows), multiple)
    input_ids = torch.zeros(N, Tc + Tn, dtype=torch.long)
    positions = torch.zeros(N, Tc + Tn, dtype=torch.long)
    starts = torch.full((N, Tc + Tn), -1)
    labels = torch.full((N, Tc + Tn), IGNORE)
    input_ids[:, Tc:] = mask_id
    positions[:, :Tc] = torch.arange(Tc)
    for i, row in enumerate(rows):
        x = torch.tensor(row.ids)
        input_ids[i, : len(x)] = x
        at = Tc
        for start, end in row.spans:
            n = end - start
            labels[i, start - 1 : end - 1] = x[start:end]            # clean: n targets x[start] .. x[end-1]
            if block_size is not None:
                p = torch.arange(start, end)
                positions[i, at : at + n] = p
                first = start - int(torch.randint(block_size, ())) if anchor == "random" else anchor
                starts[i, at : at + n] = block_starts(p, start, block_size, first)
                labels[i, at : at + n - 1] = x[start + 1 : end]      # noisy: n-1 targets x[start+1] .. x[end-1]
                at += n
    return Streams(input_ids, positions, starts, torch.arange(Tc + Tn) >= Tc, labels)


def count_targets(rows: list[Row]) -> tuple[int, int]:
    """(noisy, clean) supervised tokens of rows: n - 1 and n for every assistant turn of n tokens."""
    n = sum(r.n_targets for r in rows)
    return n - sum(len(r.spans) for r in rows), n


def dual_stream_loss(model, batch: Streams, flex: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(L_mask, L_AR) of a micro-batch as sums over its own supervised tokens, in nats (paper eq. 3 and 5).

    Sums, not means: whoever calls divides by the token counts of the whole optimizer step, so that micro-batches of
    unequal size add up to exactly the mean over tokens. Without a noisy stream L_mask is 0. flex: attention by FlexAttention.
    """
    make = flex_mask if flex else mars_mask
    mask = make(batch.positions, batch.starts, batch.noisy) if batch.noisy.any() else None
    hidden = model(batch.input_ids, batch.positions, mask)                     # (N, T, D)
    supervised = batch.labels != IGNORE                                        # (N, T)
    losses = model.token_losses(hidden[supervised], batch.labels[supervised])
    noisy = batch.noisy.expand_as(supervised)[supervised]
    return losses[noisy].sum(), losses[~noisy].sum()


# ------------------------------------------------------------------------------------------------------- one stage


def learning_rate(step: int, total: int, peak: float, warmup: float) -> float:
    """Linear warm-up over the share `warmup` of all steps, then a cosine down to 0. step counts from 0."""
    warm = max(1, round(warmup * total))
    if step < warm:
        return peak * (step + 1) / warm
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, total - warm)))


def autocast(args):
    return torch.autocast(args.device.type, dtype=args.dtype, enabled=args.dtype != torch.float32)


def n_streamed(row: Row, block_size) -> tuple[int, int]:
    """(clean, noisy) tokens of a row that go through the network: the chat, and for MARS one mask per answer token."""
    return len(row.ids), row.n_targets if block_size else 0


def groups_of(rows: list[Row], block_size, args) -> list[list[Row]]:
    """One step's rows in groups that go through the network together, each at most args.micro_tokens with its padding."""
    sizes = [tuple(map(pad_up, n_streamed(r, block_size))) for r in rows]
    return [[rows[i] for i in group] for group in micro_batches(sizes, args.micro_tokens)]


def optimizer_step(model, optimizer, rows: list[Row], block_size, mask_id: int, args) -> dict:
    """One update from `rows`, taken through the network in groups within the token budget.

    Returns what to log: {L_mask (None in SFT) and L_AR in nats per target, grad_norm before clipping, tokens (without padding), padding
    (its share)}. Raises UserError when a gradient is not finite.

    Each loss is a mean over its own supervised tokens of the whole step, whatever the groups and whichever rank takes them: every
    rank knows all rows, takes every n-th group, and the gradients of these sums are added up once.
    """
    n_mask, n_ar = count_targets(rows)
    ar_weight = args.ar_weight if block_size else 1.0
    totals = torch.zeros(2, dtype=torch.float64)
    batches = [build_streams(group, block_size, mask_id, args.anchor) for group in groups_of(rows, block_size, args)]
    for i in range(args.rank, pad_up(len(batches), args.n_ranks), args.n_ranks):
        batch = batches[min(i, len(batches) - 1)].to(args.device)
        share = float(i < len(batches))  # a rank for which no group is left takes the last one at weight 0: --shard needs all ranks
        with autocast(args):
            sum_mask, sum_ar = dual_stream_loss(model, batch, args.attn == "flex")
        (share * (sum_mask / max(1, n_mask) + ar_weight * sum_ar / n_ar)).backward()
        totals += share * torch.tensor([sum_mask.item(), sum_ar.item()], dtype=torch.float64)
        del batch, sum_mask, sum_ar  # before the next one is built
    totals = add_up(model, totals, args)
    record = {"L_mask": totals[0].item() / max(1, n_mask) if block_size else None, "L_AR": totals[1].item() / n_ar}
    record["grad_norm"] = whole(torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)).item()
    if not math.isfinite(record["grad_norm"]):
        raise UserError(f"training diverged: {record}; lower --lr (now {optimizer.param_groups[0]['lr']:g}), or --dtype float32")
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)  # gradients keep their memory from step to step
    n_tokens = sum(sum(n_streamed(r, block_size)) for r in rows)
    return record | {"tokens": n_tokens, "padding": 1 - n_tokens / sum(b.input_ids.numel() for b in batches)}


def train_stage(stage: str, model, tokenizer, rows: list[Row], held_out, args, state: dict | None = None) -> None:
    """Train `model` in place for one stage ("sft" or "mars"), logging and saving as it goes; from `state` when resuming.

    held_out: the chats of --val. They are looked at before the first step, every --val-every steps and at the end.
    """
    block_size = args.block_size if stage == "mars" else None
    batch_size, peak = args.batch_size[stage], args.lr[stage]
    per_epoch = math.ceil(len(rows) / batch_size)
    total = args.steps[stage] or math.ceil(args.epochs * per_epoch)
    fused = args.device.type in ("cuda", "cpu") and not args.shard
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=fused)
    first = 0
    if state:
        first = state["step"]
        load_optimizer_state(optimizer, state.pop("optimizer"))
    elif stage == "mars" and not args.keep_mask:
        start_mask_embedding(model, tokenizer)
    model.train()
    seconds = estimate_seconds(model, rows, block_size, batch_size, tokenizer.mask_id, args) * (total - first)
    print(f"{stage:7} {total - first} steps of {batch_size} chats, {total / per_epoch:.2f} epochs, lr {peak:g}, "
          f"about {tqdm.format_interval(seconds)}", flush=True)
    lengths = [len(r.ids) for r in rows]
    if held_out and not first:
        look(stage, 0, model, tokenizer, held_out, args)
    bar = tqdm(range(first, total), initial=first, total=total, desc=stage, unit="step", disable=args.quiet, dynamic_ncols=True)
    for step in bar:
        began = time.perf_counter()
        epoch, at = divmod(step, per_epoch)
        if step == first or at == 0:
            steps = epoch_steps(lengths, batch_size, args.seed, epoch)
        lr = optimizer.param_groups[0]["lr"] = learning_rate(step, total, peak, args.warmup)
        torch.manual_seed(zlib.crc32(f"{args.seed}/{stage}/{step}".encode()))  # whatever a step draws, a resumed one draws again
        record = optimizer_step(model, optimizer, [rows[i] for i in steps[at]], block_size, tokenizer.mask_id, args)
        took = time.perf_counter() - began
        record = {"stage": stage, "step": step + 1, **record, "lr": lr, "seconds": took, **memory_mb(args.device)}
        log(record, args)
        shown = {k: f"{record[k]:.3f}" for k in ("L_mask", "L_AR") if record[k] is not None}
        bar.set_postfix(shown | {"tok/s": f"{record['tokens'] / took:.0f}"})
        at_end, last_stage = step + 1 == total, stage == args.stages[-1]
        if held_out and (at_end or (args.val_every and (step + 1) % args.val_every == 0)):
            look(stage, step + 1, model, tokenizer, held_out, args)
        due = args.save_every and ((step + 1) % args.save_every == 0 or at_end) and not (at_end and last_stage)
        stop = any_rank(bool(args.signals), args) and not (at_end and last_stage)  # the very last step is rather finished
        if due or stop:
            save_checkpoint(stage, step + 1, model, optimizer, tokenizer, args)
        if stop:
            raise KeyboardInterrupt
    model.eval()


def log(record: dict, args) -> None:
    if args.rank == 0:
        with (args.out / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def look(stage: str, step: int, model, tokenizer, held_out, args) -> None:
    """Log and print what eval.validate finds on the held-out chats, and the tokens per forward of a few answers at tau 0.95."""
    from eval.validate import sample_rate, validate

    rows, _ = encode_rows(held_out, tokenizer, args.max_len)
    if not rows:
        return
    model.eval()
    with autocast(args):
        found = validate(model, tokenizer, rows, args.block_size, args.micro_tokens, args.attn == "flex")
        if not args.shard:
            found["tokens_per_forward"] = sample_rate(model, tokenizer, held_out, 0.95, args.block_size, args.max_len)
    model.train()
    log({"stage": stage, "step": step, "val": found}, args)
    show = {"L_AR": "L_AR {:.4f}", "L_mask": "L_mask {:.4f}", "agreement": "agreement {:.3f}",
            "tokens_per_forward": "{:.2f} tokens per forward at tau 0.95"}  # fmt: skip
    if stage == "sft":  # whose masks mean nothing yet
        show = {"L_AR": show["L_AR"]}
    words = ", ".join(text.format(found[k]) for k, text in show.items() if found.get(k) is not None)
    tqdm.write(f"{stage:7} step {step}, held out: {words}", file=sys.stdout)


@torch.no_grad()
def start_mask_embedding(model, tokenizer) -> None:
    """Give [MASK] the mean of all real tokens' embeddings: rows never trained are a bad start."""
    embed = model.model.embed_tokens.weight
    full = whole(embed)                                              # (V, D)
    full[tokenizer.mask_id] = full[: tokenizer.n_tokens].float().mean(0)
    if is_split(embed):
        embed.copy_(like(full, embed))


def estimate_seconds(model, rows: list[Row], block_size, batch_size: int, mask_id: int, args) -> float:
    """Seconds per optimizer step, from one timed forward and backward of a full group (gradients are dropped)."""
    some = rows[:: max(1, len(rows) // batch_size)][:batch_size]
    group = groups_of(some, block_size, args)[-1]
    for timed in (group[:1], group):  # the first only warms up
        batch = build_streams(timed, block_size, mask_id, args.anchor).to(args.device)
        began = time.perf_counter()
        with autocast(args):
            loss = sum(dual_stream_loss(model, batch, args.attn == "flex"))
        loss.backward()
        loss.item()
        took = time.perf_counter() - began
    model.zero_grad(set_to_none=True)
    mean = sum(sum(n_streamed(r, block_size)) for r in rows) / len(rows)
    return took / batch.input_ids.numel() * batch_size * mean / args.n_ranks


# ------------------------------------------------------------------------------------------------------ the command


def check_max_len(max_len: int, config: ModelConfig) -> None:
    """Raises UserError for chats of more tokens than the model has positions."""
    if max_len > config.max_position_embeddings:
        raise UserError(f"--max-len {max_len}: the model knows positions up to {config.max_position_embeddings}")


def memory_mb(device) -> dict:
    """Memory of this process in MB: resident now, the most it ever was, and on CUDA the most tensors ever took."""
    mb = {}
    if sys.platform == "linux":
        import resource

        mb["rss_mb"] = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 2**20
        mb["peak_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 2**10
    if device.type == "cuda":
        mb["peak_cuda_mb"] = torch.cuda.max_memory_allocated(device) // 2**20
    return mb


def memory_gb(config: ModelConfig, n_params: int, args) -> float:
    """Estimated peak: weights, gradients and two AdamW moments in float32, and the activations and logits of one group."""
    # numbers that a layer keeps per token for the backward pass; with bfloat16 norms and sums stay float32, 3 bytes on average
    width = 10 * config.hidden_size + 4 * config.intermediate_size
    activations = config.num_hidden_layers * width * args.micro_tokens * (4 if args.dtype == torch.float32 else 3)
    weights, logits = 16 * n_params / (args.n_ranks if args.shard else 1), 16 * min(LOGITS_AT_ONCE, args.micro_tokens * config.vocab_size)
    return (weights + activations + logits) / 1e9


TINY = ("scratch", "tiny-sft", "tiny-mars")  # --init, or the name of its folder: the tiny model from nothing, after SFT, after MARS
TINY_STAGES = {"sft": {"steps": 3750, "batch_size": 16, "lr": 1e-3}, "mars": {"steps": 1000, "batch_size": 8, "lr": 7e-4}}
STAGE = {"steps": None, "batch_size": 16, "lr": 5e-5}  # of other models


def tiny_config(tokenizer) -> ModelConfig:
    """What --init scratch trains: 1.1M parameters."""
    sizes = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=4)
    more = dict(max_position_embeddings=1024, rope_theta=1e4, initializer_range=0.08)  # 0.02 takes twice the steps at this width
    return ModelConfig(vocab_size=tokenizer.n_tokens, **sizes, **more)


def per_stage(parser, stages, option: str, text: str | None, kind, least) -> dict:
    """{stage: value} of an option that takes one value for all stages or one for each; {} when it was not given."""
    try:
        values = [kind(v) for v in text.split(",")] if text else []
    except ValueError:
        values = [float("nan")]
    values = values * len(stages) if len(values) == 1 else values
    if values and not (len(values) == len(stages) and all(v >= least for v in values)):
        what = "a whole number" if kind is int else "a number"
        parser.error(f"--{option.replace('_', '-')} {text}: {what} of at least {least}, or one for each stage ({', '.join(stages)})")
    return dict(zip(stages, values))


def anchor(text: str):
    """--anchor as build_streams takes it: "start" -> None, "random", or a position."""
    return None if text == "start" else text if text == "random" else int(text)


def parse(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument_group("model").add_argument
    add("--init", default="tiny-sft", metavar="NAME|DIR", help=f"tiny-sft | scratch | {' | '.join(HUB_NAMES)} | hub id | folder")
    add("--stages", default=None, metavar="LIST", help="sft, mars or sft,mars (default: mars; for scratch sft,mars)")
    add = parser.add_argument_group("data").add_argument
    add("--data", default=None, metavar="NAME|FILE", help="gsm8k | arithmetic | a JSONL file (default: gsm8k; tiny models arithmetic)")
    add("--data-size", type=int, default=None, metavar="N", help="problems to generate for arithmetic (default: as many as the "
        "steps take, or 20000)")
    add("--val", type=int, default=None, metavar="N", help="chats held out of training, the last of the file, to watch the losses on "
        "(default 16; arithmetic: unseen problems, default 0)")
    add("--val-every", type=int, default=100, metavar="STEPS", help="how often to look at them; 0 = only at the start and the end")
    add("--max-len", type=int, default=512, metavar="TOKENS", help="longer chats lose their tail")
    add = parser.add_argument_group("objective").add_argument
    add("--block-size", type=int, default=4, metavar="B", help="tokens per block, any B >= 1")
    add("--ar-weight", type=float, default=1.0, metavar="W", help="L = L_mask + W * L_AR; 0 = the paper's 'w/o SFT loss'")
    add("--anchor", type=anchor, default="random", metavar="random|start|P", help="where blocks begin: anywhere, anew in each "
        "step (default); at each answer's start (the paper); counted from position P (the authors: 0)")
    add = parser.add_argument_group("optimizer").add_argument
    tinys = lambda name: "tiny models: " + ", ".join(f"{stage} {of[name]:g}" for stage, of in TINY_STAGES.items())
    add("--batch-size", default=None, metavar="N[,N]", help=f"chats per optimizer step, of each stage (default 16; {tinys('batch_size')})")
    add("--epochs", type=float, default=None, metavar="E", help="per stage (default 1; tiny models: --steps), of --data-size problems")
    add("--steps", default=None, metavar="N[,N]", help=f"optimizer steps of each stage, instead of --epochs (default of {tinys('steps')})")
    add("--lr", default=None, metavar="LR[,LR]", help=f"peak learning rate of each stage (default 5e-5; {tinys('lr')})")
    add("--warmup", type=float, default=0.03, metavar="SHARE", help="share of the steps with rising lr; a cosine to 0 follows")
    add("--weight-decay", type=float, default=0.0)
    add("--clip", type=float, default=1.0, metavar="NORM", help="gradient norm limit")
    add("--seed", type=int, default=0)
    add = parser.add_argument_group("machine").add_argument
    add("--device", default="auto", help="auto | cuda | mps | cpu")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="of matrix products; weights and AdamW stay float32")
    add("--attn", default="dense", choices=["dense", "flex"], help="dense: the mask as a matrix; "
        "flex: FlexAttention, for long chats on CUDA")
    add("--shard", action="store_true", help="under torchrun: split weights, gradients and AdamW over the ranks (FSDP2)")
    add("--micro-tokens", type=int, default=None, metavar="N", help="tokens taken through the network at once "
        "(default 1024; tiny models 4096; CUDA 16384)")
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, default=None, metavar="DIR", help="default: out/<name of init>, out/tiny for tiny-sft")
    add("--save-every", type=int, default=100, metavar="STEPS", help="checkpoint to resume from; 0 = only when stopped (Ctrl-C, SIGTERM)")
    add("--resume", nargs="?", const="newest", choices=["newest", "auto"], help="continue the newest checkpoint in --out; give the same "
        "options again. auto: continue if there is one, begin if there is none, and train no more if the run is finished")
    add("--overwrite", action="store_true", help="begin anew: log, result and checkpoints in --out go now, the folder of a stage when "
        "its new one is finished")
    add("--problems", type=int, default=None, metavar="N", help="score the result on N unseen arithmetic problems "
        "(default 300 for the tiny models)")
    add("--quiet", action="store_true", help="no progress bar")
    add("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args(argv)

    if args.resume and args.overwrite:
        parser.error("--resume goes on with what --overwrite drops: give one of them")
    args.tiny = Path(args.init).name in TINY
    scratch, tiny = args.init == "scratch", args.tiny
    args.stages = (args.stages or ("sft,mars" if scratch else "mars")).split(",")
    if args.stages not in (["sft"], ["mars"], ["sft", "mars"]):
        parser.error(f"--stages {','.join(args.stages)}: allowed are sft, mars, and sft,mars")
    args.data = args.data or ("arithmetic" if tiny else "gsm8k")
    on_arithmetic = args.data == "arithmetic"
    args.val = args.val if args.val is not None else 0 if on_arithmetic else 16
    args.problems = args.problems if args.problems is not None else 300 if tiny and on_arithmetic else 0
    init = Path(args.init)  # a finished stage, out/NAME/sft, is named after both
    name = f"{init.parent.name}-{init.name}" if init.name in ("sft", "mars") else init.name.removesuffix("-sft")
    args.out = args.out or Path("out") / name
    defaults = {stage: TINY_STAGES[stage] if tiny else STAGE for stage in args.stages}
    if not on_arithmetic or args.epochs is not None or args.data_size is not None:
        defaults = {stage: {**of, "steps": None} for stage, of in defaults.items()}  # then the data says how many
    for option, kind, least in (("steps", int, 1), ("batch_size", int, 1), ("lr", float, 0)):
        given = per_stage(parser, args.stages, option, getattr(args, option), kind, least)
        setattr(args, option, given or {stage: of[option] for stage, of in defaults.items()})
    args.epochs = args.epochs if args.epochs is not None else 1.0
    if args.data_size is None:
        args.data_size = max(n * args.batch_size[stage] if n else 20_000 for stage, n in args.steps.items())
    at_least = dict(block_size=1, max_len=2, data_size=1, save_every=0, ar_weight=0, weight_decay=0, problems=0, val=0, val_every=0)
    for option, least in at_least.items():
        if not getattr(args, option) >= least:
            parser.error(f"--{option.replace('_', '-')} {getattr(args, option)}: must be at least {least}")
    if args.problems and not on_arithmetic:
        parser.error(f"--problems {args.problems}: only answers to arithmetic problems can be scored here, not those of {args.data}")
    if not (math.inf > args.epochs > 0 < args.clip and 0 <= args.warmup <= 1 and (args.micro_tokens is None or args.micro_tokens > 0)):
        parser.error("--epochs, --clip and --micro-tokens must be above 0, --warmup within 0..1")
    not_the_run = ("tiny", "out", "save_every", "resume", "overwrite", "problems", "quiet", "json", "device", "shard", "val_every")
    args.settings = {k: v for k, v in vars(args).items() if k not in not_the_run}  # equal settings make the same run
    args.rank, args.n_ranks, args.signals = 0, 1, []
    return args


def run(args) -> dict:
    args.began, args.finished = time.perf_counter(), None
    args.rank, args.n_ranks, device = join(args.device)
    if args.rank > 0:
        args.quiet, sys.stdout = True, open(os.devnull, "w")
    if args.shard and args.n_ranks == 1:
        raise UserError("--shard splits over several ranks: start with torchrun --nproc-per-node=N train.py ...")
    args.device = pick_device(device)
    if args.attn == "flex" and args.device.type != "cuda":
        raise UserError(f"--attn flex: FlexAttention has a backward pass on CUDA only, and this is {args.device}; use --attn dense")
    micro_tokens = 16384 if args.device.type == "cuda" else 4096 if args.tiny else 1024
    args.micro_tokens = args.settings["micro_tokens"] = args.micro_tokens or micro_tokens
    finished = read_json(args.out / "result.json") if args.resume == "auto" and (args.out / args.stages[-1]).is_dir() else {}
    resume = checkpoints(args.out)[-1:] if args.resume and not finished else []
    if args.resume == "newest" and not resume:
        raise UserError(f"--resume: no STAGE-step-NNNNNN checkpoint in {args.out}")
    begun = settings_of_log(args.out) if args.resume == "auto" and not finished and not resume else {}
    if not (args.overwrite or finished or resume or begun):
        if unfinished := checkpoints(args.out):
            raise UserError(f"{args.out} holds an unfinished run ({unfinished[-1].name}): --resume continues it, --overwrite drops it")
        for there in [file for name in ("sft", "mars", "result.json") if (file := args.out / name).exists()]:
            raise UserError(f"{there} is of a finished run: --out DIR trains elsewhere, --overwrite begins anew")
    if args.init == "scratch" and not resume:
        tokenizer = arithmetic_tokenizer()
        model = Qwen2(tiny_config(tokenizer)).init_weights(args.seed)
        args.save_dtype = torch.bfloat16
    else:
        tokenizer = ChatTokenizer.from_pretrained(resume[0] if resume else args.init)
        model = load_pretrained(resume[0] if resume else args.init)
        args.save_dtype = model.lm_head.weight.dtype
    args.dtype, reason = pick_dtype(args.device, args.dtype, model.config.tiny)
    args.keep_mask = tokenizer.mars.get("stage") == "mars"  # an already trained [MASK]
    check_max_len(args.max_len, model.config)
    chats = load_chats(args.data, args.data_size, args.seed)
    held_out = []
    if args.val and args.data == "arithmetic":
        held_out = [p.messages() for p in arithmetic("test", args.val)]
    elif args.val:
        args.val = min(args.val, len(chats) // 10)  # of a small file a tenth at most
        chats, held_out = chats[: len(chats) - args.val], chats[len(chats) - args.val :]
    rows, cut = encode_rows(chats, tokenizer, args.max_len)
    if not rows:
        raise UserError(f"{args.data}: none of its {len(chats)} chats is left to train on: {dict(cut)}")

    n_params = sum(p.numel() for p in model.parameters())
    n_tokens, n_targets = sum(len(r.ids) for r in rows), sum(r.n_targets for r in rows)
    args.settings["data_checksum"] = checksum(rows)  # a resumed run must meet the same rows
    print(f"model   {args.init}: {n_params / 1e6:.1f}M parameters, [MASK] is {tokenizer.mask_token} ({tokenizer.mask_id})")
    print(f"data    {args.data}: {len(rows)} chats, {n_tokens:,} tokens, {n_targets:,} of them to learn")
    for what, n in cut.items():
        print(f"        {n} chats {what}")
    chats = chats[:50]  # for a sample at the end
    if held_out:
        print(f"        {len(held_out)} more held out, to watch the losses on")
    print(f"train   {' then '.join(args.stages)}; B={args.block_size}, ar_weight {args.ar_weight:g}, seed {args.seed}")
    print(f"device  {args.device}, {str(args.dtype).removeprefix('torch.')} ({reason}); about "
          f"{memory_gb(model.config, n_params, args):.1f} GB with {args.micro_tokens} tokens at once")
    print(f"output  {args.out}/", flush=True)

    same_settings(finished.get("settings", begun), args, args.out)
    if finished:
        args.finished = args.out / args.stages[-1]
        print(f"{args.finished} is finished", flush=True)
        if args.rank == 0:
            clean_up(args.out)
            if args.problems and "n" not in finished:  # it was stopped while it was scored
                finished |= score(args.finished, tokenizer, args)
                write_json(args.out / "result.json", finished)
        return finished
    state = load_resume(resume[0], args) if resume else None
    if resume:
        args.keep_mask, args.save_dtype = state["keep_mask"], state["save_dtype"]
    elif args.rank == 0:
        with writing(args.out):
            args.out.mkdir(parents=True, exist_ok=True)
            clean_up(args.out)  # of the run that --overwrite drops
            (args.out / "result.json").unlink(missing_ok=True)
        about = {"settings": args.settings, "command": sys.argv, "device": str(args.device), "dtype": str(args.dtype),
                 "torch": torch.__version__, "python": platform.python_version(),
                 "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"}
        write_text(args.out / "log.jsonl", json.dumps(about) + "\n")
    if args.shard:
        shard(model, args)
    model = model.float().to(args.device)
    with stop_signals(args):
        for stage in args.stages[args.stages.index(state["stage"]) if state else 0 :]:
            train_stage(stage, model, tokenizer, rows, held_out, args, state)
            state, folder, full = None, args.out / stage, whole_model(model)
            if args.rank == 0:
                with writing(folder, checkpoints(args.out)):
                    save_pretrained(folder, full, tokenizer, mars_record(stage, tokenizer, args), args.save_dtype)
            print(f"saved   {folder}", flush=True)
    if args.rank > 0:
        return {}
    args.finished = folder
    lines = (args.out / "log.jsonl").read_text(encoding="utf-8").splitlines()
    about, last = json.loads(lines[0]), [r for r in map(json.loads, lines[1:]) if "val" not in r][-1]
    result = {"checkpoint": str(folder), "stage": stage, "steps": last["step"], "L_mask": last["L_mask"], "L_AR": last["L_AR"]}
    result["seconds"] = time.perf_counter() - args.began
    write_json(args.out / "result.json", result | about)  # from here on the run is finished, scored or not
    clean_up(args.out)
    if args.signals:
        raise KeyboardInterrupt
    if args.problems:
        result |= score(folder, tokenizer, args)
        result["seconds"] = time.perf_counter() - args.began
        write_json(args.out / "result.json", result | about)
    show_sample(full.to(args.device), tokenizer, chats, stage, args, folder)
    return result


def score(folder: Path, tokenizer, args) -> dict:
    """Print the table of eval.quick for the saved model, beside the one it was made from, and return it."""
    from eval.quick import measure, table

    load = lambda name: load_pretrained(name, args.dtype, args.device)
    if "sft" in args.stages:
        before = load(args.out / "sft")
    elif args.init == "scratch":
        before = Qwen2(tiny_config(tokenizer)).init_weights(args.seed).to(args.device, args.dtype)
    else:
        before = load(args.init)
    after = load(folder) if folder.name == "mars" else None
    n_rounds = max(1, min(4, args.problems // 50))
    result = measure(before, after, tokenizer, args.problems, args.block_size, n_rounds=n_rounds, quiet=args.quiet)
    print(f"\n{table(result)}", flush=True)
    return result


def show_sample(model, tokenizer, chats, stage: str, args, folder) -> None:
    """Decode a question of the data (or the sample problem) with the new model, and say what to type next."""
    from decode import SAMPLE, generate, shade

    tau, parts = (0.9 if stage == "mars" else 1.0), []
    question = min((m["content"] for chat in chats for m in chat if m["role"] == "user"), key=len, default=None)
    if args.data == "arithmetic":
        question = SAMPLE
    if question is not None and len(tokenizer.encode_prompt(question)) < model.config.max_position_embeddings:
        [done] = generate(model, tokenizer, [question], tau, args.block_size, 64, on_text=lambda row, text, n: parts.append((text, n)))
        print(f"\n{question}\n{shade(parts)}\n({len(done.ids)} tokens in {done.n_forward} forwards at tau {tau:g})")
    where = "" if args.out.parent == Path("out") else f" --model {folder}"  # decode.py takes the newest under out/
    print(f"\nnext: python decode.py{where} --tau {tau:g}{' --compare' if stage == 'mars' else ''}")


def main(argv=None) -> int:
    args = parse(argv)
    try:
        result = run(args)
    except (UserError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as e:
        if not is_out_of_memory(e):
            raise
        print(f"error: out of memory. Lower --micro-tokens (now {args.micro_tokens}), then --max-len (now {args.max_len})", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        saved = checkpoints(args.out)
        left = f"the same command with --resume continues {saved[-1]}" if saved else "no checkpoint yet"
        if args.rank == 0:
            print(f"\nstopped; {f'{args.finished} is finished' if args.finished else left}", file=sys.stderr)
        return 128 + (args.signals or [signal.SIGINT])[0]
    finally:
        leave()
    if args.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
