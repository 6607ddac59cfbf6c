"""The two commands as a person meets them: output, --json, and every error one clear line with exit code 2."""

import io
import json
import os
import pty
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

import decode
import train
from eval import run


def ask(capsys, *argv):
    code = decode.main([str(a) for a in argv])
    return code, capsys.readouterr()


def edit_json(path, **change):
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


@pytest.fixture()
def folder(model_dir, tmp_path):
    return shutil.copytree(model_dir, tmp_path / "model")


# -------------------------------------------------------------------------------------------------------- decode.py


@pytest.mark.parametrize("cache", ["none", "block", "cursor"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_json_is_the_last_line_and_adds_up(model_dir, capsys, cache, dtype):
    """Fault: fields renamed or missing, rates that count something else than committed tokens."""
    options = ["--tau", 0.2, "--block-size", 3, "--max-new-tokens", 9, "--cache", cache, "--dtype", dtype, "--json"]
    code, out = ask(capsys, "--model", model_dir, "--prompt", "Hi", "--prompt", "Ada has 3 coins.", *options)
    result = json.loads(out.out.splitlines()[-1])
    assert code == 0 and list(result) == ["generations", "tokens_per_forward", "tokens_per_second", "seconds"]
    for g in result["generations"]:
        assert set(g) == {"text", "ids", "n_forward", "accepted", "stop_reason"} and sum(g["accepted"]) == len(g["ids"])
    tokens, forwards = (sum(f(g) for g in result["generations"]) for f in (lambda g: len(g["ids"]), lambda g: g["n_forward"]))
    assert result["tokens_per_forward"] == tokens / forwards
    assert result["tokens_per_second"] == pytest.approx(tokens / result["seconds"])
    assert "--- Hi\n" in out.out and f"{tokens} tokens, {forwards} forwards" in out.out


def test_one_prompt_streams_what_json_reports(model_dir, capsys, tmp_path):
    """Fault: the printed answer and the reported one differ; --out not written."""
    argv = ["--model", model_dir, "--prompt", "Hi", "--tau", 0.2, "--max-new-tokens", 12, "--plain", "--json", "--out", tmp_path / "o"]
    code, out = ask(capsys, *argv)
    result = json.loads(out.out.splitlines()[-1])
    assert code == 0 and result["generations"][0]["text"] in out.out
    assert json.loads((tmp_path / "o" / "generations.json").read_text()) == result


def test_compare_shows_both(model_dir, capsys):
    """Fault: --compare that decodes twice the same way."""
    argv = ["--model", model_dir, "--prompt", "Hi", "--tau", 0, "--block-size", 4, "--max-new-tokens", 8, "--cache", "block"]
    code, out = ask(capsys, *argv, "--compare", "--json")
    assert code == 0 and "8 tokens, 3 forwards" in out.out and "one at a time: 8 tokens, 8 forwards" in out.out and "speed-up" in out.out
    assert json.loads(out.out.splitlines()[-1])["compare"]["tokens_per_forward"] == 1


def test_questions_from_stdin(model_dir, capsys, monkeypatch):
    """Fault: a pipe treated as a terminal."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("Ada has 3 coins.\n"))
    assert ask(capsys, "--model", model_dir, "--max-new-tokens", 4)[0] == 0


@pytest.mark.parametrize("stdin", ["", None])
def test_without_a_question_a_sample_is_answered(model_dir, capsys, monkeypatch, stdin):
    """Fault: `python decode.py </dev/null`, or without any stdin (None), that fails or waits instead of showing something."""
    monkeypatch.setattr(sys, "stdin", None if stdin is None else io.StringIO(stdin))
    code, out = ask(capsys, "--model", model_dir, "--max-new-tokens", 4, "--json")
    assert code == 0 and decode.SAMPLE in out.out and len(json.loads(out.out.splitlines()[-1])["generations"]) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo terminal")
def test_a_terminal_is_asked_for_questions(model_dir):
    """Fault: no sample, no prompt shown, colour missing on a terminal, or no way out. Through a real pseudo terminal."""
    master, slave = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    command = [sys.executable, "decode.py", "--model", str(model_dir), "--tau", "0", "--max-new-tokens", "8", "--device", "cpu"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, env=env)
    os.close(slave)
    os.write(master, b"Hi\n\n")
    seen = b""
    while True:
        try:
            chunk = os.read(master, 4096)
        except OSError:  # Linux: the other end is closed
            break
        if not chunk:
            break
        seen += chunk
    os.close(master)
    assert process.wait() == 0
    assert b"Your turn" in seen and b"\033[38;5;" in seen and seen.count(b"8 tokens, 2 forwards") == 2
    assert decode.SAMPLE.encode() in seen


def test_the_newest_finished_model_is_the_default(model_dir, capsys, tmp_path, monkeypatch):
    """Fault: an unfinished checkpoint picked up; the choice not named; nothing there and a traceback."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(decode, "__file__", str(tmp_path / "decode.py"))
    code, out = ask(capsys, "--prompt", "Hi")
    assert code == 2 and "no model" in out.err and "python train.py" in out.err
    for i, name in enumerate(["a/sft", "b/mars", "b/step-000100"]):
        shutil.copytree(model_dir, tmp_path / "out" / name)
        os.utime(tmp_path / "out" / name / "config.json", (1000 + i, 1000 + i))
    code, out = ask(capsys, "--prompt", "Hi", "--max-new-tokens", 2)
    assert code == 0 and "b/mars (the newest under out/)" in out.out


def test_a_model_without_mars_training_is_noted(folder, capsys):
    """Fault: a user puzzled by noise from an ordinary model below tau 1."""
    edit_json(folder / "config.json", mars=None)
    for more, noted in (([], True), (["--tau", 1], False), (["--measure", "entropy"], True), (["--measure", "entropy", "--tau", 0], False)):
        out = ask(capsys, "--model", folder, "--prompt", "Hi", "--max-new-tokens", 2, *more)[1].out
        assert ("not trained with MARS" in out) == noted


# ----------------------------------------------------------------------------------------------------------- errors


def no_config(folder):
    (folder / "config.json").unlink()
    return "no config.json"


def no_weights(folder):
    (folder / "model.safetensors").unlink()
    return "neither model.safetensors nor"


def shard_missing(folder):
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return "missing: model-00002-of-00002.safetensors"


def other_mask_id(folder):
    config = json.loads((folder / "config.json").read_text())
    edit_json(folder / "config.json", mars=config["mars"] | {"mask_token_id": 77})
    return "mask_token_id 77, but this tokenizer's <|mask|> is 3"


def tokenizer_too_large(folder):
    edit_json(folder / "config.json", vocab_size=100)
    return "512 tokens but the model only 100 embedding rows"


def tokenizer_missing(folder):
    (folder / "tokenizer.json").unlink()
    return "no tokenizer.json"


def not_qwen(folder):
    edit_json(folder / "config.json", model_type="mamba")
    return "model_type 'mamba' is not supported"


@pytest.mark.parametrize("harm", [no_config, no_weights, shard_missing, other_mask_id, tokenizer_too_large, tokenizer_missing, not_qwen])
@pytest.mark.parametrize("command", ["decode", "train"])
def test_a_broken_folder_is_one_line_and_exit_2(folder, tmp_path, capsys, command, harm):
    """Fault: a traceback, or a model used all the same."""
    expected = harm(folder)
    if command == "decode":
        code = decode.main(["--model", str(folder), "--prompt", "Hi"])
    else:
        argv = ["--init", str(folder), "--data", "arithmetic", "--data-size", "8", "--steps", "1", "--out", str(tmp_path / "out")]
        code = train.main(argv)
    err = capsys.readouterr().err
    assert code == 2 and expected in err and err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize("argv, expected", [
    (["--tau", "nan"], "tau nan is out of range"),
    (["--tau", "-0.5"], "tau -0.5 is out of range"),
    (["--block-size", "0"], "block_size 0: must be at least 1"),
    (["--max-new-tokens", "0"], "max_new_tokens 0: must be at least 1"),
    (["--device", "cuda:99"], "device 'cuda:99' cannot be used here"),
    (["--model", "qwen9"], "'qwen9': no such folder, and no model of that name"),
    (["--prompt", "coin " * 600], "prompt 1 has"),
])
def test_decode_errors(model_dir, capsys, argv, expected):
    """Fault: bad values that reach torch."""
    code, out = ask(capsys, "--model", model_dir, "--prompt", "Hi", *argv)
    assert code == 2 and expected in out.err and out.err.count("\n") == 1


@pytest.mark.parametrize("content, expected", [
    (None, "no such data file"),
    ("", "no rows in this file"),
    ('{"question": "a", "answer": "b"}\n{"messages": []}\n', "line 2: messages must be a non-empty list"),
    ('{"messages": [\n', "line 1:"),
    ('{"question": "' + "coin " * 900 + '", "answer": "b"}\n', "none of its 1 chats is left"),
])
def test_data_errors(model_dir, tmp_path, capsys, content, expected):
    """Fault: rows dropped in silence, or an empty epoch."""
    file = tmp_path / "chats.jsonl"
    if content is not None:
        file.write_text(content)
    code = train.main(["--init", str(model_dir), "--data", str(file), "--steps", "1", "--out", str(tmp_path / "out")])
    err = capsys.readouterr().err
    assert code == 2 and expected in err and err.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("argv", [
    ["--stages", "mars,sft"], ["--steps", "1,2,3"], ["--steps", "x"], ["--steps", "0"], ["--batch-size", "0"], ["--lr", "1,2,3"],
    ["--problems", "-1"], ["--problems", "5", "--data", "chats.jsonl"], ["--block-size", "0"], ["--warmup", "2"],
    ["--lr", "nan"], ["--clip", "0"], ["--no-such-flag"], ["--ini", "scratch"],
])
def test_train_refuses_what_it_does_not_know(argv, capsys):
    """Fault: an unknown or shortened flag taken for something else; impossible lengths."""
    with pytest.raises(SystemExit) as e:
        train.parse(argv)
    assert e.value.code == 2 and "error:" in capsys.readouterr().err


def test_max_len_beyond_the_model(model_dir, tmp_path, capsys):
    """Fault: positions the model has never seen, in training."""
    assert train.main(["--init", str(model_dir), "--data", "arithmetic", "--max-len", "9999", "--out", str(tmp_path)]) == 2
    assert "positions up to 512" in capsys.readouterr().err


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"),
])
def test_out_of_memory_says_what_to_lower(model_dir, tmp_path, capsys, monkeypatch, error):
    """Fault: a page of traceback for the most common failure of all."""

    def full(*args, **kwargs):
        raise error

    monkeypatch.setattr(train, "dual_stream_loss", full)
    assert train.main(["--init", str(model_dir), "--data", "arithmetic", "--data-size", "8", "--out", str(tmp_path / "t")]) == 2
    assert "Lower --micro-tokens" in capsys.readouterr().err
    monkeypatch.setattr(decode, "generate", full)
    assert ask(capsys, "--model", model_dir, "--prompt", "Hi")[1].err.startswith("error: out of memory")


def test_help_is_grouped(capsys):
    """Fault: a wall of flags."""
    for command, groups in ((train, ["model:", "data:", "objective:", "optimizer:"]), (decode, ["model:", "how to decode:", "output:"])):
        with pytest.raises(SystemExit) as e:
            command.parse(["--help"])
        text = capsys.readouterr().out
        assert e.value.code == 0 and all(g in text for g in groups)


def test_a_file_that_cannot_be_written_is_one_line(model_dir, tmp_path, capsys):
    """Fault: a traceback after minutes of work, for a folder that is a file."""
    (tmp_path / "file").write_text("")
    assert decode.main(["--model", str(model_dir), "--prompt", "Hi", "--max-new-tokens", "2", "--out", str(tmp_path / "file")]) == 2
    assert run.main(["--model", str(model_dir), "--limit", "1", "--max-new-tokens", "2", "--out", str(tmp_path / "file" / "r.json")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith("error: ") and str(tmp_path / "file") in line for line in lines)
