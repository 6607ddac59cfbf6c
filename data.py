"""Text in, token sequences out: the chat tokenizer, chat files, the built-in arithmetic problems, batches.

A training row is `Row(ids, spans)`: a whole chat as ids, and for every assistant turn the half-open range of the tokens
to learn, from the first token of its content up to and including its <|im_end|>.
"""

import hashlib
import json
import os
import random
import re
import urllib.request
import zlib
from array import array
from collections import Counter
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from model import UserError, read_json, resolve, write_json

MASK_TOKEN = "<|mask|>"
RESERVED = ("<empty_output>", "<|fim_pad|>", "<|reserved_special_token_0|>")  # [MASK] where the embedding has no spare row
IM_START, IM_END = "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant")

GITHUB = "https://raw.githubusercontent.com"
GRADE_SCHOOL = f"{GITHUB}/openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data"
DOWNLOADS = {  # name: (address, sha256)
    "gsm8k": (f"{GRADE_SCHOOL}/train.jsonl", "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465"),
    "gsm8k-test": (f"{GRADE_SCHOOL}/test.jsonl", "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"),
    "svamp": (f"{GITHUB}/ZubinGou/math-evaluation-harness/db77bc6bb2a17c90ed2d63e88ebd8c40a82858c5/data/svamp/test.jsonl",
              "d0826ff1264f3860e46fc4e71db9e31d2d188960db87090e22677f9493e67a0d"),
    "humaneval": (f"{GITHUB}/openai/human-eval/6d43fb980f9fee3c892a914eda09951f772ad10d/data/HumanEval.jsonl.gz",
                  "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef"),
}

# ------------------------------------------------------------------------------------------------------ tokenizer


def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable alphabet for the 256 bytes: printable Latin-1 stands for itself, the rest is moved past 255."""
    itself = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [b for b in range(256) if b not in itself]
    return {chr(b): b for b in itself} | {chr(256 + i): b for i, b in enumerate(moved)}


BYTE_OF_CHAR = _byte_of_char()


class ChatTokenizer:
    """A byte-level BPE tokenizer that speaks ChatML.

    Chats are built from parts: control tokens are placed by id and content is encoded by a copy of the tokenizer that
    knows no control tokens, so whatever a user types stays text, and a prompt is an exact prefix of its training row.

    Attributes: eos_ids (list, <|im_end|> first), mask_id, n_tokens (ids from here on are padding rows of the embedding),
    default_system (the system prompt the model's own template adds when a chat has none; None if it adds none), mars (what
    train.py recorded in config.json: block_size, mask_token_id, stage; {} for a model of another origin).
    """

    def __init__(self, spec: dict, settings: dict, config: dict | None = None, generation: dict | None = None, where: str = "tokenizer"):
        """spec is tokenizer.json, settings tokenizer_config.json; config and generation the two model files, if any."""
        config, generation = config or {}, generation or {}
        self.tokenizer = Tokenizer.from_str(json.dumps(spec))
        if not _has_byte_level(spec.get("decoder")):
            raise UserError(f"{where}: not a byte-level tokenizer, which is the only kind supported")
        vocab = self.tokenizer.get_vocab()
        missing = [t for t in (IM_START, IM_END) if t not in vocab]
        if missing:
            raise UserError(f"{where}: no {' and no '.join(missing)} in the vocabulary, so it cannot write ChatML chats")
        n_tokens = max(vocab.values()) + 1
        n_rows = config.get("vocab_size", n_tokens + (MASK_TOKEN not in vocab))
        if n_tokens > n_rows:
            raise UserError(f"{where}: the tokenizer has {n_tokens} tokens but the model only {n_rows} embedding rows; they do not fit")
        if MASK_TOKEN in vocab:
            self.mask_token = MASK_TOKEN
        elif n_tokens < n_rows:
            self.mask_token = MASK_TOKEN
            self.tokenizer.add_special_tokens([AddedToken(MASK_TOKEN, special=True, normalized=False)])
            if self.tokenizer.token_to_id(MASK_TOKEN) != n_tokens:
                raise UserError(f"{where}: the ids of its {len(vocab)} tokens have holes below {n_tokens}, so {MASK_TOKEN} cannot be added")
        else:
            self.mask_token = next((t for t in RESERVED if t in vocab), None)
            if self.mask_token is None:
                raise UserError(f"{where}: all {n_rows} embedding rows are in use, and none of {', '.join(RESERVED)} is there to be [MASK]")
        self.mask_id = self.tokenizer.token_to_id(self.mask_token)
        self.mars = config.get("mars") or ({"stage": "mars"} if config.get("model_type") == "a2d-qwen2" else {})
        recorded = self.mars.get("mask_token_id")
        if recorded is not None and recorded != self.mask_id:
            raise UserError(f"{where}: trained with mask_token_id {recorded}, but this tokenizer's {self.mask_token} is {self.mask_id}")
        self.n_tokens = max(n_tokens, self.mask_id + 1)
        self.settings = settings

        plain = json.loads(self.tokenizer.to_str())
        self._control_text = {t["id"]: t for t in plain["added_tokens"]}
        plain |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        self._plain = Tokenizer.from_str(json.dumps(plain))
        self._bytes: dict[int, bytes] = {}

        self.im_start, self.im_end = vocab[IM_START], vocab[IM_END]
        self.eos_ids = [self.im_end]
        for ids in (generation.get("eos_token_id"), config.get("eos_token_id")):
            ids = ids if isinstance(ids, list) else [ids]
            self.eos_ids += [i for i in ids if i is not None and i not in self.eos_ids]
        pad = generation.get("pad_token_id", vocab.get(_token_text(settings.get("pad_token"))))
        self.pad_id = self.im_end if pad is None else pad
        self.bos_id = config.get("bos_token_id")
        self._newline = self.encode("\n")
        self._header = {role: [self.im_start, *self.encode(role + "\n")] for role in ROLES}
        self.default_system = self._template_system(where)

    @classmethod
    def from_pretrained(cls, name_or_dir) -> "ChatTokenizer":
        """From a model folder, a short name or a hub id. Raises UserError when tokenizer and model do not fit."""
        folder = resolve(name_or_dir)
        spec = read_json(folder / "tokenizer.json")
        if not spec:
            raise UserError(f"{folder}: no tokenizer.json in this folder")
        settings = read_json(folder / "tokenizer_config.json")
        if (folder / "chat_template.jinja").is_file():
            settings["chat_template"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        return cls(spec, settings, read_json(folder / "config.json"), read_json(folder / "generation_config.json"), str(folder))

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, the mask token among the added tokens."""
        self.tokenizer.save(str(folder / "tokenizer.json"))
        write_json(folder / "tokenizer_config.json", {k: v for k, v in self.settings.items() if k != "added_tokens_decoder"})

    def special_ids(self, every_eos: bool = False) -> dict:
        """bos/eos/pad ids for a config.json; with every_eos, eos is the whole list, as generation_config.json has it."""
        return {"bos_token_id": self.bos_id, "eos_token_id": self.eos_ids if every_eos else self.im_end, "pad_token_id": self.pad_id}

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; never a control token, whatever the text says."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; b"" for special tokens and padding rows."""
        if token_id not in self._bytes:
            added = self._control_text.get(token_id)
            if token_id == self.mask_id or token_id >= self.n_tokens or (added and added["special"]):
                self._bytes[token_id] = b""
            elif added:
                self._bytes[token_id] = added["content"].encode()
            else:
                self._bytes[token_id] = bytes(BYTE_OF_CHAR[c] for c in self.tokenizer.id_to_token(token_id))
        return self._bytes[token_id]

    def decode(self, ids) -> str:
        """Text of ids, special tokens left out; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def encode_chat(self, messages: list[dict]) -> tuple[list[int], list[tuple[int, int]]]:
        """A chat -> (ids, spans), equal to the model's own template for ordinary chats.

        messages is [{"role": "system"|"user"|"assistant", "content": str}, ...]. One span per assistant turn: [start, end)
        covers its content and its <|im_end|>; without the latter for a turn with "cut": true, which was broken off and whose
        end is not to be learned. Raises UserError for a malformed chat (see `check_chat`).
        """
        check_chat(messages)
        if self.default_system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.default_system}, *messages]
        ids, spans = [], []
        for m in messages:
            ids += self._header[m["role"]]
            start = len(ids)
            ids += [*self.encode(m["content"]), self.im_end]
            if m["role"] == "assistant":
                spans.append((start, len(ids) - bool(m.get("cut"))))
            ids += self._newline
        return ids, spans

    def encode_prompt(self, messages: list[dict] | str) -> list[int]:
        """Ids up to where the assistant begins to speak. A str is one user turn."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.encode_chat(messages)[0] + self._header["assistant"]

    def _template_system(self, where: str) -> str | None:
        template = self.settings.get("chat_template")
        if isinstance(template, list):  # several named templates
            template = next((t["template"] for t in template if t.get("name") == "default"), None)
        if not template:
            return None
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        try:
            text = env.from_string(template).render(messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=True)
        except TemplateError as e:
            raise UserError(f"{where}: its chat template cannot be used: {e}") from None
        user = f"{IM_START}user\nHi{IM_END}\n{IM_START}assistant\n"
        found = re.fullmatch(rf"(?:{re.escape(IM_START)}system\n(.*?){re.escape(IM_END)}\n)?{re.escape(user)}", text, re.DOTALL)
        if not found:
            raise UserError(f"{where}: its chat template does not write ChatML (it turns 'Hi' into {text[:120]!r})")
        return found[1]


def _has_byte_level(decoder: dict | None) -> bool:
    decoder = decoder or {}
    return decoder.get("type") == "ByteLevel" or any(_has_byte_level(d) for d in decoder.get("decoders", []))


def _token_text(token) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


# ----------------------------------------------------------------------------------------------------- chat files


def check_chat(messages) -> None:
    """The rule for chats, raised as UserError when broken: a non-empty list of {"role", "content"} with role system,
    user or assistant and content a string. Order is free: turns are written as they stand."""
    if not isinstance(messages, list) or not messages:
        raise UserError(f"messages must be a non-empty list, not {_brief(messages)}")
    for i, m in enumerate(messages):
        if not isinstance(m, dict):
            raise UserError(f"message {i} must be an object with role and content, not {_brief(m)}")
        if m.get("role") not in ROLES:
            raise UserError(f"message {i}: role {_brief(m.get('role'))} is not one of {', '.join(ROLES)}")
        if not isinstance(m.get("content"), str):
            raise UserError(f"message {i} ({m['role']}): content must be a string, not {_brief(m.get('content'))}")
        if m.get("cut") and not m["content"]:
            raise UserError(f"message {i} ({m['role']}): cut before its first word, so there is nothing to learn")
        if not m["content"].isascii() and re.search("[\ud800-\udfff]", m["content"]):
            raise UserError(f"message {i} ({m['role']}): content holds half a surrogate pair: {_brief(m['content'])}")


def _brief(value) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def to_messages(row, need_answer: bool = True) -> list[dict]:
    """One JSON row -> messages. Rows hold `messages`, or `question`/`answer`, or `instruction`/[`input`]/`output`.

    GSM8K's calculator marks <<48/2=24>> are dropped from `answer`. Raises UserError when the row has no assistant turn but needs one.
    """
    if not isinstance(row, dict):
        raise UserError(f"a row must be an object, not {_brief(row)}")
    if "messages" in row:
        messages = row["messages"]
    elif "question" in row and "answer" in row:
        answer = re.sub(r"<<[^<>=]*=[^<>]*>>", "", row["answer"]) if isinstance(row["answer"], str) else row["answer"]
        messages = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": answer}]
    elif "instruction" in row and "output" in row:
        parts = [row["instruction"], "" if row.get("input") is None else row["input"]]
        if not all(isinstance(p, str) for p in parts):
            raise UserError(f"instruction and input must be strings, not {_brief(parts)}")
        ask = "\n\n".join(p for p in parts if p)
        messages = [{"role": "user", "content": ask}, {"role": "assistant", "content": row["output"]}]
    else:
        raise UserError(f"a row needs messages, question/answer or instruction/output; this one has {', '.join(row) or 'nothing'}")
    check_chat(messages)
    if need_answer and not any(m["role"] == "assistant" for m in messages):
        raise UserError("no assistant turn, so there is nothing to learn")
    return messages


def read_chats(path, need_answer: bool = True) -> list[list[dict]]:
    """Chats of a JSONL file, one object a line, lines ended by \\n alone. Blank lines are skipped.

    Any other bad row stops the reading: UserError with file, line and reason. Nothing is dropped silently.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise UserError(f"{path}: no such data file (known data sets: arithmetic, gsm8k)")
    chats = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            try:
                chats.append(to_messages(json.loads(line), need_answer))
            except (ValueError, RecursionError) as e:  # JSON, UTF-8 and UserError alike
                raise UserError(f"{path}, line {number}: {e}") from None
    if not chats:
        raise UserError(f"{path}: no rows in this file")
    return chats


def first_question(messages: list[dict]) -> list[dict]:
    """The messages before the first answer; [] if the chat begins with one."""
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    return messages[: answers[0]] if answers else messages


def load_chats(name_or_file: str, size: int = 20_000, seed: int = 0) -> list[list[dict]]:
    """Training chats by name (`arithmetic`: `size` generated problems, `gsm8k`) or from a JSONL file."""
    if name_or_file == "arithmetic":
        return [p.messages() for p in arithmetic("train", size, seed)]
    if name_or_file == "gsm8k":
        return read_chats(download("gsm8k"))
    return read_chats(name_or_file)


def download(name: str) -> Path:
    """The file of a data set in DOWNLOADS: fetched once, checked, kept under ~/.cache/mars (or $XDG_CACHE_HOME)."""
    url, sha256 = DOWNLOADS[name]
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mars" / f"{name}.{url.rpartition('/')[2].partition('.')[2]}"
    if not path.is_file():
        print(f"downloading {name} (once) to {path}", flush=True)
        try:
            with urllib.request.urlopen(url, timeout=60) as response:
                content = response.read()
        except (OSError, HTTPException) as e:
            raise UserError(f"{name}: cannot download {url} ({e}). Without a network, pass a local copy: --data FILE") from None
        digest = hashlib.sha256(content).hexdigest()
        if digest != sha256:
            raise UserError(f"{name}: {url} has sha256 {digest}, expected {sha256}")
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        beside.write_bytes(content)
        beside.replace(path)
    return path


# ------------------------------------------------------------------------------------------------ rows and batches


class Row(NamedTuple):
    ids: array                     # (L,) int32: a whole chat, cut after its last supervised token
    spans: list[tuple[int, int]]   # [start, end) of every assistant turn

    @property
    def n_targets(self) -> int:
        return sum(end - start for start, end in self.spans)


def encode_rows(chats, tokenizer: ChatTokenizer, max_len: int) -> tuple[list[Row], Counter]:
    """Rows of at most max_len tokens, and what the limit did to others: {what: count}.

    A long chat loses its tail, and the turn that is cut is learned up to the cut. A chat whose first answer begins at the
    cut or after it has nothing left to learn and is left out. Both are counted.
    """
    rows, cut = [], Counter()
    for messages in chats:
        ids, turns = tokenizer.encode_chat(messages)
        spans = [(start, min(end, max_len)) for start, end in turns if start < max_len]
        if not spans:
            cut[f"left out: the answer begins after max_len {max_len}"] += 1
            continue
        if spans != turns:
            cut[f"lost their tail: longer than max_len {max_len}"] += 1
        rows.append(Row(array("i", ids[: spans[-1][1]]), spans))  # 4 bytes a token, a list would take 8 to 36
    return rows, cut


def checksum(rows: list[Row]) -> int:
    value = 0
    for row in rows:
        value = zlib.crc32(repr(row.spans).encode(), zlib.crc32(row.ids.tobytes(), value))
    return value


def epoch_steps(lengths: list[int], batch_size: int, seed: int, epoch: int, pool: int = 32) -> list[list[int]]:
    """The epoch's optimizer steps: lists of `batch_size` row indices (the last may be shorter), each row once.

    Rows are shuffled, sorted by length within pools of `pool` steps so that a step holds rows of like length (little
    padding), and the steps are shuffled again. A function of (seed, epoch) alone, so a resumed run meets the same steps.
    """
    rng = random.Random(f"{seed}/{epoch}")
    order = rng.sample(range(len(lengths)), len(lengths))
    steps = []
    for i in range(0, len(order), pool * batch_size):
        like = sorted(order[i : i + pool * batch_size], key=lambda j: lengths[j])
        steps += [like[j : j + batch_size] for j in range(0, len(like), batch_size)]
    rng.shuffle(steps)
    return steps


def micro_batches(sizes: list[tuple[int, int]], budget: int) -> list[list[int]]:
    """Split one step's rows into groups whose padded size is within `budget` tokens.

    sizes: (clean, noisy) tokens of each row; both streams are padded to the longest of the group. A single row over the
    budget gets a group of its own.
    """
    groups: list[list[int]] = []
    clean = noisy = 0
    for i in sorted(range(len(sizes)), key=lambda j: sizes[j]):
        widest = max(clean, sizes[i][0]), max(noisy, sizes[i][1])
        if groups and (len(groups[-1]) + 1) * sum(widest) <= budget:
            groups[-1].append(i)
            clean, noisy = widest
        else:
            groups.append([i])
            clean, noisy = sizes[i]
    return groups


# ------------------------------------------------------------------------------------------- arithmetic problems

NAMES = "Ada Ben Cleo Dan Eva Finn Gina Hugo Iris Jack Kira Leo Mia Noah Olga Paul Rosa Sam Tara Will".split()
ITEMS = "apples books coins marbles pencils shells stamps stickers buttons cards cookies flowers".split()
PLACES = "in the garden|at the market|at school|on the beach|in an old box|at the fair".split("|")
START = ("{a} has {n} {x}.", "{a} starts the day with {n} {x}.", "At first {a} owns {n} {x}.", "There are {n} {x} on the table of {a}.")
GAIN = (("buys", "{a} buys {n} more {x} {p}."), ("finds", "{a} finds {n} {x} {p}."), ("gets", "{b} gives {a} {n} {x}."),
        ("wins", "{a} wins {n} {x} in a game with {b}."))
LOSE = (("gives away", "{a} gives {n} {x} to {b}."), ("loses", "{a} loses {n} {x} {p}."), ("sells", "{a} sells {n} of the {x} {p}."),
        ("hands out", "{a} hands out {n} {x} to the children {p}."))
CHANGES = (2, 3, 4, 5, 10, 20, 50)  # few, so that a tiny model learns to add and subtract them within minutes
TIMES = (("doubles", "Then {a} doubles the number of {x}.", 2), ("triples", "Then {a} triples the number of {x}.", 3))
NOISE = ("{b} has {n} {y}.", "{b} counts {n} {y} {p}.", "A bag of {y} costs {n} dollars.", "{b} is {n} years old.")
ASK = ("How many {x} does {a} have now?", "How many {x} does {a} have in the end?", "Find the number of {x} that {a} has left at the end.")


class Problem(NamedTuple):
    question: str
    answer: str
    result: int

    def messages(self) -> list[dict]:
        return [{"role": "user", "content": self.question}, {"role": "assistant", "content": self.answer}]


def arithmetic_problem(rng: random.Random) -> Problem:
    """One generated word problem of 1-3 operations with a worked answer: a start of 2..99, then + or - one of CHANGES, * 2, * 3
    (up to 50 only: a tiny model sees too few numbers of three digits to learn to add to all of them).

    Phrases of the answer follow from the question (a model can learn to say several tokens at once); digits must be computed.
    """
    a, b = rng.sample(NAMES, 2)
    x, y = rng.sample(ITEMS, 2)
    say = lambda text, n=None: text.format(a=a, b=b, x=x, y=y, n=n, p=rng.choice(PLACES))
    have = rng.randint(2, 99)
    facts, work = [say(rng.choice(START), have)], [f"{a} starts with {have} {x}."]
    for _ in range(rng.randint(1, 3)):
        kinds = ["+"] + ["-"] * (have > 2) + ["*"] * (have <= 50)
        kind = rng.choice(kinds)
        if kind == "*":
            verb, text, n = rng.choice(TIMES)
        else:
            verb, text = rng.choice(GAIN if kind == "+" else LOSE)
            n = rng.choice([n for n in CHANGES if kind == "+" or n <= have])
        now = {"+": have + n, "-": have - n, "*": have * n}[kind]
        facts.append(say(text, n))
        work.append(f"{a} {verb} {'them' if kind == '*' else n}, so {have} {kind} {n} = {now} {x}.")
        have = now
    if rng.random() < 0.5:
        facts.insert(rng.randint(1, len(facts)), say(rng.choice(NOISE), rng.randint(2, 99)))
    ask = say(rng.choice(ASK))
    question = " ".join([ask, *facts] if rng.random() < 0.25 else [*facts, ask])
    return Problem(question, "\n".join([*work, f"{a} has {have} {x}.", f"#### {have}"]), have)


def arithmetic(split: str, n: int, seed: int = 0) -> list[Problem]:
    """n distinct problems of "train" or "test". A question's checksum decides its split, so the two never share a text."""
    if split not in ("train", "test"):
        raise ValueError(f"split {split!r} is not train or test")
    rng, seen, problems = random.Random(f"{split}/{seed}"), set(), []
    while len(problems) < n:
        p = arithmetic_problem(rng)
        if (zlib.crc32(p.question.encode()) % 8 == 0) == (split == "test") and p.question not in seen:
            seen.add(p.question)
            problems.append(p)
    return problems


def final_number(text: str) -> float | None:
    """The number after the last ####, as GSM8K and arithmetic end an answer; None when there is none."""
    found = re.findall(r"####\s*\$?(-?[\d,]*\.?\d+)", text)
    return float(found[-1].replace(",", "")) if found else None


def arithmetic_tokenizer(vocab_size: int = 640) -> ChatTokenizer:
    """A small byte-level BPE trained on generated problems, with the ChatML tokens and <|mask|>.

    Every word of the problems is one token, with the space before it, and with the one behind it if a digit follows: so a
    number is its digits and nothing else, each digit one token wherever it stands. vocab_size is an upper limit.
    """
    tokenizer = Tokenizer(models.BPE())
    pieces = Regex(r"\d| ?[^\s\d.,?]+ (?=\d)| ?[^\s\d.,?]+|[.,?]|\s")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pieces, "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    control = ["<|endoftext|>", IM_START, IM_END, MASK_TOKEN]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=control, initial_alphabet=sorted(BYTE_OF_CHAR), show_progress=False)
    texts = [t for p in arithmetic("train", 4000) for t in (p.question, p.answer, "user\n", "assistant\n", "system\n")]
    tokenizer.train_from_iterator(texts, trainer)
    template = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
                "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": IM_END, "pad_token": "<|endoftext|>", "chat_template": template}
    return ChatTokenizer(json.loads(tokenizer.to_str()), settings)
