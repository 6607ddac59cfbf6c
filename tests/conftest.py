"""Shared by all tests: the project on the path, tiny random models of every shape the real ones have."""

import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
torch.set_num_threads(1)  # tiny models: a second thread costs more than it brings

from data import arithmetic_tokenizer  # noqa: E402
from model import ModelConfig, Qwen2, save_pretrained  # noqa: E402

SHAPES = {  # the real sizes, scaled down: (heads, kv heads, head_dim, tied)
    "0.5b": dict(num_attention_heads=14, num_key_value_heads=2, head_dim=64, hidden_size=896 // 14, tie_word_embeddings=True),
    "1.5b": dict(num_attention_heads=6, num_key_value_heads=1, head_dim=128, hidden_size=96, tie_word_embeddings=True),
    "7b": dict(num_attention_heads=7, num_key_value_heads=1, head_dim=128, hidden_size=112, tie_word_embeddings=False),
    "tiny": dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, hidden_size=64, tie_word_embeddings=True),
    "mha": dict(num_attention_heads=4, num_key_value_heads=4, head_dim=16, hidden_size=64, tie_word_embeddings=False),
}


def tiny_model(shape="tiny", seed=0, vocab_size=512, **more) -> Qwen2:
    """A random network, biases and norms included, with weights large enough that it has opinions."""
    sizes = dict(intermediate_size=96, num_hidden_layers=3, max_position_embeddings=512, rope_theta=1e4)
    config = ModelConfig(vocab_size=vocab_size, **{**sizes, **SHAPES[shape], **more})
    model = Qwen2(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.1 * noise if "norm" in name else 0.3 * noise if name.endswith("bias") else noise * 1.5 * p.shape[-1] ** -0.5)
    return model.eval()


@pytest.fixture(scope="session")
def tokenizer():
    return arithmetic_tokenizer(512)


@pytest.fixture()
def model():
    return tiny_model()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory, tokenizer):
    """A whole checkpoint folder: a tiny random model with the arithmetic tokenizer, float32."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    mars = {"stage": "mars", "block_size": 4, "mask_token_id": tokenizer.mask_id, "mask_token": tokenizer.mask_token}
    return save_pretrained(folder, tiny_model(), tokenizer, mars, dtype=torch.float32)
