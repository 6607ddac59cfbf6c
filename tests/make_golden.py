"""Write tests/golden: a tiny random Qwen2 folder by transformers, and what transformers computes with it.

    pip install transformers && python tests/make_golden.py

test_model.py reads these files without transformers. Every setting that a loader could forget (RoPE base, epsilon, biases,
grouped heads, a head_dim that is not hidden_size / heads, the tied head) has a value that shows in the logits.
"""

import json
import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

GOLDEN = Path(__file__).resolve().parent / "golden"
PROMPT = [1, 17, 300, 42, 511, 4, 99, 256, 17, 17, 128, 73]
N_GREEDY = 32


@torch.no_grad()
def main() -> None:
    config = Qwen2Config(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, tie_word_embeddings=True,
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, max_position_embeddings=128, rms_norm_eps=1e-4,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )
    model = Qwen2ForCausalLM(config).float().eval()
    generator = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        p.copy_(1 + 0.1 * noise if "norm" in name else 0.3 * noise if name.endswith("bias") else noise * 1.5 * p.shape[-1] ** -0.5)
    shutil.rmtree(GOLDEN, ignore_errors=True)
    model.save_pretrained(GOLDEN / "qwen2")
    ids = torch.tensor([PROMPT])
    save_file({"logits": model(ids).logits[0].contiguous()}, GOLDEN / "expected.safetensors")
    greedy = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=N_GREEDY)[0, len(PROMPT):].tolist()
    expected = {"transformers": transformers.__version__, "prompt": PROMPT, "greedy": greedy}
    (GOLDEN / "expected.json").write_text(json.dumps(expected) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
