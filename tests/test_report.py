"""The report: its trace of the decoder, its page, and what it says of files that it cannot use."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from conftest import ROOT, tiny_model

from data import ChatTokenizer, arithmetic
from decode import Generation, Rules, candidates, generate
from eval import report, validate
from model import load_pretrained

QUESTIONS = [p.question for p in arithmetic("test", 3)]
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \"'"


@pytest.fixture(scope="module")
def tiny():
    return load_pretrained("tiny-mars", torch.float32, "cpu"), ChatTokenizer.from_pretrained("tiny-mars")


class Page(HTMLParser):
    """Tags that are open, every tag with its attributes, and the text of every section."""

    def __init__(self, html: str):
        super().__init__()
        self.open, self.tags, self.text, self.scripts = [], [], {}, []
        self.section = ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self.open.append(tag)
        if tag == "section":
            self.section = dict(attrs)["id"]

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "section":
            self.section = ""

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.section:
            self.text[self.section] = self.text.get(self.section, "") + data + " "


def write(path, value) -> str:
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return str(path)


def a_log(stage="mars") -> str:
    look = {"L_AR": 0.5, "L_mask": 1.5, "L_mask_by_mask": [1.0, 2.0], "agreement": 0.75, "agreement_by_mask": [0.8, None],
            "tokens_per_forward": 1.25}
    steps = [{"stage": s, "step": i, "L_AR": 1 / i, "L_mask": None if s == "sft" else 3 / i} for s in ("sft", stage) for i in (1, 2, 3)]
    lines = [{"settings": {}}, *steps[:4], {"stage": stage, "step": 1, "val": look}, *steps[4:]]
    return "".join(json.dumps(line) + "\n" for line in lines)


def a_sweep(method="mars") -> dict:
    row = {"measure": "probability", "low": 0.5, "high": 0.99}
    rows = [row | {"method": "ar", "block_size": 4, "tau": 1.0, "accuracy": 0.91, "tokens_per_forward": 1.0, "tokens_per_second": 50.0},
            row | {"method": method, "block_size": 4, "tau": 0.9, "accuracy": 0.853, "tokens_per_forward": 3.21, "tokens_per_second": 123.0},
            row | {"method": method, "block_size": 8, "tau": 0.5, "accuracy": 0.7, "tokens_per_forward": 3.0, "tokens_per_second": 140.0},
            row | {"method": "jacobi", "block_size": 4, "tau": None, "accuracy": 0.91, "tokens_per_forward": 1.07, "tokens_per_second": 40.0}]
    return {"task": "arithmetic", "n": 1234, "rows": rows}


@pytest.fixture(scope="module")
def inputs(tiny, tmp_path_factory) -> dict[str, str]:
    """One good file for every option."""
    folder = tmp_path_factory.mktemp("inputs")
    rows, _ = validate.encode_rows([p.messages() for p in arithmetic("test", 3)], tiny[1], 256)
    return {"--log": write(folder / "log.jsonl", a_log()), "--sweep": write(folder / "sweep.json", a_sweep()),
            "--speed": str(ROOT / "results" / "speed-tiny.json"),
            "--validate": write(folder / "validate.json", validate.validate(*tiny, rows, 4))}


def run(tmp_path, *more) -> str:
    out = tmp_path / "page" / "report.html"
    assert report.main(["--model", "tiny-mars", "--device", "cpu", "--quiet", "--out", str(out), *map(str, more)]) == 0
    return out.read_text(encoding="utf-8")


@pytest.mark.parametrize("tau, window", [(1.0, 4), (0.999, 4), (0.9, 1), (0.9, 5), (0.3, 8), (0.0, 4)])
def test_the_trace_is_what_the_decoder_does(tiny, tokenizer, tau, window):
    """Fault: a second decoder that drifts from the first: other tokens, another window, another end."""
    for model, tok in (tiny, (tiny_model(), tokenizer)):
        for question in QUESTIONS[:2]:
            g, forwards = report.trace(model, tok, question, tau, window, 18)
            assert g == generate(model, tok, [question], tau, window, 18)[0]
            assert [f.n for f in forwards] == g.accepted and [i for f in forwards for i in f.ids[: f.n]] == g.ids


def test_the_confidence_shown_is_that_of_the_candidate(tiny):
    """Fault: confidence read one column off, or from masks that the cache has not hidden: compared with a forward over everything."""
    model, tok = tiny
    g, forwards = report.trace(model, tok, QUESTIONS[0], 0.95, 4)
    rules, said = Rules.of(tok, model.config.vocab_size), tok.encode_prompt(QUESTIONS[0])
    for f in forwards:
        with torch.no_grad():
            hidden = model(torch.tensor([said + [tok.mask_id] * (len(f.ids) - 1)]))[0, -len(f.ids) :]
            ids, confidence = candidates(model.logits(hidden), rules)
        assert ids.tolist() == f.ids and confidence.tolist() == pytest.approx(f.confidence, abs=1e-4)
        said += f.ids[: f.n]
    assert len({f.n for f in forwards}) > 1


def test_what_became_of_a_candidate():
    """Fault: a token behind the end called unsure, or one behind a failure called good enough."""
    fates = lambda ids, confidence, n: report.fates(report.Forward(ids, confidence, n), 0.9, [7])
    first, good, bad, behind, ended = "the first always is", "at least tau", "below tau", "behind one that failed", "behind the end"
    assert fates([1, 2, 3, 4], [0.1, 0.95, 0.2, 0.99], 2) == [first, good, bad, behind]
    assert fates([1, 7, 3], [0.1, 0.95, 0.2], 2) == [first, good, ended]      # the answer's end
    assert fates([1, 2, 3], [0.1, 0.95, 0.95], 2) == [first, good, ended]     # no room for more
    assert fates([1], [0.1], 1) == [first]


def test_a_character_of_several_tokens(tokenizer):
    """Fault: half characters in the text: four tokens, one character, over two forwards."""
    ids = tokenizer.encode("a😀")
    assert len(ids) == 5
    forwards = [report.Forward(ids[:3], [1.0] * 3, 3), report.Forward(ids[3:], [1.0] * 2, 2)]
    steps = report.steps_of(tokenizer, "x", Generation(ids=ids), forwards, 0.9)
    assert [s["text"] for s in steps] == ["a", "😀"] and steps[1]["taken"] == ["", "😀"]
    assert all(text for s in steps for text, *_ in s["candidates"])


def test_the_whole_page(tmp_path, inputs, capsys):
    """Fault: a part that is missing though its file was given; a page that needs the network or is no valid HTML."""
    html = run(tmp_path, "--prompts", "arithmetic", "--json", *(v for pair in inputs.items() for v in pair))
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    page = Page(html)
    sections = ["stepper", "answers", "pareto", "speed", "calibration", "training"]
    assert last["sections"] == sections and last["bytes"] == len(html.encode()) and list(page.text) == [*sections, "origin"]
    assert "Left out" not in html
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "img") and "src" not in attributes, tag
        assert attributes.get("href", "#").startswith("#")
    assert not re.search(r"url\(|@import|fetch\(|XMLHttp", html) and not re.search(r"\b(NaN|Infinity|None|undefined|inf)\b", html)
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids)) and {a["href"][1:] for t, a in page.tags if t == "a" and "=" not in a["href"]} <= set(ids)


def test_numbers_are_those_of_the_files(tmp_path, inputs):
    """Fault: a column that shows another field, a wrong base of the speed-up, a bin in another's row."""
    text = {name: " ".join(t.split()) for name, t in Page(run(tmp_path, *(v for pair in inputs.items() for v in pair))).text.items()}
    assert "1,234 questions of arithmetic" in text["pareto"]
    assert "MARS, B=4 0.9 85.3 % 50.0 to 99.0 3.21 2.46x both" in text["pareto"]
    assert "MARS, B=8 0.5 70.0 % 50.0 to 99.0 3.00 2.80x speed-up" in text["pareto"]
    assert "Jacobi, B=4 - 91.0 % 50.0 to 99.0 1.07 0.80x tokens per forward" in text["pareto"]
    assert "cursor 3.84 3.26x 2.67x 2.64x 2.44x" in text["speed"]  # as in the README
    found = json.loads(Path(inputs["--validate"]).read_text(encoding="utf-8"))
    assert f"0 (next token) {found['L_AR']:.4f}" in text["calibration"] and f"{100 * found['agreement']:.1f} % of the masks" in text["calibration"]
    for m, (loss, agreement) in enumerate(zip(found["L_mask_by_mask"], found["agreement_by_mask"]), start=1):
        assert f" {m} {loss:.4f} {agreement:.3f} " in text["calibration"]
    for b in found["calibration"]:
        assert f"{b['low']:.2f} to {b['high']:.2f} {b['n']:,} {report.number(b['confidence'])} {report.number(b['agreement'])}" in text["calibration"]
    assert f"0.00 to 0.10 0 - - {found['agreement']:.3f}" in text["calibration"]  # of these and all above: of all
    last = found["calibration"][-1]  # and at the end: of itself
    assert f"0.99 to 1.00 {last['n']:,} {last['confidence']:.3f} {last['agreement']:.3f} {last['agreement']:.3f}" in text["calibration"]
    assert "6 steps (sft, mars); the last: L_AR 0.3333, L_mask 1.0000" in text["training"]
    assert "4 mars 0.5000 1.5000 0.7500 1.25" in text["training"] and "mask 2, step 4: 2" in text["training"]


def test_answers_are_those_of_the_model(tmp_path, tiny):
    """Fault: answers of another tau, right ones called wrong, or a shade that is not the forward's."""
    model, tok = tiny
    gold = [p.result for p in arithmetic("test", 3)]
    chats = [{"question": q, "answer": f"#### {g + (i == 1)}"} for i, (q, g) in enumerate(zip(QUESTIONS, gold))]  # the second is made wrong
    prompts = "".join(json.dumps(c) + "\n" for c in [*chats, {"messages": [{"role": "user", "content": QUESTIONS[0]}]}])
    page = Page(run(tmp_path, "--prompts", write(tmp_path / "p.jsonl", prompts), "--tau", 0.95))
    text, done = " ".join(page.text["answers"].split()), generate(model, tok, [*QUESTIONS, QUESTIONS[0]], 0.95)
    assert text.count("✓ right") == 2 and text.count("✗ wrong") == 1 and "2 of 3 are right, 2 of 3 one token at a time" in text
    shades = [(a["title"], a["class"][:2]) for t, a in page.tags if t == "a" and "title" in a]
    assert shades == [(f"forward {k}: {n} token{'s' * (n > 1)}", f"n{min(n, 5)}") for g in done for k, n in enumerate(g.accepted, start=1)]
    rows = json.loads(page.scripts[0])["rows"]
    assert ["".join(s["text"] for s in r["steps"]) for r in rows] == [g.text for g in done]
    assert f"{sum(len(g.ids) for g in done) / sum(g.n_forward for g in done):.2f} tokens per forward" in text


def test_text_is_text(tmp_path, monkeypatch):
    """Fault: what a model, a question or a file says becomes markup, or ends the script that holds it."""
    monkeypatch.setattr(report, "token_text", lambda tokenizer, token_id: HOSTILE)
    prompts = write(tmp_path / "p.jsonl", json.dumps({"question": HOSTILE, "answer": "#### 1"}) + "\n")
    files = {"--log": write(tmp_path / "log", a_log(HOSTILE)), "--sweep": write(tmp_path / "sweep", a_sweep(HOSTILE) | {"command": HOSTILE})}
    html = run(tmp_path, "--prompts", prompts, "--max-new-tokens", 8, *(v for pair in files.items() for v in pair))
    page = Page(html)
    assert [t for t, _ in page.tags].count("script") == 2 and not any(t == "img" or "onerror" in a for t, a in page.tags)
    row = json.loads(page.scripts[0])["rows"][0]
    assert row["question"] == HOSTILE == row["steps"][0]["candidates"][0][0]
    assert html.count("</script") == 2 and all(HOSTILE in page.text[part] for part in ("answers", "pareto", "training"))


def test_what_is_not_given_is_left_out_and_named(tmp_path):
    """Fault: an empty part, or a reader who does not learn how to fill it."""
    page = Page(run(tmp_path))
    assert list(page.text) == ["origin"] and page.scripts == []
    for name, how in report.MADE_BY.values():
        assert f"Left out: {name}. {how}." in page.text["origin"]


@pytest.mark.parametrize("option, content, says", [
    ("log", None, "no such file"), ("sweep", None, "no such file"), ("speed", None, "no such file"), ("validate", None, "no such file"),
    ("log", '{"settings": {}}\n', "no step"), ("log", "\nnot json\n", "not a log of"), ("log", "{}\n{}\n", "not a log of"), ("sweep", "not json", "not valid JSON"), ("sweep", "[1]", "must hold a JSON object"),
    ("sweep", {}, "no field 'rows'"), ("sweep", {"rows": []}, "no rows"), ("sweep", {"rows": 3}, "not what --sweep reads"),
    ("sweep", {"rows": [{"tau": 1.0, "tokens_per_forward": 1.0, "low": 0, "high": 1}]}, "no field 'accuracy'"),
    ("sweep", {"rows": [{"tau": 1.0, "accuracy": "high", "tokens_per_forward": 1.0, "low": 0, "high": 1}]}, "'high'"),
    ("speed", {"rows": []}, "no field"), ("speed", {"calibration": []}, "no field 'rows'"), ("validate", {"rows": []}, "no field 'calibration'"),
    ("validate", {"calibration": [{"low": 0}]}, "no field 'n'"),
])
def test_a_file_that_cannot_be_used(tmp_path, capsys, option, content, says):
    """Fault: a traceback, or an error that does not say which file lacks what."""
    file = tmp_path / "file"
    if content is not None:
        write(file, content)
    assert report.main(["--model", "tiny-mars", "--out", str(tmp_path / "o.html"), f"--{option}", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and str(file) in error and says in error
    assert not (tmp_path / "o.html").exists()


@pytest.mark.parametrize("more, says", [
    (["--tau", "nan"], "tau nan is out of range"), (["--tau", "-1"], "tau -1"), (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
    (["--model", "no-such-model"], "no-such-model"),
])
def test_other_errors(tmp_path, capsys, more, says):
    """Fault: the same, for what is no file of results."""
    assert report.main(["--model", "tiny-mars", "--out", str(tmp_path / "o.html"), *more]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--block-size", "0"], ["--max-new-tokens", "0"], ["--max-new", "4"], []])
def test_wrong_options(more):
    """Fault: an option that is misspelt or out of range, and goes unnoticed."""
    with pytest.raises(SystemExit):
        report.main(["--model", "tiny-mars", *(["--out", "x.html"] if more else []), *more])


def test_results_of_eval_run_and_eval_quick(tmp_path):
    """Fault: files that name no method, or whose speed-up was measured better than two rates can tell."""
    quick = json.loads((ROOT / "results" / "tiny.json").read_text(encoding="utf-8"))
    text = " ".join(Page(run(tmp_path, "--sweep", ROOT / "results" / "tiny.json")).text["pareto"].split())
    for r in quick["mars"].values():
        assert f"MARS, B=4 {r['tau']:g} {100 * r['accuracy']:.1f} %" in text and f"{r['tokens_per_forward']:.2f} {r['speedup']:.2f}x" in text
    rows = report.sweep_rows(json.loads((ROOT / "results" / "gsm8k-smollm2-135m-mars.json").read_text(encoding="utf-8")))
    assert {r["name"] for r in rows} == {"MARS, B=4"} and rows[0]["speedup"] == 1.0


def test_models_of_a_sweep_are_kept_apart():
    """Fault: two models joined by one line; a measured speed-up replaced by a ratio of rates."""
    of = lambda model, speedup: [r | {"model": model, "speedup": speedup} for r in a_sweep()["rows"]]
    rows = report.sweep_rows({"rows": of("a", 1.5) + of("b", 2.5)})
    assert {r["name"] for r in rows if r["method"] == "ar"} == {"one token at a time, a", "one token at a time, b"}
    assert len({r["name"] for r in rows}) == 8 and [r["speedup"] for r in rows] == [1.5] * 4 + [2.5] * 4


def test_a_point_stands_where_its_numbers_say():
    """Fault: an axis upside down, a scale that is not the ticks', a logarithm of the wrong side."""
    plot = report.Plot("y", "x", (0, 10), (1, 100), log=True)
    assert plot.x(0) == plot.left and plot.x(10) == plot.width - plot.right
    assert plot.y(1) == plot.height - plot.bottom == plot.y(0) and plot.y(100) == plot.top and plot.y(10) == (plot.y(1) + plot.y(100)) / 2
    straight = report.Plot("y", "x", (0, 10), (0, 4))
    assert straight.y(1) - straight.y(2) == pytest.approx(straight.y(2) - straight.y(3), abs=0.11)


def test_ticks():
    """Fault: no tick, hundreds of them, or numbers nobody would choose."""
    assert report.ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0] and report.ticks(3.1, 17) == [5, 10, 15]
    assert report.log_ticks(2e-5, 3) == [1e-4, 1e-3, 1e-2, 0.1, 1] and report.log_ticks(0.9, 8) == [1, 2, 5] and report.log_ticks(4, 9) == [4, 5, 6, 7, 8, 9]
    low, high = report.span([3.0, 3.0])
    assert low < 3 < high


def test_the_front():
    """Fault: a point that another beats in both, or the lesser of two points that are equal in one."""
    assert report.front([(1, 0.9), (2, 0.8), (2, 0.7), (1.5, 0.75), (3, 0.1), (3, 0.1)]) == [True, True, False, False, True, True]


def test_many_series_can_be_told_apart():
    """Fault: a ninth line without a colour, or two lines with the same colour and the same point."""
    assert len({report.shape(i) for i in range(28)}) == 28
    style = (ROOT / "eval" / "report.html").read_text(encoding="utf-8")
    for i in range(report.N_COLOURS):
        assert style.count(f"--c{i}: #") == 2  # light and dark
