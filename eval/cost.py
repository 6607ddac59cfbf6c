"""What a MARS step costs over an SFT step on the same chats: time, memory, and the arithmetic behind it.

    python -m eval.cost --model smollm2-135m --data gsm8k --batch-size 8 --rounds 3 --out results/NAME.json

Both steps are those of train.py (forward, backward, AdamW at lr 0). Memory first, SFT before any MARS step has been taken; then the
times, in rounds in which both take the same chats one after the other; the ratio is the median over the rounds.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

import train
from data import ChatTokenizer, encode_rows, epoch_steps, load_chats
from eval.results import command, provenance, write_results
from eval.speed import start_peak, synchronize
from model import UserError, is_tiny, load_pretrained, pick_device, pick_dtype


def flop_ratio(config, rows, block_size: int) -> float:
    """Multiplications of a MARS step over those of an SFT step, in all linear layers (attention's own products left out).

    Every token in the network costs its layers once, every target the head once more.
    """
    kv = config.num_key_value_heads * config.head_dim
    layer = config.hidden_size * (2 * config.num_attention_heads * config.head_dim + 2 * kv + 3 * config.intermediate_size)
    layers, head = config.num_hidden_layers * layer, config.hidden_size * config.vocab_size
    clean, noisy = (sum(n) for n in zip(*(train.n_streamed(r, block_size) for r in rows)))
    n_mask, n_ar = train.count_targets(rows)
    return (layers * (clean + noisy) + head * (n_ar + n_mask)) / (layers * clean + head * n_ar)


def measure(model, tokenizer, steps: list[list], args) -> dict:
    """steps: rows of a warm-up and of every round."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    model.train()

    def step(stage, rows) -> float:
        began = time.perf_counter()
        record = train.optimizer_step(model, optimizer, rows, args.block_size if stage == "mars" else None, tokenizer.mask_id, args)
        synchronize(model)
        padding[stage].append(record["padding"])
        return time.perf_counter() - began

    padding, peaks = {"sft": [], "mars": []}, {}
    for stage in ("sft", "mars"):
        peak = start_peak(model)
        for rows in steps[:2]:
            step(stage, rows)
        peaks[stage] = peak()
    rounds = []
    for rows in steps[1:]:
        rounds.append({"sft": step("sft", rows), "mars": step("mars", rows), "flop_ratio": flop_ratio(model.config, rows, args.block_size),
                       "tokens": sum(sum(train.n_streamed(r, args.block_size)) for r in rows)})  # fmt: skip
    ratios = [r["mars"] / r["sft"] for r in rounds]
    return {"time_ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios),
            "flop_ratio": statistics.median(r["flop_ratio"] for r in rounds), "peak_mb": peaks,
            "memory_ratio": peaks["mars"] / peaks["sft"] if peaks["sft"] else None,
            "padding": {stage: statistics.fmean(of) for stage, of in padding.items()}, "rounds": rounds}  # fmt: skip


@command
def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--model", required=True, metavar="NAME|DIR")
    parser.add_argument("--data", default="gsm8k", metavar="NAME|FILE", help="as train.py --data")
    parser.add_argument("--block-size", type=int, default=4, metavar="B")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="chats per step")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--micro-tokens", type=int, default=1024, metavar="N", help="tokens taken through the network at once")
    parser.add_argument("--max-len", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--seed", type=int, default=0, help="which chats")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--out", type=Path, default=None, metavar="FILE", help="results file")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args(argv)
    if min(args.block_size, args.batch_size, args.rounds, args.micro_tokens) < 1:
        parser.error("--block-size, --batch-size, --rounds and --micro-tokens must be at least 1")
    args.device = pick_device(args.device)
    args.dtype, reason = pick_dtype(args.device, args.dtype, is_tiny(args.model))
    tokenizer, model = ChatTokenizer.from_pretrained(args.model), load_pretrained(args.model).float().to(args.device)
    train.check_max_len(args.max_len, model.config)
    rows, _ = encode_rows(load_chats(args.data), tokenizer, args.max_len)
    steps = epoch_steps([len(r.ids) for r in rows], args.batch_size, args.seed, 0)[: 1 + args.rounds]
    if len(steps) < 2:
        raise UserError(f"{args.data}: {len(rows)} chats are too few for two steps of {args.batch_size}")
    dtype = str(args.dtype).removeprefix("torch.")
    print(f"{args.model} on {args.device}, {dtype} ({reason}); {len(steps) - 1} rounds of {args.batch_size} chats")
    as_training = dict(rank=0, n_ranks=1, shard=False, attn="dense", anchor="random", ar_weight=1.0, clip=1.0)
    result = measure(model, tokenizer, [[rows[i] for i in step] for step in steps], argparse.Namespace(**vars(args) | as_training))
    print(f"a MARS step takes {result['time_ratio']:.2f}x the time of an SFT step ({result['lowest']:.2f}..{result['highest']:.2f}; "
          f"multiplications {result['flop_ratio']:.2f}x)")
    if result["memory_ratio"]:
        print(f"and {result['memory_ratio']:.2f}x its peak memory ({result['peak_mb']['mars']:.0f} MB over {result['peak_mb']['sft']:.0f})")
    if args.out:
        settings = {k: getattr(args, k) for k in ("model", "block_size", "batch_size", "micro_tokens", "max_len")}
        write_results(args.out, result | {"settings": settings, **provenance(args.device, args.dtype, args.data, args.seed)})
    if args.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
