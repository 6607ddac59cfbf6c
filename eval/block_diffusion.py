"""Block Diffusion, the paper's baseline, in the same two streams: its mask, its loss and its decoder (METHOD of the paper, section 2).

What differs from MARS: inside a block everyone sees everyone, the clean stream too; only a random share t of each answer is
masked, and its loss weighs 1/t; a block is filled most confident token first, wherever that is. The right shift is the same: the
token at position p is predicted at p-1, which for the first token of a block is the last clean one before it. An answer is filled
with its <|im_end|> to whole blocks, and the filling is learned: the decoder always opens a whole block.

    python -m eval.block_diffusion --init tiny-sft --steps 1000 --out out/block-diffusion
"""

import argparse
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from data import ChatTokenizer, Row, arithmetic, encode_rows, epoch_steps, final_number
from decode import Generation, Rules, candidates, padded
from eval.results import command
from eval.run import wilson
from model import load_pretrained, save_pretrained
from train import IGNORE, TINY_STAGES, block_starts, learning_rate, pad_up, start_mask_embedding


def fill(row: Row, block_size: int) -> Row:
    """The row with its last token (<|im_end|>) repeated until its answer is whole blocks."""
    [(start, end)] = row.spans
    more = -(end - start) % block_size
    return Row(row.ids + row.ids[-1:] * more, [(start, end + more)])


def clean_starts(positions: torch.Tensor, response_start, block_size: int) -> torch.Tensor:
    """Block of every clean position, named by its first position: the prompt's tokens are blocks of one."""
    return torch.where(positions < response_start, positions, block_starts(positions, response_start, block_size))


def see_block(pos_q, start_q, pos_k, start_k):
    """Clean to clean: everything to the left, and the whole of the own block."""
    return (pos_k <= pos_q) | (start_k == start_q)


def streams(rows: list[Row], block_size: int, mask_id: int, generator):
    """One micro-batch of single-turn rows: ids, positions (N, 2L), mask (N, 2L, 2L), labels and weights (N, 2L).

    Columns 0..L-1 are clean, the rest noisy at the same positions. A target is a token that the noisy stream masks; it is
    predicted by the noisy position before it, or by the clean one if that lies in another block. Its weight is 1/t.
    """
    N, L = len(rows), pad_up(max(len(r.ids) for r in rows))
    x, p = torch.zeros(N, L, dtype=torch.long), torch.arange(L).expand(N, L)
    begin, length = (torch.tensor(v)[:, None] for v in zip(*((r.spans[0][0], len(r.ids)) for r in rows)))
    for i, row in enumerate(rows):
        x[i, : len(row.ids)] = torch.tensor(row.ids)
    answer = (p >= begin) & (p < length)
    t = torch.rand(N, 1, generator=generator).clamp(min=1e-3)
    masked = answer & (torch.rand(N, L, generator=generator) < t)
    start = clean_starts(p, begin, block_size)
    pos_q, pos_k, start_q, start_k = p[:, :, None], p[:, None, :], start[:, :, None], start[:, None, :]
    inside = (length > p)[:, None, :]                                                       # no one sees padding
    clean = see_block(pos_q, start_q, pos_k, start_k) & inside
    own, before = (start_k == start_q) & inside, (pos_k < start_q) & inside
    own |= torch.eye(L, dtype=torch.bool)                                                   # padding sees itself: no empty row
    clean |= torch.eye(L, dtype=torch.bool)
    mask = torch.cat([torch.cat([clean, torch.zeros_like(clean)], 2), torch.cat([before, own], 2)], 1)
    target = F.pad(masked[:, 1:], (0, 1))                                                   # position p predicts token p+1
    first = F.pad(start[:, 1:] == p[:, 1:], (0, 1))                                         # ... by the clean stream if that begins a block
    y = F.pad(x[:, 1:], (0, 1))
    labels = torch.cat([torch.where(target & first, y, IGNORE), torch.where(target & ~first, y, IGNORE)], 1)
    ids = torch.cat([x, torch.where(masked, mask_id, x)], 1)
    return ids, torch.cat([p, p], 1), mask, labels, (1 / t).expand(N, 2 * L)


def loss(model, rows: list[Row], block_size: int, mask_id: int, generator) -> torch.Tensor:
    """Mean over all answer tokens of the rows, in nats: the diffusion bound."""
    ids, positions, mask, labels, weights = streams(rows, block_size, mask_id, generator)
    hidden, supervised = model(ids, positions, mask), labels != IGNORE
    losses = F.cross_entropy(model.logits(hidden[supervised]).float(), labels[supervised], reduction="none")
    return (losses * weights[supervised]).sum() / sum(r.n_targets for r in rows)


def train(model, tokenizer, rows: list[Row], block_size: int, steps: int, batch_size: int, lr: float, seed: int, quiet=False):
    """Train in place; returns the loss of every step."""
    start_mask_embedding(model, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    generator, lengths, losses = torch.Generator().manual_seed(seed), [len(r.ids) for r in rows], []
    model.train()
    for step in (bar := tqdm(range(steps), unit="step", disable=quiet, dynamic_ncols=True)):
        epoch, at = divmod(step, -(-len(rows) // batch_size))
        if at == 0:
            batches = epoch_steps(lengths, batch_size, seed, epoch)
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps, lr, 0.03)
        value = loss(model, [rows[i] for i in batches[at]], block_size, tokenizer.mask_id, generator)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    model.eval()
    return losses


def open_block(model, ids: torch.Tensor, begins, ends, block_size: int) -> torch.Tensor:
    """Hidden states (N, B, D) that predict the B tokens of each row's last block. ids (N, T): rows that end at ends + B, their block
    in part [MASK]. begins, ends (N, 1): where the answer begins, and where its last block does."""
    p = torch.arange(ids.shape[1]).expand_as(ids)
    start = clean_starts(p, begins, block_size)
    mask = see_block(p[:, :, None], start[:, :, None], p[:, None, :], start[:, None, :]) & (p < ends + block_size)[:, None, :]
    mask |= torch.eye(ids.shape[1], dtype=torch.bool)
    places = ends - 1 + torch.arange(block_size)                                            # the right shift
    return model(ids, p, mask)[torch.arange(len(ids))[:, None], places]


@torch.inference_mode()
def generate(model, tokenizer, prompts: list, block_size: int, max_new_tokens: int = 128) -> list[Generation]:
    """Greedy answers, a block at a time, one token per forward: the most confident of the block's open places. Without a cache."""
    rules = Rules.of(tokenizer, model.config.vocab_size)
    sequences = [tokenizer.encode_prompt(p) for p in prompts]
    begins, done = [len(s) for s in sequences], [Generation() for _ in prompts]
    alive = list(range(len(prompts)))
    while alive:
        filled = [sequences[i] + [tokenizer.mask_id] * block_size for i in alive]
        ids = padded(filled, 0)
        begin, end = (torch.tensor(v)[:, None] for v in ([begins[i] for i in alive], [len(sequences[i]) for i in alive]))
        places, row = end + torch.arange(block_size), torch.arange(len(alive))
        is_open = torch.ones(len(alive), block_size, dtype=torch.bool)
        for _ in range(block_size):
            chosen, confidence = candidates(model.logits(open_block(model, ids, begin, end, block_size)), rules)
            best = confidence.masked_fill(~is_open, -1).argmax(1)
            ids[row, places[row, best]], is_open[row, best] = chosen[row, best], False
        for k, i in enumerate(list(alive)):
            block, g = ids[k, places[k]].tolist(), done[i]
            g.n_forward += block_size
            end_of = next((j + 1 for j, token in enumerate(block) if token in tokenizer.eos_ids), 0)
            g.ids += block[: end_of or block_size][: max_new_tokens - len(g.ids)]
            sequences[i] += block
            g.stop_reason = "eos" if g.ids[-1] in tokenizer.eos_ids else "length" if len(g.ids) >= max_new_tokens else ""
            if g.stop_reason:
                g.text = tokenizer.decode(g.ids)
                alive.remove(i)
    return done


def evaluate(model, tokenizer, problems, block_size: int, batch_size: int = 50) -> dict:
    """Share of right answers with its 95 % interval, and tokens per forward."""
    done = []
    for i in range(0, len(problems), batch_size):
        done += generate(model, tokenizer, [p.question for p in problems[i : i + batch_size]], block_size)
    right = sum(final_number(g.text) == p.result for g, p in zip(done, problems))
    low, high = wilson(right, len(problems))
    tokens, forwards = sum(len(g.ids) for g in done), sum(g.n_forward for g in done)
    return {"n": len(problems), "accuracy": right / len(problems), "low": low, "high": high, "tokens_per_forward": tokens / forwards}


def run(init, out: Path, block_size: int, steps: int, batch_size: int, lr: float, seed: int, quiet: bool = False) -> Path:
    """Train from a folder on generated problems and save the model; returns its folder."""
    tokenizer, model = ChatTokenizer.from_pretrained(init), load_pretrained(init, torch.float32)
    rows, _ = encode_rows([p.messages() for p in arithmetic("train", steps * batch_size, seed)], tokenizer, 512)
    train(model, tokenizer, [fill(r, block_size) for r in rows], block_size, steps, batch_size, lr, seed, quiet)
    record = {"stage": "block diffusion", "block_size": block_size, "mask_token_id": tokenizer.mask_id, "mask_token": tokenizer.mask_token}
    return save_pretrained(out, model, tokenizer, record)


@command
def main(argv=None) -> int:
    defaults = TINY_STAGES["mars"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--init", default="tiny-sft", metavar="NAME|DIR")
    parser.add_argument("--block-size", type=int, default=4, metavar="B")
    parser.add_argument("--steps", type=int, default=defaults["steps"], metavar="N")
    parser.add_argument("--batch-size", type=int, default=defaults["batch_size"], metavar="N")
    parser.add_argument("--lr", type=float, default=defaults["lr"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--problems", type=int, default=300, metavar="N", help="unseen problems to score")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args(argv)
    if min(args.block_size, args.steps, args.batch_size, args.problems) < 1:
        parser.error("--block-size, --steps, --batch-size and --problems must be at least 1")
    folder = run(args.init, args.out, args.block_size, args.steps, args.batch_size, args.lr, args.seed, args.quiet)
    tokenizer, model = ChatTokenizer.from_pretrained(folder), load_pretrained(folder, torch.float32)
    result = evaluate(model, tokenizer, arithmetic("test", args.problems), args.block_size)
    print(f"{folder}: {result['accuracy']:.1%} of {result['n']} right ({result['low']:.1%} .. {result['high']:.1%}), "
          f"{result['tokens_per_forward']:.2f} tokens per forward")
    if args.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
