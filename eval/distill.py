"""Self-distillation: a model's own greedy answers as a chat file, for MARS to be trained on.

A model that learns several tokens at once from its own words need not change what it says, so more of its candidates are right.

    python -m eval.distill --model smollm2-135m --prompts gsm8k_train.jsonl --out out/own.jsonl
    python train.py --init smollm2-135m --data out/own.jsonl

Rows come in the order of the prompts, {"messages", "index": line of the prompt from 0}. An answer that did not end within
--max-new-tokens carries "cut": true: training takes it up to there and does not learn to end. Run the same command again after an
interruption: it goes on behind the last row. OUT's neighbour NAME.about.json holds the settings and the counts.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from data import ChatTokenizer, download, first_question, read_chats
from eval.load import Server
from eval.results import command, model_sha256, provenance
from model import UserError, is_tiny, load_pretrained, pack, pick_device, pick_dtype, read_json, resolve, write_json, write_text


@torch.inference_mode()
def answers(server: Server, prompts: list):
    """Yield (index, Generation) of every prompt, one token per forward, in the order in which they end. A free row begins the next."""
    batch, upcoming, serving = server.batch, list(enumerate(prompts))[::-1], {}
    while upcoming or serving:
        for i in (batch.limit == 0).nonzero().flatten().tolist():
            if upcoming:
                serving[i], prompt = upcoming.pop()
                server.admit(i, prompt, 1.0)
        if batch.alive():
            server.step(1.0)
        for i in [i for i in serving if not batch.limit[i]]:
            yield serving.pop(i), batch.generations[i]


def in_order(pairs):
    """Pairs (index, value), of which every index from 0 on comes once, by rising index: each as early as that allows."""
    held, first = {}, 0
    for index, value in pairs:
        held[index] = value
        while first in held:
            yield first, held.pop(first)
            first += 1


def go_on(out: Path, about: Path, settings: dict) -> int:
    """The index to go on from: 0, or behind the last whole row of an earlier run with the same settings. Cuts a torn last line off."""
    if not out.is_file():
        return 0
    old = read_json(about).get("settings", {})
    changed = [f"{k} was {old.get(k)!r}, is {v!r}" for k, v in settings.items() if old.get(k) != v]
    if changed:
        raise UserError(f"{out} was begun with other settings: {'; '.join(changed)}. Name another --out, or delete it")
    rows = out.read_bytes().split(b"\n")[:-1]  # what follows the last newline was not finished
    write_text(out, "".join(row.decode() + "\n" for row in rows))
    return json.loads(rows[-1])["index"] + 1 if rows else 0


def run(args) -> dict:
    device = pick_device(args.device)
    dtype, reason = pick_dtype(device, args.dtype, is_tiny(args.model))
    file = download("gsm8k") if args.prompts == "gsm8k" else args.prompts
    prompts = [first_question(chat) for chat in read_chats(file, need_answer=False)[: args.limit]]
    about = args.out.with_suffix(".about.json")
    origin = provenance(device, dtype, str(file))
    settings = {k: getattr(args, k) for k in ("model", "max_new_tokens", "limit", "drop_cut")}
    settings |= {"prompts_sha256": origin["data_sha256"], "model_sha256": model_sha256(resolve(args.model)), "dtype": origin["dtype"]}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    first = go_on(args.out, about, settings)
    counts = read_json(about).get("counts", {}) if first else {}
    write_json(about, {"settings": settings, "counts": counts, **origin})
    tokenizer, model = ChatTokenizer.from_pretrained(args.model), pack(load_pretrained(args.model, dtype, device))
    lengths = [len(tokenizer.encode_prompt(p)) if p else 0 for p in prompts]
    fits = [0 < n <= model.config.max_position_embeddings - args.max_new_tokens for n in lengths]
    if not any(fits):
        raise UserError(f"{args.prompts}: no prompt leaves room for {args.max_new_tokens} of the model's "
                        f"{model.config.max_position_embeddings} positions")
    print(f"{args.model} on {device}, {settings['dtype']} ({reason}); {len(prompts) - first} of {len(prompts)} prompts to answer"
          f"{f', from number {first + 1} on' if first else ''}", flush=True)
    if not all(fits):
        print(f"{len(prompts) - sum(fits)} prompts are left out: empty, or too long for {args.max_new_tokens} more tokens")
    server = Server(model, tokenizer, args.batch_size, max(n for n, ok in zip(lengths, fits) if ok), 1, args.max_new_tokens)
    n_tokens, began = 0, time.perf_counter()
    with args.out.open("a", encoding="utf-8") as file, tqdm(total=len(prompts), initial=first, unit="answer", disable=args.quiet,
                                                            dynamic_ncols=True) as bar:
        todo = [i for i in range(first, len(prompts)) if fits[i]]
        pairs = answers(server, [prompts[i] for i in todo])
        for k, g in in_order(pairs):
            index = todo[k]
            n_tokens += len(g.ids)
            cut = g.stop_reason != "eos"
            text = g.text.rstrip("\ufffd") if cut else g.text  # of a character it may have only the first bytes
            if not (cut and (args.drop_cut or not text)):
                answer = {"role": "assistant", "content": text} | ({"cut": True} if cut else {})
                file.write(json.dumps({"messages": [*prompts[index], answer], "index": index}, ensure_ascii=False) + "\n")
                file.flush()
            bar.update()
            bar.set_postfix({"tokens/s": f"{n_tokens / (time.perf_counter() - began):.0f}"})
    rows = [json.loads(line)["messages"] for line in args.out.read_bytes().split(b"\n") if line]
    seconds = time.perf_counter() - began
    if counts and not n_tokens:
        print(f"{args.out} is finished: {len(rows)} answers")
        return counts
    result = {"prompts": len(prompts), "answers": len(rows), "cut": sum("cut" in row[-1] for row in rows), "first": first,
              "seconds": seconds, "tokens_per_second": n_tokens / seconds}
    write_json(about, {"settings": settings, "counts": result, **origin})
    what = f"{sum(fits) - len(rows)} more were left out, having" if args.drop_cut else f"{result['cut']} of them cut, having"
    print(f"wrote {args.out}: {len(rows)} answers, {what} not ended within {args.max_new_tokens} tokens; "
          f"{result['tokens_per_second']:.0f} tokens/s")
    return result


@command
def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument_group("what").add_argument
    add("--model", required=True, metavar="NAME|DIR")
    add("--prompts", required=True, metavar="gsm8k|FILE", help="JSONL of chats, question/answer rows, ...; "
        "what comes before the first answer is asked")
    add("--out", required=True, type=Path, metavar="CHATS", help="JSONL of chats")
    add("--limit", type=int, default=None, metavar="N", help="the first N prompts")
    add = parser.add_argument_group("how").add_argument
    add("--max-new-tokens", type=int, default=256, metavar="N", help="longer answers are cut")
    add("--drop-cut", action="store_true", help="leave answers out that did not end")
    add("--batch-size", type=int, default=16, metavar="N")
    add("--device", default="auto")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    add = parser.add_argument_group("output").add_argument
    add("--quiet", action="store_true", help="no progress bar")
    add("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args(argv)
    for option in ("limit", "max_new_tokens", "batch_size"):
        if (value := getattr(args, option)) is not None and value < 1:
            parser.error(f"--{option.replace('_', '-')} {value}: must be at least 1")
    try:
        result = run(args)
    except KeyboardInterrupt:
        print(f"\nstopped; the same command goes on behind the last row of {args.out}", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
