"""The README's commands run, its links point somewhere, and its pictures show what the code does."""

import gzip
import importlib.util
import io
import json
import re
import shlex
import shutil
import sys

from conftest import ROOT

import train
from data import arithmetic
from eval import ablation, experiments, load, quick, speed, sweep

README = (ROOT / "README.md").read_text(encoding="utf-8")
LINES = [line.strip() for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) for line in block.splitlines() if line.strip()]


def test_the_readme_shows_commands():
    """Fault: the blocks renamed, so that nothing below is checked."""
    for command, least in (("train.py", 3), ("decode.py", 2)):
        assert sum(line.startswith(f"python {command}") for line in LINES) >= least


SHORTER = {  # appended to each command, where the last of two equal flags counts
    "train.py": "--steps 1 --batch-size 2 --data-size 8 --quiet --device cpu",
    "decode.py": "--max-new-tokens 4 --device cpu",
    "eval.quick": "--problems 2 --rounds 1 --device cpu",
    "eval.experiments": "--problems 2",
    "eval.pictures": "",
    "eval.speed": "--rounds 1 --batch 1,2 --max-new-tokens 4 --device cpu",
    "eval.ablation": "--seeds 0 --blocks 2 --problems 1 --sft-steps 1 --steps 1 --batch-size 1 --quiet",
    "eval.plot": "",
    "eval.validate": "--limit 3 --device cpu --quiet",
    "eval.distill": "--limit 3 --max-new-tokens 8 --device cpu --quiet",
    "eval.run": "--limit 2 --max-new-tokens 4 --device cpu --quiet",
    "eval.sweep": "--limit 2 --max-new-tokens 4 --device cpu --quiet",
    "eval.report": "--max-new-tokens 4 --device cpu --quiet",
    "eval.load": "--seconds 0.5,0.5,0.5 --questions 5 --rows 2 --device cpu",
}


def test_every_command_runs(model_dir, tmp_path, monkeypatch, capsys):
    """Fault: a flag, a path or a command of the README that is not there, or that needs a step the README leaves out.

    All lines of all blocks, in order, in an empty folder, shortened. Large models are a tiny one under their name; the
    experiments' training is left to eval.experiments itself. `pip install` and `python -m pytest` are what .ci/run runs.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache" / "mars").mkdir(parents=True)
    chats = "".join(json.dumps({"messages": p.messages()}) + "\n" for p in arithmetic("train", 20))
    for file in ("cache/mars/gsm8k.jsonl", "dolci.jsonl"):
        (tmp_path / file).write_text(chats)
    row = {"task_id": "T/0", "prompt": "def f(x):\n", "entry_point": "f", "canonical_solution": "    return x\n", "test": "def check(f): f(1)\n"}
    (tmp_path / "cache/mars/humaneval.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode()))
    for name in ("qwen2.5-0.5b", "qwen2.5-coder-0.5b", "smollm2-135m"):
        shutil.copytree(model_dir, tmp_path / name)
    shutil.copytree(ROOT / "checkpoints", tmp_path / "checkpoints")
    shutil.copytree(ROOT / "results", tmp_path / "results")
    row = {"tau": 1.0, "accuracy": 1.0, "tokens_per_forward": 1.0}
    monkeypatch.setattr(experiments, "run", lambda *a: [row])
    monkeypatch.setattr(quick, "speedups", lambda modes, *a: [1.0] * len(modes))  # minutes with a model that never says EOS
    for line in LINES:
        words = shlex.split(line, comments=True)
        if words[0] == "pip" or words[1:] == ["-m", "pytest"]:
            continue
        if words[0] == "torchrun":  # two ranks are tests/test_parallel.py; here only the options
            train.parse(words[3:])
            continue
        assert words[0] == "python", line
        name, argv = (words[2], words[3:]) if words[1] == "-m" else (words[1], words[2:])
        if (name in ("eval.pictures", "eval.plot") or "--plot" in argv) and not importlib.util.find_spec("matplotlib"):
            continue
        if "--peer" in argv and not importlib.util.find_spec("transformers"):
            continue
        if name == "train.py" and train.parse(argv).problems:
            argv += ["--problems", "2"]
        if name == "train.py" and "--resume" not in argv:
            argv += ["--overwrite"]
        assert importlib.import_module(name.removesuffix(".py")).main([*argv, *SHORTER[name].split()]) == 0, (line, capsys.readouterr().err)


def test_the_python_example_runs(capsys):
    """Fault: an example that no longer fits the functions."""
    for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(code, {})
    assert "####" in capsys.readouterr().out


def test_every_function_and_file_named_is_there():
    """Fault: the equation table points to a function that was renamed; a results file that was never committed."""
    for module, name in re.findall(r"`(train|decode|model|kvcache|data)\.([A-Za-z_]+)`", README):
        if name != "py":
            assert re.search(rf"^(def|class) {name}\b", (ROOT / f"{module}.py").read_text(encoding="utf-8"), re.MULTILINE), name
    for path in re.findall(r"`((?:results|eval|tests|checkpoints)/[\w./-]+)`", README):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"!\[[^]]*\]\(([^)]+)\)", README):
        assert (ROOT / path).is_file(), path


def test_every_experiment_is_in_the_table_as_it_was_run():
    """Fault: a row of the README that nothing measured, or whose line is not the one that was changed."""
    measured = json.loads((ROOT / "results" / "experiments.json").read_text(encoding="utf-8"))["experiments"]
    for e in experiments.EXPERIMENTS:
        assert [measured[e.name][k] for k in ("command", "old", "new", "score")] == [e.command, e.old, e.new, e.score]
        [line] = [line for line in README.splitlines() if line.startswith(f"| {e.name} |")]
        for r in measured[e.name]["rows"]:
            assert f"{100 * r['accuracy']:.1f} % at {r['tokens_per_forward']:.2f}" in line, (e.name, r)


def test_tables_are_those_of_the_results_files():
    """Fault: a table typed by hand, or left behind by newer results."""
    read = lambda name: json.loads((ROOT / "results" / name).read_text(encoding="utf-8"))
    for name in ("speed-tiny.json", "speed-smollm2-135m-mars.json", "speed-smollm2-135m-gsm8k-mars.json"):
        assert speed.markdown(read(name)) in README, name
    assert load.markdown(read("load.json")) in README
    assert ablation.markdown(read("ablation.json")) in README
    assert sweep.markdown([r for r in read("sweep-tiny.json")["rows"] if r["measure"] == "probability"]) in README
    logs = [(ROOT / "results" / f"train-smollm2-135m-gsm8k-{stage}.jsonl").read_text(encoding="utf-8") for stage in ("mars", "sft")]
    (mars, n, all_n), (sft, k, all_k) = [(sum(p) / len(p), sum(x > 0.1 for x in p), len(p))
                                         for p in ([r["padding"] for r in map(json.loads, log.splitlines()) if "padding" in r] for log in logs)]
    assert f"{100 * mars:.1f} % of the tokens of a\nMARS step on average, and over 10 % in {n} of {all_n} steps" in README
    assert f"({100 * sft:.1f} % and {k} of {all_k} in SFT" in README
    for name in ("sweep-svamp-smollm2-135m-gsm8k-mars.json", "sweep-gsm8k-smollm2-135m.json"):
        rows = read(name)["rows"]
        for model in {r["model"] for r in rows}:
            assert sweep.detail([r for r in rows if r["model"] == model]) in README, (name, model)
    for name, file in (("as it comes", "smollm2-135m"), ("after SFT", "smollm2-135m-gsm8k-sft"), ("after MARS", "smollm2-135m-gsm8k-mars"),
                       ("as it comes, own words", "own-smollm2-135m"), ("after MARS, own words", "own-smollm2-135m-own")):
        r = read(f"validate-{file}.json")
        assert f"| {name} | {r['L_AR']:.3f} | {r['L_mask']:.2f} | {100 * r['agreement']:.1f} % |" in README, name
    [row] = read("humaneval-qwen2.5-coder-0.5b.json")["rows"]
    right, low, high = (100 * row[k] for k in ("accuracy", "low", "high"))
    assert f"{round(row['accuracy'] * row['n'])} right, {right:.1f} % (95 % interval {low:.1f} to {high:.1f};" in README
    result = read("tiny.json")
    for name, r in [("before MARS", result["sft"]), *((f"MARS, tau {r['tau']:g}", r) for r in result["mars"].values())]:
        row = f"| {name} | {100 * r['accuracy']:.1f} % | {r['tokens_per_forward']:.2f} | {r['speedup']:.2f}x | {r['speedup_batch16']:.2f}x |"
        assert row in README, row


def test_the_mask_picture_is_the_mask():
    """Fault: a picture that shows another mask than the code's."""
    import torch

    picture = re.search(r"```mask\n(.*?)```", README, re.DOTALL)[1]
    rows = [re.match(r"(?:clean|noisy) \d   ([1.]{8})  ([1.]{8})", line) for line in picture.splitlines()]
    drawn = [[c == "1" for c in m[1] + m[2]] for m in rows if m]
    p = torch.arange(8)
    starts = torch.cat([p * 0, train.block_starts(p, 0, 4)])
    assert drawn == train.mars_mask(torch.cat([p, p]), starts, torch.arange(16) >= 8).tolist()
