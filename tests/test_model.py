"""The network, its folder in and out, the hub, the key/value cache, parity with transformers."""

import hashlib
import json
import logging
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SHAPES, tiny_model
from safetensors.torch import load_file, save_file

from data import ChatTokenizer
from decode import generate
from kvcache import KVCache
from model import HUB_NAMES, ModelConfig, PackedLinear, UserError, is_tiny, load_pretrained, pack, pick_device, pick_dtype, resolve
from model import save_pretrained, write_json, write_text

GOLDEN = Path(__file__).resolve().parent / "golden"
IDS = torch.randint(4, 512, (2, 12), generator=torch.Generator().manual_seed(7))
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def logits(model, ids=IDS, **kw):
    with torch.no_grad():
        return model.logits(model(ids, **kw))


def close(a, b, tolerance=1e-4):
    return torch.allclose(a, b, atol=tolerance, rtol=tolerance)


@pytest.fixture()
def folder(tmp_path, model_dir):
    """A copy of the checkpoint, free to be damaged."""
    return Path(shutil.copytree(model_dir, tmp_path / "model"))


def edit_config(folder, drop=(), **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in drop}))


def edit_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def shard(folder, n=3):
    """Split model.safetensors into n files with an index, as large models come."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {name: f"model-{i % n + 1:05}-of-{n:05}.safetensors" for i, name in enumerate(weights)}
    for file in set(where.values()):
        save_file({k: v for k, v in weights.items() if where[k] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return where


# ------------------------------------------------------------------------------------------ what transformers computes


def test_golden_logits_and_greedy_ids():
    """Fault: any formula of the network off (biases, RoPE base and pairing, epsilon, grouping, head_dim, tied head)."""
    expected = json.loads((GOLDEN / "expected.json").read_text())
    model, ids = load_pretrained(GOLDEN / "qwen2"), list(expected["prompt"])
    assert close(logits(model, torch.tensor([ids]))[0], load_file(GOLDEN / "expected.safetensors")["logits"])
    cache, fed = KVCache(model.config, 1, 64), 0
    for _ in expected["greedy"]:
        new = ids[fed:]
        ids.append(int(logits(model, torch.tensor([new]), cache=cache)[0, -1].argmax()))
        cache.advance(len(new))
        fed += len(new)
    assert ids[len(expected["prompt"]) :] == expected["greedy"]


@pytest.fixture()
def hf(caplog, monkeypatch):
    """transformers, with everything it logs in caplog."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    return transformers


def open_in_transformers(hf, folder, caplog):
    """As a user would, with default arguments: float32 as stored, nothing missing, nothing extra, nothing to warn of."""
    theirs, info = hf.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(theirs) is hf.Qwen2ForCausalLM and theirs.dtype == torch.float32
    assert not any(info.values()), info
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []
    return theirs.eval()


@pytest.mark.parametrize("shape", SHAPES)
def test_ours_opens_in_transformers(shape, hf, tmp_path, tokenizer, caplog):
    """Fault: a head_dim or row count left out of config.json, a bias dropped, 600 rows shrunk to 512 tokens."""
    model, mars = tiny_model(shape, vocab_size=600), {"block_size": 4, "mask_token_id": tokenizer.mask_id}
    assert all(p.abs().max() > 0.1 for n, p in model.named_parameters() if n.endswith("bias"))
    folder = save_pretrained(tmp_path / "m", model, tokenizer, mars, dtype=torch.float32)
    raw = json.loads((folder / "config.json").read_text())
    assert (raw["head_dim"], raw["vocab_size"], raw["mars"]) == (model.config.head_dim, 600, mars)
    theirs = open_in_transformers(hf, folder, caplog)
    with torch.no_grad():
        assert close(theirs(IDS).logits, logits(model)) and torch.equal(logits(load_pretrained(folder)), logits(model))


@pytest.mark.parametrize("max_shard_size", ["1GB", "100KB"])
@pytest.mark.parametrize("shape", SHAPES)
def test_theirs_opens_in_ours(shape, max_shard_size, hf, tmp_path):
    """Fault: a field of transformers 5's config misread, or an index of several files."""
    c = tiny_model(shape).config
    rope = {"rope_type": "default", "rope_theta": c.rope_theta}
    config = hf.Qwen2Config(**{k: v for k, v in vars(c).items() if k != "rope_theta"}, rope_parameters=rope)
    theirs = hf.Qwen2ForCausalLM(config).eval()
    theirs.load_state_dict(tiny_model(shape).state_dict())
    theirs.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").is_file() == (max_shard_size == "100KB")
    model = load_pretrained(tmp_path)
    assert model.config == c
    with torch.no_grad():
        assert close(theirs(IDS).logits, logits(model))


CHATS = [
    [dict(role="user", content="Hi")],
    [dict(role="system", content="Be brief."), dict(role="user", content="Ada has\n3."), dict(role="assistant", content="\n#### 3")],
    [dict(role="user", content=" 12 apples , isn 't it ? é🦙 "), dict(role="assistant", content="no"), dict(role="user", content="")],
]


def test_tokenizer_opens_in_transformers(hf, model_dir, tokenizer):
    """DESIGN. Fault: a chat template, a mask token or a decoder setting that did not survive the folder."""
    theirs = hf.PreTrainedTokenizerFast.from_pretrained(model_dir)  # AutoTokenizer gives every qwen2 folder Qwen's text splitting
    assert len(theirs) == tokenizer.n_tokens and theirs.convert_tokens_to_ids("<|mask|>") == tokenizer.mask_id
    assert theirs.eos_token_id == tokenizer.im_end and theirs.pad_token_id == tokenizer.pad_id
    for chat in CHATS:
        ids = tokenizer.encode_chat(chat)[0]
        assert theirs.apply_chat_template(chat, return_dict=False) == ids
        assert theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) == tokenizer.encode_prompt(chat)
        assert theirs.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)


def test_transformers_generates_what_tau_1_generates(hf, model_dir, tokenizer, caplog):
    """Fault: a generation_config.json that samples or stops elsewhere; positions of the cursor cache off."""
    theirs, ours = open_in_transformers(hf, model_dir, caplog), load_pretrained(model_dir)
    prompts = [c for c in CHATS if c[-1]["role"] == "user"] + ["Ben has 12 books.", "How many?"]
    for prompt, g in zip(prompts, generate(ours, tokenizer, prompts, tau=1.0, max_new_tokens=32), strict=True):
        ids = torch.tensor([tokenizer.encode_prompt(prompt)])
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32)
        assert out[0, ids.shape[1] :].tolist() == g.ids
    assert theirs.generation_config.eos_token_id == ChatTokenizer.from_pretrained(model_dir).eos_ids
    assert theirs.generation_config.do_sample is False


def llama(hf, folder, **more):
    """A random LlamaForCausalLM (SmolLM2's shape: tied, grouped heads) saved by transformers."""
    sizes = dict(vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16, tie_word_embeddings=True)
    rope = {"rope_type": "default", "rope_theta": 3e4}
    more |= dict(num_attention_heads=8, num_key_value_heads=4, initializer_range=0.2, rope_parameters=rope)
    torch.manual_seed(0)
    theirs = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **more)).eval()
    theirs.save_pretrained(folder)
    return theirs


def test_llama_without_biases(hf, tmp_path):
    """Fault: SmolLM2 refused for its missing biases, or run with random ones."""
    theirs, model = llama(hf, tmp_path), load_pretrained(tmp_path)
    biases = [p for n, p in model.named_parameters() if n.endswith("_proj.bias")]
    assert len(biases) == 6 and not any(b.any() for b in biases)
    with torch.no_grad():
        assert close(theirs(IDS).logits, logits(model))


@pytest.mark.parametrize("field", ["attention_bias", "mlp_bias"])
def test_llama_with_biases_is_refused(field, hf, tmp_path):
    """Fault: an output bias that this network does not have, ignored."""
    llama(hf, tmp_path, **{field: True})
    with pytest.raises(UserError, match=f"{field} is True"):
        load_pretrained(tmp_path)


# ---------------------------------------------------------------------------------------------- loading


def test_tied_head_is_one_storage_everywhere(folder, tmp_path, tokenizer):
    """Fault: a copy that trains apart from the embedding, or a head written twice."""
    assert HEAD not in load_file(folder / "model.safetensors")
    model = load_pretrained(folder)
    assert close(logits(model), logits(tiny_model()), 1e-6)
    for move in (lambda m: m, lambda m: m.to(torch.float64), lambda m: m.to("cpu", torch.bfloat16)):
        model = move(model)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert len(list(model.parameters())) == len(load_file(folder / "model.safetensors"))
    again = save_pretrained(tmp_path / "again", model, tokenizer)
    assert HEAD not in load_file(again / "model.safetensors")
    assert (m := load_pretrained(again)).lm_head.weight is m.model.embed_tokens.weight


@pytest.mark.parametrize("differs", [False, True])
def test_tied_with_a_head_in_the_file(differs, folder, capsys):
    """Fault: the stray head used, refused, or dropped without a word although it differs."""
    edit_weights(folder, lambda w: w.update({HEAD: w[EMBED] + 0.01 * differs}))
    model, said = load_pretrained(folder), capsys.readouterr().out
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert close(logits(model), logits(tiny_model()), 1e-6)
    assert ("warning" in said and HEAD in said) == differs


@pytest.mark.parametrize("drop", [(), ("tie_word_embeddings",)])
def test_untied_without_a_head(drop, folder):
    """Fault: a random head; a config that is silent taken for tied (Hugging Face says untied)."""
    edit_config(folder, drop, **({} if drop else {"tie_word_embeddings": False}))
    with pytest.raises(UserError, match=r"missing lm_head\.weight \[512, 64\]"):
        load_pretrained(folder)


@pytest.mark.parametrize("sharded", [False, True])
def test_stray_files_are_ignored(sharded, folder):
    """Fault: every .safetensors in the folder loaded, e.g. an adapter or the shards of another download."""
    if sharded:
        shard(folder)
    save_file({EMBED: torch.zeros(3, 3), "other": torch.zeros(1)}, folder / "adapter.safetensors")
    (folder / "model-00009-of-00009.safetensors").write_bytes(b"not even one")
    assert torch.equal(logits(load_pretrained(folder)), logits(tiny_model()))


def test_missing_shard_fails_first(folder):
    """Fault: minutes of reading before the error, or a third of the model random. The unreadable shard is never opened."""
    first, second, third = sorted(set(shard(folder).values()))
    (folder / first).write_bytes(b"garbage")
    (folder / third).unlink()
    with pytest.raises(UserError, match=f"1 of 3 weight files are missing: {third}") as e:
        load_pretrained(folder)
    assert first not in str(e.value)


def test_every_wrong_tensor_is_listed(folder):
    """Fault: one problem reported at a time, or torch's traceback without the shapes."""

    def damage(w):
        del w["model.layers.0.self_attn.k_proj.bias"], w["model.layers.2.mlp.up_proj.weight"]
        w["model.layers.7.extra"], w["model.norm.weight"] = torch.zeros(2, 5), torch.zeros(65)

    edit_weights(folder, damage)
    with pytest.raises(UserError) as e:
        load_pretrained(folder)
    for part in ("missing model.layers.0.self_attn.k_proj.bias [32]", "missing model.layers.2.mlp.up_proj.weight [96, 64]",
                 "unexpected model.layers.7.extra [2, 5]", "model.norm.weight is [65], the config wants [64]"):
        assert part in str(e.value)


def test_index_that_names_an_absent_tensor(folder):
    """Fault: a KeyError from inside safetensors."""
    where = shard(folder)
    index = {"weight_map": where | {"model.norm.bias": where[EMBED]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"model\.norm\.bias"):
        load_pretrained(folder)


@pytest.mark.parametrize("drop, changes", [
    ((), dict(sliding_window=3, use_sliding_window=False, max_window_layers=1)),
    (("use_sliding_window",), dict(sliding_window=3)),
    ((), dict(rope_scaling=None)),
    (("rope_theta", "rope_scaling"), dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4})),
    (("rope_theta",), dict(rope_scaling={"type": "default", "rope_theta": 10000})),
    (("head_dim",), {}),
    ((), dict(model_type="a2d-qwen2", auto_map={"AutoModel": "modeling.A2DQwen2"}, architectures=["A2DQwen2LMHeadModel"])),
])
def test_configs_that_mean_the_same(drop, changes, folder):
    """Fault: a window applied though off; a RoPE base not found where this version keeps it; a2d-qwen2 refused."""
    edit_config(folder, drop, **changes)
    assert torch.equal(logits(load_pretrained(folder)), logits(tiny_model()))


def test_rope_base_is_read_not_assumed(folder):
    """Fault: a silent 10000, which the other configs of this file would hide."""
    for i, (drop, changes) in enumerate([((), dict(rope_theta=5e5)), (("rope_theta",), dict(rope_parameters={"rope_theta": 5e5}))]):
        edit_config(folder, drop, **changes)
        model = load_pretrained(folder)
        assert model.config.rope_theta == 5e5, i
        assert torch.equal(logits(model), logits(tiny_model(rope_theta=5e5))) and not close(logits(model), logits(tiny_model()), 1e-2)


@pytest.mark.parametrize("drop, changes, names", [
    ((), dict(use_sliding_window=True, sliding_window=32), "use_sliding_window"),
    ((), dict(layer_types=["full_attention", "sliding_attention", "full_attention"]), "layer_types.*sliding_attention"),
    ((), dict(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "rope type is 'yarn'"),
    ((), dict(rope_scaling={"type": "dynamic", "factor": 2.0}), "rope type is 'dynamic'"),
    ((), dict(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}), "rope type is 'linear'"),
    ((), dict(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}), "partial_rotary_factor is 0.5"),
    (("rope_theta",), {}, "no rope_theta"),
    ((), dict(hidden_act="gelu"), "hidden_act is 'gelu'"),
    ((), dict(model_type="qwen3"), "model_type 'qwen3'"),
    ((), dict(model_type="llama", attention_bias=True), "attention_bias is True"),
    (("hidden_size", "vocab_size"), {}, "missing vocab_size, hidden_size"),
    ((), dict(num_key_value_heads=3), "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    (("head_dim",), dict(hidden_size=66), "hidden_size 66 is not a multiple of num_attention_heads 4"),
])
def test_refused_configs(drop, changes, names, folder):
    """Fault: a network that runs and is silently another one."""
    edit_config(folder, drop, **changes)
    with pytest.raises(UserError, match=f"{re.escape(str(folder))}.*{names}"):
        load_pretrained(folder)


@pytest.mark.parametrize("stored, asked, expected", [
    (torch.float16, None, torch.float32), (torch.bfloat16, None, torch.bfloat16), (torch.float32, None, torch.float32),
    (torch.bfloat16, torch.float32, torch.float32), (torch.float32, torch.bfloat16, torch.bfloat16),
])
def test_dtype_after_load(stored, asked, expected, tmp_path, tokenizer):
    """Fault: a float16 file run in float16, where Qwen overflows; one tensor left in another type."""
    folder = save_pretrained(tmp_path / "m", tiny_model(), tokenizer, dtype=stored)
    assert {v.dtype for v in load_file(folder / "model.safetensors").values()} == {stored}
    model = load_pretrained(folder, dtype=asked)
    assert {p.dtype for p in model.parameters()} == {expected}
    for p, original in zip(model.parameters(), tiny_model().parameters(), strict=True):
        assert torch.equal(p, original.to(stored).to(expected))


@pytest.mark.parametrize("file, content", [
    ("config.json", b'{"model_type": "qwen2",'), ("config.json", b"\xff\xfe{}"), ("config.json", b"[]"),
    ("model.safetensors", b""), ("model.safetensors", b"<html>502</html>"), ("model.safetensors", 0.5),
    ("model.safetensors.index.json", b"{"), ("model.safetensors.index.json", b"{}"),
])
def test_broken_files(file, content, folder):
    """Fault: a traceback for an interrupted copy or an error page saved as a file; and which file it is left unsaid."""
    if file.endswith("index.json"):
        (folder / "model.safetensors").unlink()
    if isinstance(content, float):
        whole = (folder / file).read_bytes()
        content = whole[: int(len(whole) * content)]
    (folder / file).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(str(folder))):
        load_pretrained(folder)


def test_save_replaces_in_one_rename(folder, tokenizer, monkeypatch):
    """Fault: an older checkpoint destroyed by a save that died half-way, or its files mixed with the new ones."""
    (folder / "of_the_old_one.txt").write_text("")
    other = tiny_model(seed=1)
    with monkeypatch.context() as m, pytest.raises(OSError, match="disk full"):
        m.setattr(ChatTokenizer, "save", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        save_pretrained(folder, other, tokenizer)
    assert torch.equal(logits(load_pretrained(folder)), logits(tiny_model()))
    save_pretrained(folder, other, tokenizer, dtype=torch.float32)
    assert torch.equal(logits(load_pretrained(folder)), logits(other))
    assert [p.name for p in folder.parent.iterdir()] == [folder.name] and not (folder / "of_the_old_one.txt").exists()


# ------------------------------------------------------------------------------------------------ masks and the cache


@pytest.mark.parametrize("shape", SHAPES)
def test_causal_explicit_mask_and_cache_agree(shape):
    """Fault: heads grouped wrongly in one of the two attention paths."""
    model = tiny_model(shape)
    causal = logits(model)
    assert close(causal, logits(model, mask=torch.ones(12, 12, dtype=torch.bool).tril().expand(2, 12, 12)))
    assert close(causal, logits(model, cache=KVCache(model.config, 2, 12)))
    with pytest.raises(ValueError, match="mask=None"):
        logits(model, mask=torch.ones(2, 12, 12, dtype=torch.bool), cache=KVCache(model.config, 2, 12))


def feed(model, cache, ids, *steps):
    """Feed ids in steps of the given sizes, advancing after each; the logits of all of them."""
    out = []
    for part in ids.split(steps, dim=1):
        out.append(logits(model, part, cache=cache))
        cache.advance(part.shape[1])
    return torch.cat(out, 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_cached_steps_equal_one_forward(shape):
    """Fault: a position counted wrong (V equal but K different), or a query that misses its own step's tokens."""
    model, ids = tiny_model(shape), IDS[:, :8]
    expected, caches = logits(model, ids), []
    for steps in ((5, 3), (5, 1, 1, 1), (8,)):
        caches.append(KVCache(model.config, 2, 10))
        start = caches[-1].k.data_ptr(), caches[-1].v.data_ptr()
        assert close(feed(model, caches[-1], ids, *steps), expected)
        assert (caches[-1].k.data_ptr(), caches[-1].v.data_ptr()) == start, "the buffer was copied"
        assert caches[-1].cursor.tolist() == [8, 8]
    for other in caches[1:]:
        assert close(caches[0].k, other.k, 1e-5) and close(caches[0].v, other.v, 1e-5)
    assert caches[0].k[:, :, :8].abs().amax((-1, -2)).gt(0).all() and not caches[0].k[:, :, 8:].any()


def test_what_lies_behind_the_cursor_is_dead():
    """Fault: keys of a mask read by a later step. Masks are fed thrice without advancing, wider than what follows."""
    model, cache = tiny_model(), KVCache(tiny_model().config, 2, 20)
    out = feed(model, cache, IDS[:, :5], 5)
    for width in (7, 4, 15):
        logits(model, torch.full((2, width), 3), cache=cache)
        assert cache.cursor.tolist() == [5, 5]
    assert close(torch.cat([out, feed(model, cache, IDS[:, 5:], 1, 2, 4)], 1), logits(model))


def test_rows_stand_at_different_cursors():
    """Fault: one position for the whole batch. Prompts of 3 and 7, padded with garbage, then two more steps."""
    model, lengths = tiny_model(), torch.tensor([3, 7])
    cache, pad = KVCache(model.config, 2, 20), torch.arange(7) < lengths[:, None]
    logits(model, torch.where(pad, IDS[:, :7], 3), cache=cache)
    cache.advance(lengths)
    rows = [[], []]
    for n, taken in ((4, torch.tensor([4, 2])), (3, torch.tensor([3, 3]))):
        at = cache.cursor[:, None] + torch.arange(n)
        out = logits(model, IDS.gather(1, at.clamp(max=11)), cache=cache)
        for i in range(2):
            rows[i].append(out[i, : taken[i]])
        cache.advance(taken)
    assert cache.cursor.tolist() == [10, 12]
    for i, length in enumerate(lengths.tolist()):
        alone = logits(model, IDS[i : i + 1, : cache.cursor[i]])[0, length:]
        assert close(torch.cat(rows[i]), alone)


def test_rolling_back_is_moving_the_cursor():
    """Fault: tokens taken back that are still seen."""
    model, cache = tiny_model(), KVCache(tiny_model().config, 2, 12)
    first, second = IDS[:, :9].flip(1), IDS[:, :6]
    feed(model, cache, first, 5, 4)
    cache.advance(-5)
    assert close(feed(model, cache, second, 2, 4), logits(model, torch.cat([first[:, :4], second], 1))[:, 4:])
    cache.advance(torch.tensor([-10, -6]))
    assert cache.cursor.tolist() == [0, 4]


def test_cache_has_an_end():
    """Fault: a write past max_len that lands in the next row."""
    model, cache = tiny_model(), KVCache(tiny_model().config, 2, 8)
    feed(model, cache, IDS[:, :8], 5, 3)
    before = cache.k.clone()
    for cursor, width in (([8, 8], 1), ([0, 7], 2), ([-1, 0], 1)):
        cache.cursor = torch.tensor(cursor)
        with pytest.raises(ValueError, match=r"holds positions 0\.\.7"):
            logits(model, IDS[:, :width], cache=cache)
    assert torch.equal(cache.k, before)


# --------------------------------------------------------------------------------------------------- names and the hub


@pytest.mark.parametrize("name", ["no-such-model", "./no/such", "a/b/c", "owner/", "/owner/model", "my models/qwen 2", "owner/-x"])
def test_names_that_cannot_be_models(name, monkeypatch, tmp_path):
    """Fault: a mistyped folder sent to the hub, or a traceback. Nothing is asked of a network."""
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr("socket.getaddrinfo", lambda *where, **_: asked.append(where) or [])
    with pytest.raises(UserError, match=f"{re.escape(name)}.*folder"):
        resolve(name)
    assert asked == []


def test_folders(folder, tmp_path, monkeypatch):
    """Fault: a folder without a model taken for one; a folder named like a hub id not preferred to the hub."""
    assert resolve(folder) == resolve(str(folder)) == folder
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen").mkdir()
    folder.rename(tmp_path / "Qwen" / "Qwen2.5-7B")
    assert resolve("Qwen/Qwen2.5-7B") == Path("Qwen/Qwen2.5-7B")
    with pytest.raises(UserError, match=f"{re.escape(str(tmp_path))}: no config.json"):
        resolve(tmp_path)
    assert all(v.count("/") == 1 and v.endswith("-Instruct") and k == k.lower() for k, v in HUB_NAMES.items())


class Handler(BaseHTTPRequestHandler):
    """What huggingface_hub asks of the hub to fetch a model: its revision, its files, then each file."""

    def do_GET(self):
        path, hub = self.path.split("?")[0], self.server.hub
        hub.asked.append(path)
        repo, what, file = re.fullmatch(r"/(?:api/models/)?([^/]+/[^/]+)(?:/(revision|tree|resolve)/[^/]+)?/?(.*)", path).groups()
        oid = lambda content: hashlib.sha1(content).hexdigest()
        headers = {"X-Repo-Commit": hub.sha}
        if repo not in hub.repos:
            body, headers = b"", {"X-Error-Code": "RepoNotFound"}
        elif what == "resolve":
            body, headers["ETag"] = hub.files[file], f'"{oid(hub.files[file])}"'
        elif what == "tree":
            body = json.dumps([dict(type="file", path=n, size=len(b), oid=oid(b)) for n, b in hub.files.items()]).encode()
        else:
            body = json.dumps({"id": repo, "sha": hub.sha, "siblings": [{"rfilename": n} for n in hub.files]}).encode()
        self.send_response(200 if repo in hub.repos else 404)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body if self.command == "GET" else b"")

    do_HEAD = do_GET
    log_message = lambda *_: None


ASK = """
import json, sys
from model import UserError, resolve
for line in sys.stdin:
    try:
        answer = {"path": str(resolve(line.strip()))}
    except UserError as e:
        answer = {"error": str(e)}
    print(json.dumps(answer), flush=True)
"""


class FakeHub:
    """A hub on this machine, and a process of its own (huggingface_hub reads HF_ENDPOINT at import) that calls resolve."""

    sha = "c" * 40
    repos = ("Qwen/Qwen2.5-0.5B-Instruct", "ours/one")

    def __init__(self, files, home):
        self.files, self.home, self.asked, self.port = files, home, [], 0
        self.start()
        self.open_process()

    def open_process(self):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE")) and not k.lower().endswith("_proxy")}
        env |= dict(HF_ENDPOINT=f"http://127.0.0.1:{self.port}", HF_HOME=str(self.home), PYTHONPATH=str(ROOT), HF_HUB_DISABLE_TELEMETRY="1")
        self.errors = open(self.home / "stderr", "w+")
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors)
        self.process = subprocess.Popen([sys.executable, "-c", ASK], text=True, env=env, **pipes)

    def close_process(self):
        self.process.communicate()
        self.errors.close()

    def start(self):
        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.server.hub, self.port = self, self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def stop(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    @contextmanager
    def down(self):
        self.stop()
        try:
            yield
        finally:
            self.start()

    def ask(self, name) -> tuple[dict, str]:
        """(what resolve returned or raised, what it printed); self.asked becomes the paths requested meanwhile."""
        self.asked, said = [], ""
        print(name, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line), said
            said += line
        self.errors.seek(0)
        raise AssertionError(f"resolve({name!r}) ended the process: {self.errors.read()[-2000:]}")


@pytest.fixture(scope="module")
def hub(tmp_path_factory, model_dir):
    files = {p.name: p.read_bytes() for p in model_dir.iterdir()} | {"README.md": b"# hi", "pytorch_model.bin": b"pickle"}
    hub = FakeHub(files, tmp_path_factory.mktemp("hub"))
    yield hub
    hub.close_process()
    hub.stop()


def test_hub_downloads_once(hub):
    """Fault: a short name that asks for another repository; a cached model that still needs the network; pickles fetched."""
    answer, said = hub.ask("Qwen2.5-0.5B")
    path = Path(answer["path"])
    assert "downloading Qwen/Qwen2.5-0.5B-Instruct" in said and path.is_relative_to(hub.home)
    assert sorted(p.name for p in path.iterdir()) == sorted(set(hub.files) - {"README.md", "pytorch_model.bin"})
    assert torch.equal(logits(load_pretrained(path)), logits(tiny_model()))
    assert hub.asked and all("Qwen/Qwen2.5-0.5B-Instruct" in p for p in hub.asked)
    with hub.down():
        assert hub.ask("qwen2.5-0.5b") == hub.ask("Qwen/Qwen2.5-0.5B-Instruct") == (answer, "")
    assert hub.ask("qwen2.5-0.5b") == (answer, "") and hub.asked == []


def interrupt(hub, lost: str, listing: bool) -> Path:
    """A cached model that lacks one file. Newer hub libraries keep a listing of the files, so they know; older ones cannot tell."""
    path = Path(hub.ask("ours/one")[0]["path"])
    blob = (path / lost).resolve()
    (path / lost).unlink()
    blob.unlink(missing_ok=True)
    if not listing:
        shutil.rmtree(path.parents[1] / "trees", ignore_errors=True)
        hub.close_process()  # it remembers the listing, too
        hub.open_process()
    return path


@pytest.mark.parametrize("lost", ["model.safetensors", "tokenizer.json", "config.json"])
@pytest.mark.parametrize("listing", [True, False])
def test_interrupted_download_is_completed(lost, listing, hub):
    """Fault: a half-downloaded model taken for whole, or all of it fetched again."""
    path = interrupt(hub, lost, listing)
    answer, said = hub.ask("ours/one")
    assert answer == {"path": str(path)} and "downloading" in said
    assert (path / lost).read_bytes() == hub.files[lost]
    assert [Path(p).name for p in hub.asked if "/resolve/" in p] == [lost] * 2  # its head, its body


@pytest.mark.parametrize("lost, listing", [("model.safetensors", True), ("model.safetensors", False), ("config.json", False)])
def test_interrupted_download_and_no_network(lost, listing, hub):
    """Fault: the incomplete folder handed out as a model. What is missing cannot be had, and that is what must be said."""
    interrupt(hub, lost, listing)
    with hub.down():
        answer, _ = hub.ask("ours/one")
    assert "error" in answer and "ours/one" in answer["error"] and "network" in answer["error"]


def test_hub_without_the_model_and_no_hub(hub):
    """Fault: a traceback, or an error that does not say what to do next."""
    error = hub.ask("ours/none")[0]["error"]
    assert "the hub has no model ours/none" in error and "qwen2.5-0.5b" in error
    with hub.down():
        error = hub.ask("qwen2.5-1.5b")[0]["error"]
    assert all(part in error for part in ("hf download Qwen/Qwen2.5-1.5B-Instruct --local-dir", "network"))


# ----------------------------------------------------------------------------------------------- device and dtype


def test_pick_device(monkeypatch):
    """Fault: the wrong preference, or torch's traceback for a device that is not there."""
    assert pick_device("cpu") == torch.device("cpu")
    for bad in ("cuda:99", "mps:3", "tpu9"):
        with pytest.raises(UserError, match=f"device '{bad}' cannot be used here: .+"):
            pick_device(bad)
    for cuda, mps, expected in ((True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda v=cuda: v)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda v=mps: v)
        assert pick_device() == pick_device("auto") == torch.device(expected)


def test_pick_dtype(monkeypatch, tmp_path):
    """Fault: bfloat16 where it is emulated and slow, or a reason left out; a tiny model that answers otherwise than where it was trained."""
    assert pick_dtype(torch.device("cpu"), "bfloat16") == (torch.bfloat16, "asked for")
    assert pick_dtype(torch.device("cuda"), "float32") == (torch.float32, "asked for")
    for fast in (True, False):
        dtype = torch.bfloat16 if fast else torch.float32
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True, v=fast: v or including_emulation)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda v=fast: v, raising=False)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)
        for kind in ("cuda", "cpu"):
            for asked in (None, "auto"):
                got, reason = pick_dtype(torch.device(kind), asked)
                assert got == dtype and "bfloat16" in reason.replace("avx512_bf16", "bfloat16")
        assert pick_dtype(torch.device("cpu"), "auto", tiny=True) == (torch.float32, "tiny models stay in it")
    assert pick_dtype(torch.device("mps")) == (torch.float32, "mps without fast bfloat16")
    write_json(tmp_path / "config.json", ModelConfig(hidden_size=576, num_attention_heads=9, num_key_value_heads=3).to_hf())
    assert is_tiny("tiny-mars") and not is_tiny(tmp_path)
    write_json(tmp_path / "config.json", {"model_type": "gpt2"})
    with pytest.raises(UserError, match=f"{tmp_path}: .*gpt2"):
        is_tiny(tmp_path)


def test_a_file_is_replaced_whole_and_nothing_but_a_file(tmp_path, monkeypatch):
    """Fault: killed while it writes, half a result; `--out /dev/null` made a file for the whole machine; a link cut off from its target."""
    file, link = tmp_path / "a.json", tmp_path / "link.json"
    write_text(file, "old")
    link.symlink_to(file)
    write_text(link, "new")
    assert link.is_symlink() and file.read_text() == "new" and sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "link.json"]
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text(tmp_path / "pipe", "through")
    assert os.read(reader, 9) == b"through" and stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    os.close(reader)
    monkeypatch.setattr(type(file), "replace", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_text(file, "half")
    assert file.read_text() == "new"

def test_loading_does_not_start_the_compiler(model_dir):
    """Fault: two seconds before the first token, spent on importing torch._dynamo; layers made later left without values."""
    code = f"import sys, model; model.load_pretrained({str(model_dir)!r}); assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    load_pretrained(model_dir)
    assert torch.nn.Linear(8, 8).weight.std() > 0.1


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("shape", ["1.5b", "7b"])
def test_a_packed_model_computes_the_same(shape, tokenizer):
    """Fault: biases dropped, a tied head that pulls the embedding along, a small or a wide product that differs, another answer."""
    plain, packed = (tiny_model(shape, hidden_size=768, intermediate_size=1536, num_hidden_layers=2) for _ in range(2))
    assert pack(packed) is packed
    kinds = [type(m) for m in packed.modules() if isinstance(m, (PackedLinear, torch.nn.Linear))]
    assert kinds.count(PackedLinear) == 1 + 2 * 5 and kinds.count(torch.nn.Linear) == 2 * 2  # k and v of two layers are small
    with torch.inference_mode():
        for n_rows, width in ((1, 1), (1, 4), (3, 7), (2, 60)):
            ids = torch.randint(5, 500, (n_rows, width), generator=torch.Generator().manual_seed(width))
            a, b = (m.logits(m(ids)) for m in (plain, packed))
            assert (a - b).abs().max() < 1e-4 * a.abs().max()
    a, b = (generate(m, tokenizer, ["a b c", "d"], tau, 4, 20) for m in (plain, packed) for tau in (0.3,))
    assert [(g.ids, g.accepted) for g in a] == [(g.ids, g.accepted) for g in b]


def test_what_cannot_be_packed_is_left_alone(tokenizer):
    """Fault: bfloat16 weights read as float32; a tiny model, which would be slower, packed all the same."""
    for model in (tiny_model().bfloat16(), tiny_model()):
        before = dict(model.named_parameters())
        assert dict(pack(model).named_parameters()).keys() == before.keys()
