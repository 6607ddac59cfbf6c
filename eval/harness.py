"""The paper's six benchmarks, with lm-eval's own prompts and scoring (pip install "lm_eval[ifeval]"), answered by our decoder.

    python -m eval.harness --model DIR --tau .95 --tasks ifeval,bbh,mmlu_pro,gpqa_main_cot_zeroshot,gsm8k_cot,humaneval_instruct
    torchrun --nproc-per-node=N -m eval.harness ...                   every rank answers every N-th question
    python -m eval.harness ... --data gsm8k_cot=test.jsonl,bbh=DIR    lm-eval's task on a local file: no network

Every prompt goes through the model's chat template, examples as turns of their own. Shots are the paper's: 3 for bbh, 0 for all
others. In lm-eval 0.4.13 a number of shots replaces a task's own, so 0 drops the 8 worked examples of gsm8k_cot and the 5 of
mmlu_pro; bbh (27 tasks, bbh_cot_fewshot_*) has exactly 3, in its task files. A task whose file says 0 (ifeval,
humaneval_instruct, gpqa_main_cot_zeroshot) stays at 0 whatever is asked, silently: here that is an error.

--data takes a JSONL, JSON or CSV file, or for a group of tasks a folder that has each task's file under its subset's name
(bbh: boolean_expressions.json, ...), else JSONL files that hold them all (mmlu_pro). When all tasks have one, the hub is not asked.

Beside each score: tokens per forward and how the answers ended (eos, stop = a stop string of the task, length).
"""

import argparse
import copy
import difflib
import hashlib
import importlib.util
import itertools
import json
import logging
import os
import random
import re
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from data import IM_END, IM_START, ChatTokenizer
from decode import CACHES, as_tau, generate, padded
from eval.results import command, provenance, write_results
from model import LOGITS_AT_ONCE, UserError, is_tiny, load_pretrained, pack, pick_device, pick_dtype, resolve
from parallel import join, leave

CONTROL = re.compile(f"\0({re.escape(IM_START)}|{re.escape(IM_END)})(\\w*\n?)")  # as apply_chat_template writes it
GATED = "Idavidrein/gpqa"


# ------------------------------------------------------------------------------------------------- what lm-eval asks


class HarnessLM:
    """Our decoder behind lm-eval's interface. `run` registers it as a kind of lm_eval.api.model.LM, so it needs no base class.

    lm-eval passes prompts on as text. `apply_chat_template` writes a NUL before each control token it places, and `encode` makes
    control tokens of those alone: prompts have exactly the ids of ChatTokenizer.encode_prompt, and a question that quotes
    <|im_end|> is text. counts: of every task, its answers, their tokens and forwards, and how they ended.
    """

    def __init__(self, model, tokenizer, name="mars", tau=1.0, block_size=None, cache="cursor", batch_size=8, max_new_tokens=256,
                 rank=0, world_size=1):
        self.model, self.tokenizer, self.tokenizer_name = model, tokenizer, name
        self.how = {"tau": tau, "block_size": block_size, "cache": cache}
        self.batch_size, self.max_new_tokens, self.rank, self.world_size = batch_size, max_new_tokens, rank, world_size
        self.device, self.max_len = model.lm_head.weight.device, model.config.max_position_embeddings
        self.counts: dict[str, Counter] = defaultdict(Counter)
        self.takes_ids = copy.copy(tokenizer)  # for generate: prompts are encoded already
        self.takes_ids.encode_prompt = lambda ids: ids

    def chat_template(self, chat_template=True) -> str:
        return str(self.tokenizer.settings.get("chat_template", ""))

    def apply_chat_template(self, chat_history: list[dict], add_generation_prompt: bool = True) -> str:
        """A chat as the model's template writes it, a NUL before each control token; with no generation prompt its last turn stays open."""
        system = self.tokenizer.default_system
        if system is not None and chat_history[0]["role"] != "system":
            chat_history = [{"role": "system", "content": system}, *chat_history]
        turns = [f"\0{IM_START}{m['role']}\n" + m["content"].replace("\0", "\ufffd") + f"\0{IM_END}\n" for m in chat_history]
        return "".join(turns) + f"\0{IM_START}assistant\n" if add_generation_prompt else "".join(turns).removesuffix(f"\0{IM_END}\n")

    def encode(self, text: str) -> list[int]:
        plain, *rest = CONTROL.split(text)
        ids = self.tokenizer.encode(plain)
        for control, line, plain in zip(rest[::3], rest[1::3], rest[2::3]):
            ids += [self.tokenizer.im_start if control == IM_START else self.tokenizer.im_end]
            ids += self.tokenizer.encode(line) + self.tokenizer.encode(plain)
        return ids

    def generate_until(self, requests) -> list[str]:
        """Greedy answers, in order. A request that comes twice (lm-eval fills up the ranks so) is answered and counted once."""
        rows, answers = [], {}
        for request in {id(r): r for r in requests}.values():
            stop, limit = self.settings(request)
            ids = self.encode(request.args[0])
            kept = ids[-max(1, self.max_len - limit) :]  # as lm-eval does: too long a prompt loses its beginning
            self.counts[request.task_name].update(answers=1, truncated=len(kept) < len(ids))
            rows.append((stop, limit, kept, request))
        rows.sort(key=lambda row: (row[0], row[1], -len(row[2])))
        with tqdm(total=len(rows), unit="answer", disable=self.rank > 0, dynamic_ncols=True) as bar:
            for (stop, limit), like in itertools.groupby(rows, key=lambda row: row[:2]):
                like = list(like)
                for i in range(0, len(like), self.batch_size):
                    part = like[i : i + self.batch_size]
                    done = generate(self.model, self.takes_ids, [row[2] for row in part], max_new_tokens=limit, stop=list(stop), **self.how)
                    for g, (*_, request) in zip(done, part):
                        answers[id(request)] = g.text
                        self.counts[request.task_name].update({"tokens": len(g.ids), "forwards": g.n_forward, g.stop_reason: 1})
                    bar.update(len(part))
        return [answers[id(r)] for r in requests]

    def settings(self, request) -> tuple[tuple[str, ...], int]:
        """(stop strings, most new tokens) of a request."""
        wanted = request.args[1]
        if wanted.get("do_sample") and wanted.get("temperature", 1) > 0:
            raise UserError(f"{request.task_name}: asks for samples (temperature {wanted.get('temperature', 1)}); answers here are greedy")
        until = wanted.get("until") or []
        until = [until] if isinstance(until, str) else until
        return tuple(s for s in until if s), min(wanted.get("max_gen_toks", self.max_new_tokens), self.max_new_tokens)

    def loglikelihood(self, requests) -> list[tuple[float, bool]]:
        """(log-probability, is greedy) of each request's continuation, split from its context as lm-eval does it."""
        return self.score([self.encode_pair(*r.args) for r in requests])

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of both: encoded together, after the spaces that end the context were moved to the continuation."""
        if not context.strip():
            ids = self.encode(context + continuation)
            return (ids[:1], ids[1:]) if ids[:1] == [self.prefix_id] else ([self.prefix_id], ids)
        head = context.rstrip()
        ids = self.encode(head)
        return ids, self.encode(context + continuation)[len(ids) :]

    @property
    def prefix_id(self) -> int:
        return self.tokenizer.eos_ids[0] if self.tokenizer.bos_id is None else self.tokenizer.bos_id

    def loglikelihood_rolling(self, requests) -> list[float]:
        """Log-probability of each whole text, in windows of the model's length."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows = [[make_disjoint_window(w) for w in get_rolling_token_windows(self.encode(r.args[0]), self.prefix_id, self.max_len, 1)]
                   for r in requests]
        scores = iter(self.score([pair for of_one in windows for pair in of_one]))
        return [sum(next(scores)[0] for _ in of_one) for of_one in windows]

    @torch.inference_mode()
    def score(self, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """(log-probability in nats, is greedy) of the second ids after the first, one causal forward a batch: the plain AR model."""
        scores: list = [None] * len(pairs)
        order = sorted(range(len(pairs)), key=lambda i: -sum(map(len, pairs[i])))
        chunk = max(1, LOGITS_AT_ONCE // self.model.config.vocab_size)
        for first in tqdm(range(0, len(order), self.batch_size), unit="batch", disable=self.rank > 0, dynamic_ncols=True):
            part = order[first : first + self.batch_size]
            rows = [sum(pairs[i], [])[-(self.max_len + 1) :] for i in part]
            hidden = self.model(padded([row[:-1] for row in rows], 0).to(self.device))         # (N, T, D)
            for i, row, h in zip(part, rows, hidden):
                n = len(pairs[i][1])
                if n >= len(row):
                    raise UserError(f"a continuation of {n} tokens: the model has {self.max_len} positions")
                y = torch.tensor(row[len(row) - n :], device=self.device)                      # (n,)
                total, greedy = 0.0, True
                for h_part, y_part in zip(h[len(row) - n - 1 : len(row) - 1].split(chunk), y.split(chunk)):
                    logits = self.model.logits(h_part).float()                                 # (n, V)
                    total += logits.log_softmax(-1).gather(-1, y_part[:, None]).sum().item()
                    greedy &= bool((logits.argmax(-1) == y_part).all())
                scores[i] = total, greedy
        return scores

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor)
        return torch.stack(parts)

    def gather_object(self, obj, dst: int = 0) -> list | None:
        if self.world_size == 1:
            return [obj]
        parts = [None] * self.world_size if self.rank == dst else None
        dist.gather_object(obj, parts, dst=dst)
        return parts

    def barrier(self) -> None:
        dist.barrier()


# ----------------------------------------------------------------------------------------------------------- tasks


def paper_shots(name: str) -> int:
    """3 for BBH with examples, as a group or one of its tasks, else 0."""
    return 3 if name.startswith("bbh") and "zeroshot" not in name else 0


def per_task(option: str, text: str) -> dict[str, str]:
    """TASK=VALUE,... -> {task: value}."""
    found = dict(part.partition("=")[::2] for part in text.split(",") if part)
    if not all(key and value for key, value in found.items()):
        raise UserError(f"{option} {text}: must be TASK=VALUE, several with commas between")
    return found


def leaves(index: dict, name: str) -> list[str]:
    """The single tasks of a task, group or tag of lm-eval's index."""
    if name not in index:
        near = difflib.get_close_matches(name, index, n=3)
        raise UserError(f"task {name!r}: lm-eval has none of that name{' (near: ' + ', '.join(near) + ')' if near else ''}")
    entry = index[name]
    children = sorted(entry.tags) if entry.cfg is None else entry.cfg["task"]
    if isinstance(children, str):
        return [name]
    names = [c if isinstance(c, str) else c.get("task", c.get("group")) for c in children]
    return [leaf for child in names for leaf in leaves(index, child)]


def task_on_files(entry, path: Path) -> dict:
    """A task file that is lm-eval's own of this name, but for where its questions lie. Raises UserError without such a file."""
    files, subset = [path], entry.cfg.get("dataset_name")
    if path.is_dir():
        own = [path / f"{subset}{suffix}" for suffix in (".jsonl", ".json", ".csv")]
        files = [f for f in own if f.is_file()][:1] or sorted(path.glob("*.jsonl"))
    if not files or not files[0].is_file():
        what = f"no {subset}.json and no JSONL in this folder" if path.is_dir() else "no such file"
        raise UserError(f"--data {entry.name}={path}: {what}")
    split = next(entry.cfg[s] for s in ("test_split", "validation_split", "training_split") if entry.cfg.get(s))
    where: dict = {"data_files": {split: [str(f.resolve()) for f in files]}}
    if files[0].suffix == ".json" and '"examples"' in files[0].read_text(encoding="utf-8")[:1000]:
        where["field"] = "examples"  # BBH's own layout
    kind = "csv" if files[0].suffix == ".csv" else "json"
    source = {"dataset_path": kind, "dataset_name": None, "dataset_kwargs": where}
    splits = {"test_split": split, "validation_split": None, "training_split": None, "fewshot_split": None}
    return {"include": str(entry.yaml_path), "task": entry.name, **source, **splits}


def check_task(name: str, entry, shots: int, local: bool, allow_code: bool) -> None:
    """Raise UserError for what would fail, or be ignored, after the model has worked for hours."""
    own = entry.cfg.get("num_fewshot")
    if shots and own == 0:
        raise UserError(f"--shots {name}={shots}: lm-eval fixes {entry.name} at 0")
    examples = (entry.cfg.get("fewshot_config") or {}).get("samples")
    if shots and isinstance(examples, list) and shots > len(examples):
        raise UserError(f"--shots {name}={shots}: lm-eval has {len(examples)} examples for {entry.name}")
    if shots and local and examples is None:
        raise UserError(f"--shots {name}={shots}: the examples of {entry.name} are not in its --data file, which holds what is asked")
    if entry.cfg.get("dataset_path") == GATED and not local:
        from huggingface_hub import get_token

        if not get_token():
            raise UserError(f"{name}: GPQA is gated. Accept its terms on the hub ({GATED}) and set HF_TOKEN, or give its file: "
                            f"--data {name}={entry.cfg['dataset_name']}.csv")
    if entry.name == "ifeval":
        missing = [m for m in ("langdetect", "immutabledict", "nltk") if importlib.util.find_spec(m) is None]
        if missing:
            raise UserError(f"{name}: no {', '.join(missing)}; pip install \"lm_eval[ifeval]\"")
        import nltk

        try:
            nltk.data.find("tokenizers/punkt_tab")
        except LookupError:
            raise UserError(f"{name}: counts sentences with nltk's punkt_tab, which is not here: python -m nltk.downloader punkt_tab "
                            "(or NLTK_DATA=a folder that has tokenizers/punkt_tab)") from None
    if entry.cfg.get("unsafe_code"):
        if not allow_code:
            raise UserError(f"{name}: runs the code that the model writes, on this machine; --allow-code permits that")
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"
        import evaluate

        try:
            evaluate.load("code_eval")
        except Exception as e:  # no network, no such file, no permission: without it nothing is scored
            raise UserError(f"{name}: scored by code_eval, a script that `evaluate` takes from the hub once and that is not here "
                            f"({type(e).__name__}: {str(e)[:80]}). With a network: python -c \"import evaluate; "
                            "evaluate.load('code_eval')\"; or put its code_eval.py and execute.py in a folder code_eval/ here") from None


def load_tasks(names: list[str], shots: dict[str, int], data: dict[str, str], allow_code: bool):
    """lm-eval's task manager, and {name: its tasks} with their questions; files replace those of the tasks in data."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    index = manager.task_index
    tasks = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            for leaf in leaves(index, name):
                check_task(name, index[leaf], shots[name], name in data, allow_code)
                if name in data:
                    own = task_on_files(index[leaf], Path(data[name]).expanduser())
                    (Path(folder) / f"{leaf}.yaml").write_text(json.dumps(own), encoding="utf-8")  # JSON is YAML
        index.update(TaskManager(include_path=folder, include_defaults=False).task_index)
        for name in names:
            random.seed(0)  # lm-eval's own seed: GPQA shuffles its choices while it loads
            try:
                loaded = manager.load([name])
            except Exception as e:  # the hub, the file and the task's own code have their errors; each means: no questions
                source = f"from {data[name]}" if name in data else "from the hub; --data gives a file"
                raise UserError(f"{name}: its questions cannot be loaded ({source}): {type(e).__name__}: {str(e)[:300]}") from None
            tasks[name] = [loaded["groups"][name]] if name in loaded["groups"] else list(loaded["tasks"].values())
    return manager, tasks


# --------------------------------------------------------------------------------------------------------- results


def rows_of(result: dict, counts: dict[str, Counter]) -> list[dict]:
    """One row for each metric of a task, group and its tasks; a group's tokens and answers are those of its tasks together."""
    below = result["group_subtasks"]

    def parts(task) -> list[str]:
        return [leaf for child in below[task] for leaf in parts(child)] if task in below else [task]

    rows = []
    for task, scores in result["results"].items():
        count = sum((counts.get(leaf, Counter()) for leaf in parts(task)), Counter())
        shared = {"n": sum(result["n-samples"][leaf]["effective"] for leaf in parts(task)), "shots": result["n-shot"].get(task)}
        shared["tokens_per_forward"] = count["tokens"] / count["forwards"] if count["forwards"] else None
        shared["ended"] = {k: count[k] for k in ("eos", "stop", "length", "context") if count[k]}
        if count["truncated"]:
            shared["truncated"] = count["truncated"]
        for key, value in scores.items():
            metric, comma, of_filter = key.partition(",")
            if comma and not metric.endswith("_stderr"):
                error = scores.get(f"{metric}_stderr,{of_filter}")
                error = error if isinstance(error, float) else None  # lm-eval says "N/A"
                rows.append({"task": task, "metric": metric if of_filter == "none" else key, "value": value, "stderr": error, **shared})
    return rows


def table(rows: list[dict]) -> str:
    width = max(len(r["task"]) for r in rows)
    lines = [f"{'task':{width}}  {'metric':28}   value  stderr      n  shots  tokens/forward  answers ended by"]
    number = lambda x, digits: "-" if x is None else f"{x:.{digits}f}"
    for r in rows:
        ended = ", ".join(f"{k} {n}" for k, n in r["ended"].items())
        lines.append(f"{r['task']:{width}}  {r['metric']:28}  {number(r['value'], 4)}  {number(r['stderr'], 4):>6}  {r['n']:5}  "
                     f"{r['shots']!s:>5}  {number(r['tokens_per_forward'], 2):>14}  {ended}")
    return "\n".join(lines)


def differences(ours: dict[str, list], theirs: dict[str, list]) -> list[dict]:
    """Per task, in how many samples the prompt, the answer and every score are those of another model; and the answers that are not."""
    order = lambda s: (s["doc_id"], s["filter"])
    rows = []
    for task in ours:
        pairs = list(zip(sorted(ours[task], key=order), sorted(theirs[task], key=order)))
        n = len({a["doc_id"] for a, _ in pairs})
        prompt, answer, scores, differ = set(), set(), set(), {}  # doc_ids where ours is another one
        for a, b in pairs:  # one for each filter of a question
            i, said, says = a["doc_id"], a["resps"][0][0], b["resps"][0][0]
            if a["arguments"][0][0].replace("\0", "") != b["arguments"][0][0]:
                prompt.add(i)
            if said != says:
                answer.add(i)
                differ[i] = {"doc_id": i, "same_until": len(os.path.commonprefix([said, says])), "ours": said, "theirs": says}
            if any(a[m] != b[m] for m in a["metrics"]):
                scores.add(i)
        same = {"same_prompt": n - len(prompt), "same_answer": n - len(answer), "same_scores": n - len(scores)}
        rows.append({"task": task, "n": n, **same, "differ": list(differ.values())})
    return rows


# ----------------------------------------------------------------------------------------------------- the command


def run(args) -> dict | None:
    """Evaluate task by task; the result on rank 0, None on the others."""
    names = list(dict.fromkeys(args.tasks.split(",")))
    data = per_task("--data", args.data)
    asked = per_task("--shots", args.shots)
    for option, given in (("--data", data), ("--shots", asked)):
        if unknown := [task for task in given if task not in names]:
            raise UserError(f"{option} {unknown[0]}=...: not one of --tasks {args.tasks}")
    if bad := [f"{task}={n}" for task, n in asked.items() if not n.isdecimal()]:
        raise UserError(f"--shots {bad[0]}: must be a whole number, 0 or more")
    shots = {name: int(asked.get(name, paper_shots(name))) for name in names}
    as_tau(args.tau, 1, "probability")
    folder = resolve(args.model)
    if set(names) <= set(data):
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # read when these libraries are first imported: below
    try:
        import lm_eval
        from lm_eval.api.model import LM
        from lm_eval.evaluator import simple_evaluate
    except ImportError as e:
        raise UserError(f"the benchmarks need lm-eval ({e}): pip install \"lm_eval[ifeval]\"") from None
    import datasets

    LM.register(HarnessLM)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    rank, n_ranks, device = join(args.device)
    if args.limit is not None and args.limit < n_ranks:
        raise UserError(f"--limit {args.limit}: {n_ranks} ranks need a question each")
    if args.check_hf and n_ranks > 1:
        raise UserError("--check-hf: in one process only, without torchrun")
    say = print if rank == 0 else lambda *_, **__: None
    manager, tasks = load_tasks(names, shots, data, args.allow_code)
    device = pick_device(device)
    dtype, reason = pick_dtype(device, args.dtype, is_tiny(folder))
    tokenizer, model = ChatTokenizer.from_pretrained(folder), pack(load_pretrained(folder, dtype, device))
    settings = {k: getattr(args, k) for k in ("model", "tau", "block_size", "cache", "batch_size", "max_new_tokens", "limit")}
    settings["block_size"] = args.block_size or tokenizer.mars.get("block_size", 4)
    say(f"{args.model} on {device}, {str(dtype).removeprefix('torch.')} ({reason}); tau {args.tau:g}, B={settings['block_size']}, "
        f"{args.cache} cache; lm-eval {lm_eval.__version__}", flush=True)
    how = (str(args.model), args.tau, settings["block_size"], args.cache, args.batch_size, args.max_new_tokens, rank, n_ranks)
    lm = HarnessLM(model, tokenizer, *how)
    fixed = {"limit": args.limit, "apply_chat_template": True, "confirm_run_unsafe_code": args.allow_code, "task_manager": manager}
    files = {task: {"file": path, "sha256": sha256(Path(path).expanduser())} for task, path in data.items()}
    settings |= {"n_ranks": n_ranks, "lm_eval": lm_eval.__version__, "data": files}
    result = {"rows": [], "settings": settings, "trained": tokenizer.mars, **provenance(device, dtype)}
    samples = {}
    for name in names:
        lm.counts.clear()
        found = simple_evaluate(lm, tasks=tasks[name], num_fewshot=shots[name], log_samples=args.samples or args.check_hf, **fixed)
        every = lm.gather_object(dict(lm.counts))
        if rank == 0:
            counts = {task: sum((of_rank.get(task, Counter()) for of_rank in every), Counter()) for of_rank in every for task in of_rank}
            rows = rows_of(found, counts)
            result["rows"] += rows
            samples |= found.get("samples", {})
            print(table(rows))
            save(args, result, samples)
    if rank > 0:
        return None
    if args.check_hf:
        result["hf"] = check_hf(folder, device, dtype, args.max_new_tokens, tasks, shots, fixed, samples)
        save(args, result, samples)
    return result


def save(args, result: dict, samples: dict[str, list]) -> None:
    """What is known so far: after each task, so that a later one's end is not the end of all."""
    if args.out:
        write_results(args.out, result)
    if args.samples:
        rows = ({"task": task, **s} for task in samples for s in sorted(samples[task], key=lambda s: s["doc_id"]))
        lines = "".join(json.dumps(r, ensure_ascii=False, default=str) + "\n" for r in rows)
        args.out.with_name(args.out.stem + ".samples.jsonl").write_text(lines, encoding="utf-8")


def sha256(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def check_hf(folder, device, dtype, max_new_tokens, tasks, shots, fixed, samples) -> list[dict]:
    """The same questions to lm-eval's own `hf` model, one at a time, and how its answers compare with ours."""
    from lm_eval.evaluator import simple_evaluate

    try:
        from lm_eval.models.huggingface import HFLM
        from transformers import PreTrainedTokenizerFast
    except ImportError as e:
        raise UserError(f"--check-hf: {e}; pip install \"lm_eval[hf]\"") from None
    as_written = PreTrainedTokenizerFast.from_pretrained(folder)  # AutoTokenizer of transformers 5 splits words as the model_type does
    hf = HFLM(pretrained=str(folder), tokenizer=as_written, dtype=str(dtype).removeprefix("torch."), device=str(device), batch_size=1)
    gen_kwargs = {"max_gen_toks": max_new_tokens}
    found = [simple_evaluate(hf, tasks=tasks[name], num_fewshot=shots[name], gen_kwargs=gen_kwargs, **fixed) for name in tasks]
    rows = differences(samples, {task: s for result in found for task, s in result["samples"].items()})
    scores = {(r["task"], r["metric"]): r["value"] for result in found for r in rows_of(result, {})}
    for r in rows:
        r["scores"] = {metric: value for (task, metric), value in scores.items() if task == r["task"]}
        print(f"{r['task']}: of {r['n']} samples lm-eval's hf has the same prompt in {r['same_prompt']}, answer in {r['same_answer']}, "
              f"scores in {r['same_scores']}")
    return rows


@command
def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument_group("what").add_argument
    add("--model", required=True, metavar="NAME|DIR")
    add("--tasks", required=True, metavar="LIST", help="names of lm-eval's tasks or groups")
    add("--limit", type=int, default=None, metavar="N", help="the first N questions of each task")
    add("--data", default="", metavar="TASK=FILE,...", help="local questions for a task")
    add("--shots", default="", metavar="TASK=N,...", help="examples before the question (default: the paper's, 3 for bbh, else 0)")
    add("--allow-code", action="store_true", help="humaneval_instruct runs what the model writes: permit it")
    add = parser.add_argument_group("how").add_argument
    add("--tau", type=float, default=1.0, help="threshold; 1 = one token per forward")
    add("--block-size", type=int, default=None, metavar="B", help="default: as trained, else 4")
    add("--cache", default="cursor", choices=CACHES)
    add("--batch-size", type=int, default=8, metavar="N")
    add("--max-new-tokens", type=int, default=256, metavar="N", help="an answer's most; tasks may ask for fewer")
    add("--device", default="auto")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    add("--check-hf", action="store_true", help="also ask lm-eval's own hf model, and compare what it says (take --tau 1)")
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, default=None, metavar="FILE", help="results file")
    add("--samples", action="store_true", help="lm-eval's record of every answer beside it, in NAME.samples.jsonl")
    add("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args(argv)
    for option in ("limit", "block_size", "batch_size", "max_new_tokens"):
        if (value := getattr(args, option)) is not None and value < 1:
            parser.error(f"--{option.replace('_', '-')} {value}: must be at least 1")
    if args.samples and not args.out:
        parser.error("--samples: needs --out, beside which they go")
    try:
        result = run(args)
    finally:
        leave()
    if args.json and result:
        print(json.dumps({"rows": result["rows"]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
