"""Jacobi decoding (Santilli et al. 2023, arXiv 2305.10427): several tokens per forward from a model that was never trained for it.

    prefix  x[0] ... x[n-1]  g[1] g[2] g[3]      one causal forward over guesses instead of masks
                 predicts    p[1] p[2] p[3] p[4]

p[1] is what one token at a time would say; p[2] is too if g[1] was p[1], and so on. The rest are the next guesses. The answer is exactly
the greedy one (in float32), so this is the baseline without training: how much does a window alone give?
"""

import torch

from decode import Batch, Generation, Rules, accept_prefix, candidates, new_cache, padded, pick
from model import UserError


@torch.inference_mode()
def generate(model, tokenizer, prompts: list, block_size: int = 4, max_new_tokens: int = 256) -> list[Generation]:
    """Answer every prompt greedily with block_size predictions per forward. One Generation per prompt, as decode.generate gives."""
    rules = Rules.of(tokenizer, model.config.vocab_size, device=model.lm_head.weight.device)
    batch = Batch(model, tokenizer, len(prompts), 0.5, block_size, max_new_tokens, rules)
    for i, prompt in enumerate(prompts):
        batch.start(i, prompt)
    pending, n_pending = padded(batch.prompts, 0), torch.tensor([len(p) for p in batch.prompts])
    guesses = torch.tensor([p[-1:] for p in batch.prompts]).expand(-1, block_size - 1)  # (N, W-1): at first the last token again
    cache = new_cache(model, batch, 2 * block_size)
    column = torch.arange(block_size)
    while batch.alive():
        at = n_pending[:, None] + column[:-1]                                           # (N, W-1) columns of the guesses
        input_ids = torch.nn.functional.pad(pending, (0, block_size - 1)).scatter(1, at, guesses)
        hidden = model(input_ids.to(batch.device), cache=cache)
        logits = model.logits(pick(hidden, (n_pending - 1).clamp(min=0)[:, None] + column))
        ids, confidence = (t.cpu() for t in candidates(logits, rules))                  # (N, W)
        if not confidence[batch.limit > 0].isfinite().all():
            raise UserError("the logits are not finite; use --dtype float32, or check the weights")
        right = torch.nn.functional.pad((guesses == ids[:, :-1]).float(), (1, 0), value=1.0)
        n = accept_prefix(ids, right, torch.full((len(prompts),), 0.5), batch.limit, rules.eos_ids)
        batch.forwarded()
        batch.take(ids, n)
        cache.advance(n_pending + (n - 1).clamp(min=0))                                 # guesses that were right are in the cache already
        last = (n - 1).clamp(min=0)[:, None]
        pending, n_pending = ids.gather(1, last), (batch.limit > 0).long()
        guesses = ids.gather(1, (last + column[1:]).clamp(max=block_size - 1))          # what was predicted behind it
    return batch.generations
