"""What "exact" means here, shown on real weights in float32: against transformers, between the caches, between batch and solo.

    python -m eval.exactness --model DIR --prompts FILE --out results/exactness-NAME.json

Kernels of different shape round differently, so two runs may part where two choices are closer than 1e-4 in probability.
Such a first difference is counted and its gap reported; any other difference is an error, and the exit code is 1.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from data import ChatTokenizer, read_chats
from decode import Rules, candidates, generate
from eval.results import command, provenance, write_results
from model import UserError, load_pretrained

TIE = 1e-4  # probability


@torch.inference_mode()
def plain_greedy(model, tokenizer, ids: list[int], n: int) -> list[int]:
    """n tokens, one whole forward each; shares nothing with decode.py."""
    start = len(ids)
    ids = list(ids)
    while len(ids) - start < n:
        logits = model.logits(model(torch.tensor([ids]))[0, -1])
        logits[tokenizer.mask_id] = -torch.inf
        ids.append(int(logits[: tokenizer.n_tokens].argmax()))
        if ids[-1] in tokenizer.eos_ids:
            break
    return ids[start:]


@torch.inference_mode()
def gap_at(model, tokenizer, prefix: list[int], window: int, tau: float) -> float:
    """How close the forward on [prefix | window - 1 masks] is to deciding otherwise: the least of best minus second
    probability and (tau < 1, from the second candidate on) |confidence - tau|, over the window's candidates."""
    rules = Rules.of(tokenizer, model.config.vocab_size, "margin")
    ids = torch.tensor([prefix + [tokenizer.mask_id] * (window - 1)])
    logits = model.logits(model(ids)[0, len(prefix) - 1 :])
    _, margin = candidates(logits, rules)
    _, confidence = candidates(logits, rules._replace(measure="probability"))
    decisions = [margin] + [(confidence[1:] - tau).abs()] * (tau < 1)
    return torch.cat(decisions).min().item()


def compare(model, tokenizer, prompts, ours, theirs, tau: float, window: int) -> dict:
    """Runs of equal prompts -> {"n", "equal", "ties", "errors", "gaps"}, looking at ids and at how they were accepted."""
    result = {"n": len(prompts), "equal": 0, "ties": 0, "errors": 0, "gaps": []}
    for prompt, (ids_a, steps_a), (ids_b, steps_b) in zip(prompts, ours, theirs):
        if ids_a == ids_b and steps_a == steps_b:
            result["equal"] += 1
            continue
        at = 0  # tokens both runs had when their forwards first differed, with a and b tokens
        for a, b in zip(steps_a, steps_b):
            if a != b or ids_a[at : at + a] != ids_b[at : at + b]:
                break
            at += a
        same = next((i for i, (x, y) in enumerate(zip(ids_a[at : at + a], ids_b[at : at + b])) if x != y), min(a, b))
        gap = gap_at(model, tokenizer, prompt + ids_a[:at], min(same + 1, window if tau < 1 else 1), tau)
        result["ties" if gap < TIE else "errors"] += 1
        result["gaps"].append(gap)
    return result


def transformers_parity(folder, model, tokenizer, prompts, n: int, ids200: list[int]) -> tuple[float, list]:
    """Largest logit difference over ids200, and transformers' greedy ids for every prompt."""
    try:
        from transformers import Qwen2ForCausalLM
    except ImportError:
        raise UserError("this check needs transformers: pip install transformers") from None
    theirs = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        x = torch.tensor([ids200])
        largest = (model.logits(model(x)) - theirs(x).logits).abs().max().item()
        runs = []
        for p in tqdm(prompts, desc="transformers", unit="prompt"):
            x = torch.tensor([p])
            out = theirs.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=n, do_sample=False, repetition_penalty=1.0,
                                  pad_token_id=tokenizer.pad_id)
            runs.append(out[0, len(p) :].tolist())
    return largest, runs


def check(args) -> dict:
    tokenizer, model = ChatTokenizer.from_pretrained(args.model), load_pretrained(args.model, torch.float32)
    chats = read_chats(args.prompts)
    questions = [next(m["content"] for m in c if m["role"] == "user") for c in chats[: args.limit]]
    prompts = [tokenizer.encode_prompt(q) for q in questions]
    text = [i for c in chats[:50] for i in tokenizer.encode_chat(c)[0]][:200]
    largest, theirs = transformers_parity(args.model, model, tokenizer, prompts, args.tokens, text)
    result = {"transformers": {"tokens": len(text), "largest_logit_difference": largest}}
    print(f"logits, {len(text)} tokens, ours against transformers: largest difference {largest:.2e}")

    def decoded(prompts, tau, cache, n=args.cache_tokens):
        done = generate(model, tokenizer, prompts, tau, args.block_size, n, cache)
        return [(g.ids, g.accepted) for g in done]

    def ones(runs):
        return [(ids, [1] * len(ids)) for ids in runs]

    def report(name, prompts, ours, theirs, tau):
        r = result[name] = compare(model, tokenizer, prompts, ours, theirs, tau, args.block_size)
        tie = f", {r['ties']} part at a tie (gap {max(r['gaps']):.1e})" if r["ties"] else ""
        print(f"{name}: {r['equal']} of {r['n']} equal{tie}{'' if not r['errors'] else '; ERRORS: ' + str(r['gaps'])}", flush=True)

    solo = [decoded([q], 1.0, "cursor", args.tokens)[0] for q in tqdm(questions, desc="tau 1, one prompt at a time", unit="prompt")]
    report("greedy ids, ours at tau 1 against transformers' generate", prompts, solo, ones(theirs), 1.0)
    few = range(min(args.plain, len(prompts)))
    plain = [plain_greedy(model, tokenizer, prompts[i], args.tokens) for i in tqdm(few, desc="plain loop", unit="prompt")]
    report("greedy ids, ours at tau 1 against a plain loop without cache", prompts[: len(few)], solo[: len(few)], ones(plain), 1.0)
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    five = [by_length[i * (len(prompts) - 1) // 4] for i in (2, 0, 4, 1, 3)] if len(prompts) >= 5 else list(range(len(prompts)))
    some, some_ids = [questions[i] for i in five], [prompts[i] for i in five]
    lengths = "/".join(str(len(p)) for p in some_ids)
    name = f"batch of prompts of {lengths} tokens against solo, tau 1"
    report(name, some_ids, decoded(some, 1.0, "cursor", args.tokens), [solo[i] for i in five], 1.0)
    report("block cache against none, tau 1", some_ids, decoded(some, 1.0, "block"), decoded(some, 1.0, "none"), 1.0)
    for tau in (0.95, 0.7, 0.3):
        cursor = decoded(some, tau, "cursor")
        report(f"cursor cache against none, tau {tau}", some_ids, cursor, decoded(some, tau, "none"), tau)
    report("batch against solo, tau 0.3", some_ids, cursor, [decoded([q], 0.3, "cursor")[0] for q in some], 0.3)
    result["errors"] = sum(r.get("errors", 0) for r in result.values()) + (largest >= 1e-3)
    return result


@command
def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--prompts", required=True, metavar="FILE", help="JSONL of chats; their first user turns are the prompts")
    parser.add_argument("--limit", type=int, default=10, metavar="N", help="prompts")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="new tokens per prompt")
    parser.add_argument("--plain", type=int, default=3, metavar="N", help="prompts for the slow plain loop")
    parser.add_argument("--cache-tokens", type=int, default=32, metavar="N", help="new tokens per prompt where caches are compared")
    parser.add_argument("--block-size", type=int, default=4, metavar="B")
    parser.add_argument("--out", type=Path, default=None, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args(argv)
    result = check(args)
    if args.out:
        settings = {k: getattr(args, k) for k in ("model", "prompts", "limit", "tokens", "cache_tokens", "block_size")}
        write_results(args.out, result | {"settings": settings, **provenance("cpu", torch.float32, args.prompts)})
    if args.json:
        print(json.dumps(result))
    return 1 if result["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
