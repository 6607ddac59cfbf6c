"""Qwen2 from scratch: the network, and its Hugging Face folder in and out.

Shapes: N rows, T positions in this forward, S positions that may be read, D hidden_size, H query heads, K key/value
heads, G = H // K query heads sharing one key/value head, hd head_dim, V vocab_size (rows of the embedding).

Parameter names are Hugging Face's, so loading a folder is nearly an identity. The network knows nothing of MARS: a
forward takes token ids, the position each token stands for, and a mask that says which position may see which.
"""

import functools
import json
import os
import re
import shutil
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

HUB_NAMES = {
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5-3b": "Qwen/Qwen2.5-3B-Instruct",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen2.5-coder-0.5b": "Qwen/Qwen2.5-Coder-0.5B-Instruct",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
}
LOGITS_AT_ONCE = 2**25  # that a loss holds in memory: 128 MB in float32, and as much each for their log-softmax and the gradients of both
SHIPPED = ("tiny-sft", "tiny-mars")  # folders of checkpoints/, beside this file


class UserError(ValueError):
    """Something the person at the keyboard can put right; a command prints it as one line and exits with 2."""


def is_out_of_memory(error: BaseException) -> bool:
    """True for what CUDA, Python and torch's CPU allocator raise when memory ends."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


# ------------------------------------------------------------------------------------------------------- the network


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Qwen2 network, under Hugging Face's field names. `head_dim` None means hidden_size / heads."""

    vocab_size: int = 151936
    hidden_size: int = 896
    intermediate_size: int = 4864
    num_hidden_layers: int = 24
    num_attention_heads: int = 14
    num_key_value_heads: int = 2
    head_dim: int | None = None
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02

    def __post_init__(self):
        heads, kv = self.num_attention_heads, self.num_key_value_heads
        if heads % kv:
            raise UserError(f"config: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv}")
        if self.head_dim is None:
            if self.hidden_size % heads:
                raise UserError(f"config: hidden_size {self.hidden_size} is not a multiple of num_attention_heads {heads}")
            object.__setattr__(self, "head_dim", self.hidden_size // heads)

    @classmethod
    def from_hf(cls, raw: dict) -> "ModelConfig":
        """Read a config.json; refuse by name what this network would silently compute differently."""
        kind = raw.get("model_type")
        if kind not in ("qwen2", "a2d-qwen2", "llama"):
            raise UserError(f"config: model_type {kind!r} is not supported (qwen2, the authors' a2d-qwen2, or llama without biases)")
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}  # transformers 5 | 4
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        layer_types = set(raw.get("layer_types") or ["full_attention"])
        needs = {  # field: (value, the only value we compute)
            "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
            "rope type": (rope_type, "default"),
            "partial_rotary_factor": (rope.get("partial_rotary_factor", 1.0), 1.0),
            "use_sliding_window": (bool(raw.get("use_sliding_window")), False),
            "layer_types": (sorted(layer_types), ["full_attention"]),
        }
        if kind == "llama":  # SmolLM2: the same network without q/k/v biases
            needs |= {name: (bool(raw.get(name)), False) for name in ("attention_bias", "mlp_bias", "rope_interleaved")}
        for name, (value, allowed) in needs.items():
            if value != allowed:
                raise UserError(f"config: {name} is {value!r}, only {allowed!r} is implemented")
        theta = rope.get("rope_theta", raw.get("rope_theta"))
        if theta is None:
            raise UserError("config: no rope_theta, neither at the top level nor in rope_parameters")
        known = {f.name: raw[f.name] for f in fields(cls) if raw.get(f.name) is not None}
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        missing = [f for f in sizes if f not in known]
        if missing:
            raise UserError(f"config: missing {', '.join(missing)}")
        known.setdefault("num_key_value_heads", known["num_attention_heads"])
        known.setdefault("tie_word_embeddings", False)  # Hugging Face's default where a file is silent
        return cls(**{**known, "rope_theta": float(theta)})

    @property
    def tiny(self) -> bool:
        """Too narrow to gain from bfloat16 on a CPU: such a model is trained and decoded in float32 there."""
        return self.hidden_size < 512

    def to_hf(self) -> dict:
        return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "attention_dropout": 0.0,
                "use_cache": True, "use_sliding_window": False, "rope_scaling": None, **asdict(self)}


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the root mean square taken in float32."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


def rope_tables(positions: torch.Tensor, head_dim: int, theta: float, dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin (N, T, 1, hd) of every position's rotation angles; computed once a forward, in float32."""
    inv_freq = theta ** (-torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)  # (hd/2,)
    angles = positions[..., None, None].float() * inv_freq                                           # (N, T, 1, hd/2)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE: turn the pairs (x[i], x[i + hd/2]) of x (N, T, heads, hd) by their position's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


@functools.cache
def flex_attention():
    """torch's FlexAttention; compiled on CUDA, where it has a kernel of its own."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if torch.cuda.is_available() else flex_attention


class Attention(nn.Module):
    """Causal or masked attention with grouped queries; `layer` is its place in the KV cache."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer = layer
        D, hd = config.hidden_size, config.head_dim
        self.n_head, self.n_kv, self.head_dim = config.num_attention_heads, config.num_key_value_heads, hd
        self.q_proj = nn.Linear(D, self.n_head * hd, bias=True)
        self.k_proj = nn.Linear(D, self.n_kv * hd, bias=True)
        self.v_proj = nn.Linear(D, self.n_kv * hd, bias=True)
        self.o_proj = nn.Linear(self.n_head * hd, D, bias=False)

    def forward(self, x, cos, sin, mask, cache, slots):
        """x (N, T, D) -> (N, T, D). mask: None = causal, additive (N, 1, G*T, S), or FlexAttention's. slots: where the cache
        stores new keys."""
        N, T, _ = x.shape
        K, G, hd = self.n_kv, self.n_head // self.n_kv, self.head_dim
        q = rotate(self.q_proj(x).view(N, T, K * G, hd), cos, sin)  # (N, T, H, hd)
        k = rotate(self.k_proj(x).view(N, T, K, hd), cos, sin)      # (N, T, K, hd)
        v = self.v_proj(x).view(N, T, K, hd)
        if cache is not None:
            k, v = cache.write(self.layer, k, v, slots)             # (N, S, K, hd): everything so far
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if mask is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        elif not isinstance(mask, torch.Tensor):
            y = flex_attention()(q, k, v, block_mask=mask, enable_gqa=True)
        else:
            # The G heads that share a key are G more queries of it: no copy of K and V is made for grouping.
            y = F.scaled_dot_product_attention(q.reshape(N, K, G * T, hd), k, v, attn_mask=mask)
            y = y.view(N, K * G, T, hd)
        return self.o_proj(y.transpose(1, 2).reshape(N, T, K * G * hd))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, cos, sin, mask, cache, slots):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, cache, slots)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Qwen2(nn.Module):
    """`model(input_ids, positions) -> hidden`, and `model.logits(hidden)` where logits are read."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids, positions=None, mask=None, cache=None) -> torch.Tensor:
        """Hidden states (N, T, D) after the last norm.

        input_ids (N, T). positions (N, T): the position each token stands for; None = 0..T-1, or from the cache's cursors.
        mask (N, T, S) bool, True = may attend, or a BlockMask of FlexAttention; None = causal. With a cache the mask is the
        cache's own (slot <= position).
        """
        N, T = input_ids.shape
        if positions is None:
            positions = torch.arange(T).expand(N, T) if cache is None else cache.positions(T)
        slots = None
        if cache is not None:
            if mask is not None:
                raise ValueError("with a cache the mask is slot <= position: pass mask=None")
            slots, mask = cache.plan(positions)                                  # (N*T,), (N, T, S) or None
        x = self.model.embed_tokens(input_ids)                                   # (N, T, D)
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        c = self.config
        cos, sin = rope_tables(positions.to(x.device), c.head_dim, c.rope_theta, dtype)
        if isinstance(mask, torch.Tensor):  # once for all layers: True -> 0, False -> -inf, repeated for the G queries of each key
            mask = torch.zeros(mask.shape, dtype=dtype, device=x.device).masked_fill_(~mask, -torch.inf)
            mask = mask[:, None].repeat(1, 1, c.num_attention_heads // c.num_key_value_heads, 1)  # (N, 1, G*T, S)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask, cache, slots)
        return self.model.norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., D) -> (..., V). Call it only for the positions that are read: V is large."""
        return self.lm_head(hidden)

    def token_losses(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Cross-entropy in nats (M,), float32, of hidden (M, D) against labels (M,).

        Runs in chunks of at most LOGITS_AT_ONCE; more than one are recomputed in the backward pass: M x V logits never stand in memory.
        """
        if not len(labels):
            return torch.zeros(0, device=labels.device)

        def chunk_loss(h, y):
            return F.cross_entropy(self.lm_head(h).float(), y, reduction="none")

        size = max(1, LOGITS_AT_ONCE // self.config.vocab_size)
        if len(labels) <= size:
            return chunk_loss(hidden, labels)
        chunks = zip(hidden.split(size), labels.split(size))
        return torch.cat([checkpoint(chunk_loss, h, y, use_reentrant=False, preserve_rng_state=False) for h, y in chunks])

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> "Qwen2":
        """Random start: normal(0, initializer_range), output projections scaled down by sqrt(2 * layers) as in GPT-2."""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if name.endswith("norm.weight"):
                p.fill_(1)
            elif name.endswith("bias"):
                p.zero_()
            else:
                scale = (2 * self.config.num_hidden_layers) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                p.copy_(torch.randn(p.shape, generator=generator) * self.config.initializer_range * scale)
        return self


# ------------------------------------------------------------------------------------------------ device and dtype


def pick_device(device: str | None = None) -> torch.device:
    """The device asked for, else cuda > mps > cpu. Raises UserError for one that is not there."""
    if device in (None, "auto"):
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as e:
        raise UserError(f"device {device!r} cannot be used here: {str(e).splitlines()[0][:100]}") from None


def is_tiny(name_or_dir: str | os.PathLike) -> bool:
    """ModelConfig.tiny of a folder or name (see resolve), before its weights are loaded. Raises UserError."""
    return read_config(resolve(name_or_dir)).tiny


def pick_dtype(device: torch.device, dtype: str | None = None, tiny: bool = False) -> tuple[torch.dtype, str]:
    """(dtype, reason): the one asked for, else bfloat16 where the hardware multiplies it fast, else float32. tiny: see ModelConfig."""
    if dtype not in (None, "auto"):
        return getattr(torch, dtype), "asked for"
    if tiny and device.type == "cpu":
        return torch.float32, "tiny models stay in it"
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16, "CUDA device with bfloat16"
    if device.type == "cpu":
        for feature in ("avx512_bf16", "amx_tile"):
            if getattr(torch.cpu, f"_is_{feature}_supported", lambda: False)():
                return torch.bfloat16, f"CPU with {feature}"
        return torch.float32, "this CPU has no fast bfloat16"
    return torch.float32, f"{device.type} without fast bfloat16"


class PackedLinear(nn.Module):
    """A Linear whose float32 weight lies in oneDNN's block order, made for products of a few rows. No gradient, not to be saved."""

    def __init__(self, linear: nn.Linear, n_rows: int = 4):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), n_rows)  # keeps shape, dtype and device
        self.bias = linear.bias

    def forward(self, x):
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def pack(model: Qwen2) -> Qwen2:
    """Make a float32 model on a CPU decode faster, in place; any other model is left as it is.

    BLAS brings a weight into blocks anew for every product of a few rows, which costs more than the product; here it is
    done once. Speeds: README. Results differ from before by float32 rounding. Small weights stay: they fit a core's own cache.
    """
    weight = model.lm_head.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return model
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear) and child.weight.numel() >= 2**18:
                setattr(module, name, PackedLinear(child))
    return model


# ------------------------------------------------------------------------------------- names, folders, files


def resolve(name_or_dir: str | os.PathLike) -> Path:
    """A folder with a config.json for: a folder, a short name (SHIPPED, HUB_NAMES), or any hub id.

    Order: the folder itself, checkpoints/ of this project, the local hub cache, a download with a progress bar. Raises UserError.
    """
    path = Path(name_or_dir).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"{path}: no config.json in this folder, so it is not a model")
        return path
    name = str(name_or_dir)
    if name in SHIPPED and (shipped := Path(__file__).resolve().parent / "checkpoints" / name).is_dir():
        return resolve(shipped)
    repo = HUB_NAMES.get(name.lower(), name)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repo, re.ASCII) or ".." in repo or "--" in repo:
        known = ", ".join([*SHIPPED, *HUB_NAMES])
        raise UserError(f"{name!r}: no such folder, and no model of that name (known: {known}; or a hub id owner/model)")
    return _from_hub(name, repo)


def _from_hub(name: str, repo: str) -> Path:
    from huggingface_hub import errors, snapshot_download

    want = dict(repo_id=repo, allow_patterns=["*.json", "*.jinja", "*.safetensors"])

    def whole(folder: str) -> Path:  # an interrupted download leaves a folder with files missing
        resolve(folder)
        weight_files(Path(folder))
        return Path(folder)

    try:
        cached = whole(snapshot_download(**want, local_files_only=True))
        if (cached / "tokenizer.json").is_file():
            return cached
        raise UserError(f"{cached}: no tokenizer.json")
    except (errors.LocalEntryNotFoundError, UserError):
        print(f"downloading {repo} (once; kept in the hub cache)", flush=True)
    try:
        return whole(snapshot_download(**want))
    except errors.GatedRepoError:
        raise UserError(f"{name}: {repo} asks for its licence to be accepted on its page; then set HF_TOKEN") from None
    except errors.RepositoryNotFoundError:
        raise UserError(f"{name}: the hub has no model {repo} (known short names: {', '.join(HUB_NAMES)})") from None
    except Exception as e:  # every transport has its own family of errors; all of them mean: no files
        raise UserError(f"{name}: cannot download {repo} ({type(e).__name__}). Is there a network? Without one, give a folder: "
                        f"copy the model from a machine that has it (`hf download {repo} --local-dir DIR`) and name DIR") from None


def read_json(path: Path) -> dict:
    """A JSON object from a file; {} when the file is absent. Raises UserError when it is not JSON."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise UserError(f"{path}: not valid JSON ({e})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold a JSON object, not {str(value)[:40]!r}")
    return value


def weight_files(folder: Path) -> dict[str, list[str] | None]:
    """{file name: its tensor names, or None for all of them}, read from the index when there is one.

    Raises UserError naming what is missing, before any weight is touched.
    """
    if (folder / "model.safetensors").is_file():
        return {"model.safetensors": None}
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        raise UserError(f"{folder}: neither model.safetensors nor model.safetensors.index.json in this folder")
    shards: dict[str, list[str]] = {}
    for tensor, file in read_json(index).get("weight_map", {}).items():
        shards.setdefault(file, []).append(tensor)
    missing = sorted(f for f in shards if not (folder / f).is_file())
    if missing or not shards:
        raise UserError(f"{folder}: {len(missing)} of {len(shards)} weight files are missing: {', '.join(missing) or 'the index is empty'}")
    return shards


@contextmanager
def no_initial_values():
    """Layers made inside get no starting values: where none are needed, torch would spend two seconds on importing its compiler."""
    layers = (nn.Linear, nn.Embedding)
    own = [layer.reset_parameters for layer in layers]
    for layer in layers:
        layer.reset_parameters = lambda self: None
    try:
        yield
    finally:
        for layer, reset in zip(layers, own):
            layer.reset_parameters = reset


def read_config(folder: Path) -> ModelConfig:
    """The shape of the model in a folder. Raises UserError, with the folder's name, for one that is not of this kind."""
    try:
        return ModelConfig.from_hf(read_json(folder / "config.json"))
    except UserError as e:
        raise UserError(f"{folder}: {e}") from None


def load_pretrained(name_or_dir, dtype=None, device=None) -> Qwen2:
    """The network with its weights. dtype None = as stored (float16 is widened to float32: Qwen overflows in it).

    Raises UserError listing every missing, unexpected or wrong-shaped tensor; never leaves a tensor random.
    """
    from safetensors import SafetensorError, safe_open

    folder = resolve(name_or_dir)
    config = read_config(folder)
    files = weight_files(folder)
    stored: dict[str, torch.Tensor] = {}
    for file, names in files.items():
        try:
            with safe_open(folder / file, framework="pt", device="cpu") as f:
                for name in names if names is not None else f.keys():
                    stored[name] = f.get_tensor(name)
        except SafetensorError as e:
            raise UserError(f"{folder / file}: not a readable safetensors file ({e})") from None
    with torch.device("meta"), no_initial_values():
        model = Qwen2(config)
    wanted = {name: p.shape for name, p in model.state_dict().items()}
    if read_json(folder / "config.json")["model_type"] == "llama":
        for name in wanted:
            if name.endswith("_proj.bias") and name not in stored:
                stored[name] = torch.zeros(wanted[name])
    if config.tie_word_embeddings:
        head, embed = stored.get("lm_head.weight"), stored.get("model.embed_tokens.weight")
        if head is not None and embed is not None and not torch.equal(head, embed):
            print(f"warning: {folder}: the head is tied to the embedding, but lm_head.weight differs from it; the embedding is used")
        if embed is not None:
            stored["lm_head.weight"] = embed
    stored = {k: v for k, v in stored.items() if not k.endswith("rotary_emb.inv_freq")}  # derived, in some old files
    problems = [f"missing {n} {list(wanted[n])}" for n in wanted if n not in stored]
    problems += [f"unexpected {n} {list(stored[n].shape)}" for n in stored if n not in wanted]
    both = [n for n in wanted if n in stored and stored[n].shape != wanted[n]]
    problems += [f"{n} is {list(stored[n].shape)}, the config wants {list(wanted[n])}" for n in both]
    if problems:
        raise UserError(f"{folder}: weights do not fit the config: " + "; ".join(problems))
    if dtype is None:
        dtype = stored["model.embed_tokens.weight"].dtype
        dtype = torch.float32 if dtype == torch.float16 else dtype
    for name in wanted:  # one tensor at a time, so that two copies of the model never stand in memory
        stored[name] = stored[name].to(device=device, dtype=dtype)
    model.load_state_dict(stored, assign=True)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.eval()


def save_pretrained(dir, model: Qwen2, tokenizer, mars: dict | None = None, dtype=torch.bfloat16) -> Path:
    """Write a Hugging Face folder that `transformers` opens as Qwen2ForCausalLM.

    `mars` ({"block_size", "mask_token_id", ...}) goes into config.json. A folder of that name is replaced (new_folder).
    """
    with new_folder(dir) as folder:
        write_model(folder, model, tokenizer, mars, dtype)
    return Path(dir)


def write_model(folder: Path, model: Qwen2, tokenizer, mars: dict | None, dtype) -> None:
    """The files of save_pretrained, into a folder that is there."""
    from safetensors.torch import save_file

    weights = {n: p.detach().to("cpu", dtype).contiguous() for n, p in model.named_parameters()}  # a tied head appears once
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_hf() | {"torch_dtype": str(dtype).removeprefix("torch."), **tokenizer.special_ids()}
    if mars:
        config["mars"] = mars
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {**tokenizer.special_ids(every_eos=True), "do_sample": False})
    tokenizer.save(folder)


@contextmanager
def new_folder(dir: str | os.PathLike):
    """A folder to fill, .NAME.tmp, which is then renamed to DIR; an older one is meanwhile .NAME.old, and deleted.

    So a folder under its own name is always whole, and a kill leaves behind nothing but folders of those two names.
    """
    dir = Path(dir)
    tmp, old = (dir.with_name(f".{dir.name}.{end}") for end in ("tmp", "old"))
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    yield tmp
    shutil.rmtree(old, ignore_errors=True)
    if dir.exists():
        dir.rename(old)
    tmp.rename(dir)
    shutil.rmtree(old, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """The file with this text, in UTF-8; killed meanwhile, it is as before. What a link or a device is, it stays."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def write_json(path: Path, value) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
