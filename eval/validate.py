"""What a model knows of chats it was not trained on: L_AR, L_mask at each mask of a block, and whether confidence can be trusted.

    python -m eval.validate --model DIR --data FILE --limit 100 --out results/NAME.json

A mask at position t and the clean token at t predict the same next token; the clean one says what one token at a time would
say there (given the words of the data). `agreement` is how often both choose the same token, and the calibration table shows it
for masks of like confidence: with tau at the lower end of a bin, such candidates are accepted.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from data import ChatTokenizer, Row, arithmetic, encode_rows, first_question, load_chats, micro_batches
from decode import Rules, candidates, generate
from eval.results import command, provenance, write_results
from model import UserError, is_tiny, load_pretrained, pick_device, pick_dtype
from train import IGNORE, build_streams, check_max_len, flex_mask, mars_mask, pad_up

BINS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)  # edges of confidence


@torch.no_grad()
def validate(model, tokenizer, rows: list[Row], block_size: int, micro_tokens: int = 2048, flex: bool = False, quiet: bool = True) -> dict:
    """Losses in nats per token, agreement and calibration over rows; blocks begin at each answer's start.

    L_mask and agreement are lists over the masks 1..B of a block, and their means over all masks are beside them.
    """
    rules = Rules.of(tokenizer, model.config.vocab_size, device=model.lm_head.weight.device)
    sizes = [tuple(map(pad_up, (len(r.ids), r.n_targets))) for r in rows]
    n_ar, sum_ar = 0, 0.0
    offset, loss, confidence, agrees = [], [], [], []
    chunk = max(1, 2**24 // model.config.vocab_size)
    for group in tqdm(micro_batches(sizes, micro_tokens), unit="batch", disable=quiet, leave=False, dynamic_ncols=True):
        batch = build_streams([rows[i] for i in group], block_size, tokenizer.mask_id).to(rules.never.device)
        hidden = model(batch.input_ids, batch.positions, (flex_mask if flex else mars_mask)(batch.positions, batch.starts, batch.noisy))
        supervised = batch.labels != IGNORE
        i, t = (supervised & ~batch.noisy).nonzero(as_tuple=True)
        for h, y in zip(hidden[i, t].split(chunk), batch.labels[i, t].split(chunk)):
            sum_ar += torch.nn.functional.cross_entropy(model.logits(h).float(), y, reduction="sum").item()
        n_ar += len(i)
        i, t = (supervised & batch.noisy).nonzero(as_tuple=True)
        position = batch.positions[i, t]
        offset.append((position - batch.starts[i, t]).cpu())
        for masks, cleans, y in zip(hidden[i, t].split(chunk), hidden[i, position].split(chunk), batch.labels[i, t].split(chunk)):
            logits = model.logits(masks)
            ids, p = candidates(logits, rules)
            loss.append(torch.nn.functional.cross_entropy(logits.float(), y, reduction="none").cpu())
            confidence.append(p.cpu())
            agrees.append((ids == candidates(model.logits(cleans), rules)[0]).cpu())
    offset, loss, confidence, agrees = torch.cat(offset), torch.cat(loss), torch.cat(confidence), torch.cat(agrees).float()
    mean = lambda values, where: values[where].mean().item() if where.any() else None
    at = [offset == m for m in range(block_size)]
    bins = []
    for low, high in zip(BINS, BINS[1:]):
        where = (confidence >= low) & ((confidence < high) | (high == 1))
        means = {"confidence": mean(confidence, where), "agreement": mean(agrees, where)}
        bins.append({"low": low, "high": high, "n": int(where.sum()), **means})
    return {
        "n_chats": len(rows), "n_tokens": n_ar, "L_AR": sum_ar / n_ar, "L_mask": mean(loss, offset >= 0),
        "L_mask_by_mask": [mean(loss, where) for where in at], "agreement": mean(agrees, offset >= 0),
        "agreement_by_mask": [mean(agrees, where) for where in at],
        "calibration": bins,
    }  # fmt: skip


def sample_rate(model, tokenizer, chats, tau: float, block_size: int, max_len: int, n: int = 4, max_new_tokens: int = 64) -> float | None:
    """Tokens per forward when the first n questions of fewer than max_len tokens are answered at tau, in one batch; None without any."""
    prompts = [first_question(chat) for chat in chats]
    prompts = [p for p in prompts if p and len(tokenizer.encode_prompt(p)) < max_len][:n]
    done = generate(model, tokenizer, prompts, tau, block_size, max_new_tokens)
    if not done:
        return None
    return sum(len(g.ids) for g in done) / sum(g.n_forward for g in done)


def table(result: dict) -> str:
    show = lambda v, digits=3: "-" if v is None else f"{v:.{digits}f}"
    lines = [f"{result['n_chats']} chats, {result['n_tokens']:,} answer tokens: L_AR {result['L_AR']:.4f}, "
             f"L_mask {show(result['L_mask'], 4)}, masks agree with one token at a time {show(result['agreement'])}",
             "mask        " + "".join(f"{m:9}" for m in range(1, len(result["L_mask_by_mask"]) + 1)),
             "L_mask      " + "".join(f"{show(v):>9}" for v in result["L_mask_by_mask"]),
             "agreement   " + "".join(f"{show(v):>9}" for v in result["agreement_by_mask"]),
             "confidence          masks   mean   agreement"]
    for b in result["calibration"]:
        lines.append(f"{b['low']:4.2f} to {b['high']:4.2f}{b['n']:13,}{show(b['confidence']):>7}{show(b['agreement']):>12}")
    return "\n".join(lines)


@command
def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument_group("what").add_argument
    add("--model", required=True, metavar="NAME|DIR")
    add("--data", required=True, metavar="NAME|FILE", help="as train.py --data; arithmetic: unseen problems")
    add("--limit", type=int, default=16, metavar="N", help="the last N chats of the file (default 16). Of the training file these are "
        "the ones that train.py --val N held out (by default 16, of a small file a tenth): of more the model has seen some")
    add = parser.add_argument_group("how").add_argument
    add("--block-size", type=int, default=None, metavar="B", help="default: as trained, else 4")
    add("--max-len", type=int, default=512, metavar="TOKENS", help="longer chats lose their tail")
    add("--device", default="auto")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, default=None, metavar="FILE", help="results file")
    add("--quiet", action="store_true", help="no progress bar")
    add("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args(argv)
    for option in ("limit", "block_size", "max_len"):
        if (value := getattr(args, option)) is not None and value < 1:
            parser.error(f"--{option.replace('_', '-')} {value}: must be at least 1")
    device = pick_device(args.device)
    dtype, reason = pick_dtype(device, args.dtype, is_tiny(args.model))
    tokenizer, model = ChatTokenizer.from_pretrained(args.model), load_pretrained(args.model, dtype, device)
    check_max_len(args.max_len, model.config)
    unseen = args.data == "arithmetic"
    chats = [p.messages() for p in arithmetic("test", args.limit)] if unseen else load_chats(args.data)[-args.limit :]
    rows, cut = encode_rows(chats, tokenizer, args.max_len)
    if not rows:
        raise UserError(f"{args.data}: no chat is left to look at: {dict(cut)}")
    block_size = args.block_size or tokenizer.mars.get("block_size", 4)
    print(f"{args.model} on {device}, {str(dtype).removeprefix('torch.')} ({reason}); B={block_size}")
    result = validate(model, tokenizer, rows, block_size, quiet=args.quiet)
    print(table(result))
    if args.out:
        settings = {"model": args.model, "block_size": block_size, "limit": args.limit, "max_len": args.max_len}
        about = {"settings": settings, "cut": dict(cut), "trained": tokenizer.mars, **provenance(device, dtype, args.data)}
        write_results(args.out, result | about)
    if args.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
