"""Continuous batching, the controller of tau, and what eval/load.py concludes."""

import copy
import json

import pytest
import torch
from conftest import tiny_model

from data import arithmetic
from decode import Generation, generate
from eval import load
from model import UserError

QUESTIONS = [p.question for p in arithmetic("test", 9)]


class Ticks:
    """A clock that goes one second further each time it is read."""

    t = 0.0

    def now(self):
        self.t += 1
        return self.t

    def wait_until(self, when):
        self.t = max(self.t, when)


def sharp_model():
    model = tiny_model()
    model.logits = lambda h, real=model.logits: real(h) * 6  # more decided, so that rows accept unevenly
    return model


def requests(times):
    return [load.Request(q, 1.0, t, seed) for seed, (q, t) in enumerate(zip(QUESTIONS, times))]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_refilling_changes_no_rows_result(tokenizer, temperature):
    """Fault: a newcomer reads what the row before it left in the cache, disturbs its neighbours, or draws their numbers. Nine
    requests through three rows, with uneven acceptance and ends by EOS, against each request alone."""
    model, tokenizer = sharp_model(), copy.copy(tokenizer)
    tokenizer.eos_ids = [*tokenizer.eos_ids, generate(model, tokenizer, [QUESTIONS[0]], 0.3, 4, 30)[0].ids[11]]
    longest = max(len(tokenizer.encode_prompt(q)) for q in QUESTIONS)
    server = load.Server(model, tokenizer, 3, longest, 4, 30, temperature=temperature)
    todo = requests([0, 0, 0, 5, 6, 20, 21, 21, 22])
    trace = load.serve(server, todo, lambda waiting: 0.3, Ticks())
    alone = [generate(model, tokenizer, [q], 0.3, 4, 30, temperature=temperature, seed=i)[0] for i, q in enumerate(QUESTIONS)]
    key = lambda g: (g.ids, g.accepted, g.n_forward, g.stop_reason, g.text)
    assert [key(r.generation) for r in todo] == [key(g) for g in alone]
    assert len({len(g.ids) for g in alone}) > 1 and max(busy for _, _, busy, _ in trace) == 3
    assert all(r.finished > r.arrives for r in todo)


def test_tau_may_change_between_steps_of_a_server(tokenizer):
    """Fault: tau read once, or tokens left behind when the window closes to one and opens again."""
    model = sharp_model()
    server = load.Server(model, tokenizer, 2, 200, 4, 30)
    taus = [1.0, 0.0, 1.0, 1.0, 0.0, 0.3] * 20
    server.admit(1, QUESTIONS[0], taus[0])
    for tau in taus[1:]:
        if server.batch.alive():
            server.step(tau)
    alone = generate(model, tokenizer, [QUESTIONS[0]], lambda n: taus[n], 4, 30)[0]
    assert server.batch.generations[1].ids == alone.ids and server.batch.generations[1].accepted == alone.accepted
    assert server.batch.generations[0].ids == []


def test_a_busy_row_and_a_long_prompt_are_refused(tokenizer):
    """Fault: a request lost, or written behind the end of the cache."""
    server = load.Server(tiny_model(), tokenizer, 1, 20, 4, 8)
    with pytest.raises(UserError, match="a prompt of .* this server was made for 20"):
        server.admit(0, QUESTIONS[0], 1.0)
    server.admit(0, "Hi", 1.0)  # the row is still free
    server = load.Server(tiny_model(), tokenizer, 1, 200, 4, 8)
    server.admit(0, QUESTIONS[0], 1.0)
    with pytest.raises(ValueError, match="row 0 is not free"):
        server.admit(0, QUESTIONS[1], 1.0)


def test_first_come_first_served_and_tau_follows_the_queue(tokenizer):
    """Fault: the queue counted wrong, served out of order, or tau not restored when it is empty."""
    server = load.Server(tiny_model(), tokenizer, 1, 200, 4, 5)
    todo = requests([0] * 5)
    trace = load.serve(server, todo, load.controller(0.5, 4), Ticks())
    assert [r.finished for r in todo] == sorted(r.finished for r in todo)
    assert [tau for tau in dict.fromkeys(tau for *_, tau in trace)] == pytest.approx([0.5, 0.625, 0.75, 0.875, 1])
    assert all(tau == 1 - w / 8 for _, w, _, tau in trace)
    assert load.controller(0.5, 4)(0) == 1 and load.controller(0.5, 4)(100) == 0.5


def test_arrivals_come_at_their_rate():
    """Fault: phases overlapping, rates taken for gaps, another seed with the same times."""
    times = load.arrivals([(10, 100), (50, 100), (10, 100)], seed=0)
    n = [sum(100 * i <= t < 100 * (i + 1) for t in times) for i in range(3)]
    assert times == sorted(times) and n == pytest.approx([1000, 5000, 1000], rel=0.1) and sum(n) == len(times)
    assert times != load.arrivals([(10, 100), (50, 100), (10, 100)], seed=1)


def test_percentiles():
    """Fault: off by one at the edges."""
    values = [float(v) for v in range(100, 0, -1)]
    assert [load.percentile(values, s) for s in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100] and load.percentile([7.0], 0.5) == 7


def test_what_a_server_made_of_its_requests():
    """Fault: latency from the start instead of the arrival, the rush taken for the whole, waiting after the rush misread."""
    done = lambda text: Generation(ids=[5] * 8, text=text, n_forward=4)
    todo = [load.Request("q", 7.0, t, 0, t + late, done(text)) for t, late, text in ((0, 1, "#### 7"), (12, 3, "#### 7"), (25, 2, "#### 8"))]
    trace = [(0.0, 0, 1, 1.0), (12.0, 2, 1, 0.9), (21.0, 1, 1, 0.95), (24.0, 0, 1, 1.0), (26.0, 3, 1, 0.9), (27.0, 0, 1, 1.0)]
    row = load.summary("x", todo, trace, [10, 20, 30])
    assert (row["p50"], row["p95"], row["p95_of_the_rush"], row["seconds_to_clear"], row["most_waiting"]) == (2, 3, 3, 4, 3)
    assert row["accuracy"] == 2 / 3 and row["tokens_per_forward"] == 2 and row["finished_per_second_in_the_rush"] == 0.1
    assert (row["lowest_tau"], row["last_tau"]) == (0.9, 1.0)


def test_the_command(model_dir, tmp_path, capsys):
    """Fault: a renamed field, a picture that cannot be drawn. An untrained model: only the plumbing is looked at."""
    pytest.importorskip("matplotlib")
    argv = f"--model {model_dir} --rows 2 --seconds 1,1,1 --questions 5 --device cpu --json --out {tmp_path / 'r.json'} --plot {tmp_path / 'r.png'}"
    assert load.main(argv.split()) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert [r["policy"] for r in result["rows"]] == ["tau 1", "tau 0.9", "controlled, 0.95..1"] and result["capacity"] > 0
    assert all(r["p50"] <= r["p95"] <= r["p99"] and r["n"] == result["rows"][0]["n"] for r in result["rows"])
    assert (tmp_path / "r.png").stat().st_size > 5000 and json.loads((tmp_path / "r.json").read_text())["torch"] == torch.__version__


@pytest.mark.parametrize("argv", ["--seconds 1,2", "--seconds a,b,c", "--rows 0", "--rush 0", "--tau-low 1.5", "--tau-fixed nan", "--patience 0",
                                  "--calm inf"])
def test_options_out_of_range_are_named(argv, capsys):
    """Fault: a traceback, or a server that never ends."""
    with pytest.raises(SystemExit):
        load.main(argv.split())
    assert argv.split()[0] in capsys.readouterr().err.splitlines()[-1]
