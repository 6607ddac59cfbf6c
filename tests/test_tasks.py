"""What counts as a right answer, and what happens to programs that models write."""

import contextlib
import functools
import gzip
import json
import os
import socket
import sys
from pathlib import Path

import pytest

from eval import run, sandbox, tasks
from model import UserError


@pytest.mark.parametrize("text, number", [
    ("The total is 72 clips, altogether.", 72), ("$29.00", 29), ("29.", 29), ("\\boxed{29}", 29), ("1,000", 1000), ("-5", -5),
    ("#### ,", None), ("3 4", 4), ("1.5", 1.5), ("", None), ("no number", None), ("48-24", 24), ("x = -3.5%", -3.5), ("-$5", -5),
    ("$-5", -5), ("12,345.67", 12345.67), ("1,2", 2), ("#### 72 of 100", 72), ("#### 5\nThat is 7", 5), ("#### none\n7", 7),
    ("#### Final answer\n\\boxed{18}", 18), ("#### Step 1: add 3+4=7\n#### Step 2: Total\nThe answer is 18.", 18), ("####\n72", 72),
    ("#### **72**", 72), ("-.5", -0.5), ("-\\$5", -5), ("\\boxed{1{,}000}", 1000), ("\\boxed{1\\,000}", 1000), ("24\\text{ cm}^2", 24),
    ("24 cm^{2}", 24), ("9" * 401, None),
    ("first \\boxed{1}, no, \\boxed{\\text{so } 2} of 3", 2), ("x \u22127", -7), (".5", 0.5), ("in 3.", 3), ("(-4)", -4), ("1234,567", 567),
])  # fmt: skip
def test_last_number(text, number):
    """Fault: right answers of another form count as wrong, 1.5 as 15, a difference as a negative number, a crash where there is none."""
    assert tasks.last_number(text) == number


def test_svamp_rows(tmp_path):
    """Fault: body and question run into one sentence; a number in a string not read; a row without an answer dropped silently."""
    file = tmp_path / "svamp.jsonl"
    row = {"Body": "Ann has 3 pens", "Question": "How many pens has Ann?", "Answer": "3.0"}
    file.write_text(json.dumps(row) + "\n\n" + json.dumps(row | {"Body": "Stop. "}) + "\n")
    questions = tasks.read_svamp(file)
    assert [q.messages[0]["content"] for q in questions] == ["Ann has 3 pens. How many pens has Ann?", "Stop. How many pens has Ann?"]
    score = tasks.TASKS["svamp"].score
    assert score("So it is 3.", questions[0]) == (3, True) and score("30", questions[0]) == (30, False) and score("", questions[0]) == (None, False)
    for bad, words in (({"Body": "a", "Question": "b"}, "line 4: no Answer"), (row | {"Answer": "three"}, "line 4: Answer 'three' is no number")):
        file.write_text(json.dumps(row) + "\n\n\n" + json.dumps(bad))
        with pytest.raises(UserError, match=words):
            tasks.read_svamp(file)


def test_gsm8k_rows(tmp_path):
    """Fault: the gold answer taken from the question, a row without one scored as wrong."""
    file = tmp_path / "gsm8k.jsonl"
    file.write_text(json.dumps({"question": "1 and 1?", "answer": "1+1=<<1+1=2>>2\n#### 2"}) + "\n")
    [q] = tasks.read_gsm8k(file)
    assert q.gold == 2 and q.messages == [{"role": "user", "content": "1 and 1?"}]
    assert tasks.TASKS["gsm8k"].score("It is 2 dollars.", q)[1] and not tasks.TASKS["arithmetic"].score("It is 2 dollars.", q)[1]
    file.write_text(json.dumps({"question": "1 and 1?", "answer": "two"}) + "\n")
    with pytest.raises(UserError, match="chat 1 does not end in an answer with ####"):
        tasks.read_gsm8k(file)


# -------------------------------------------------------------------------------------------------------- HumanEval

ROW = {
    "task_id": "Test/0",
    "prompt": 'from typing import List\n\n\ndef half(x):\n    return x / 2\n\n\ndef doubled(xs: List[int]) -> List[int]:\n    """Twice each.\n\n'
    '    >>> doubled([1])\n    [2]\n    """\n',
    "entry_point": "doubled",
    "canonical_solution": "    return [2 * x for x in xs]\n",
    "test": "\ndef check(candidate):\n    assert candidate([1, 2]) == [2, 4]\n    assert candidate([]) == []\n",
}
HEAD = "def doubled(xs: List[int]) -> List[int]:\n"
RIGHT = {
    "fenced": f"Here it is:\n\n```python\n{HEAD}    return [2 * x for x in xs]\n```\nIt doubles.",
    "without its language": f"```\n{HEAD}    return [2 * x for x in xs]\n```",
    "unclosed fence": f"```python\n{HEAD}    return [2 * x for x in xs]\n",
    "unclosed and cut": f"```python\n{HEAD}    return [2 * x for x in xs]\n\nprint(doubled([1, 2",
    "prose then code": f"The function doubles:\n{HEAD}    return [2 * x for x in xs]",
    "prose around code": f"The function doubles:\n\n{HEAD}    return [2 * x for x in xs]\n\nThis multiplies each by two.",
    "imports first": f"Sure. We need\nfrom typing import List\n\n{HEAD}    return [2 * x for x in xs]",
    "two blocks, the second an example": f"```python\n{HEAD}    return [2 * x for x in xs]\n```\nUse it:\n```python\nassert doubled([1]) == [3]\n```",
    "two blocks, the first a helper": f"```python\ndef twice(x):\n    return 2 * x\n```\nand\n```python\n{HEAD}    return [twice(x) for x in xs]\n```",
    "a shell block first": f"```bash\npip install this\n```\n```python\n{HEAD}    return [2 * x for x in xs]\n```",
    "body only": "    return [2 * x for x in xs]\n",
    "body, its first line without indent": "ys = []\n    for x in xs:\n        ys.append(2 * x)\n    return ys",
    "body without any indent": "ys = []\nfor x in xs:\n    ys.append(2 * x)\nreturn ys",
    "body in a fence": "```python\n    return [2 * x for x in xs]\n```",
    "body, then prose": "    return [2 * x for x in xs]\n\nThis doubles.",
    "body, then the whole function again": f"    return [2 * x for x in xs]\n\n{HEAD}    return [2 * x for x in xs]\n",
    "helper first": f"def twice(x):\n    return 2 * x\n\n{HEAD}    return [twice(x) for x in xs]",
    "helper of the prompt": f"```python\n{HEAD}    return [int(half(4 * x)) for x in xs]\n```",
    "tabs": f"```python\n{HEAD}\treturn [2 * x for x in xs]\n```",
    "tabs, body only": "\tys = []\n\tfor x in xs:\n\t\tys.append(2 * x)\n\treturn ys",
    "trailing prints": f"```python\n{HEAD}    return [2 * x for x in xs]\n\nprint(doubled([1]))\n```",
    "started as a script": f"```python\n{HEAD}    return [2 * x for x in xs]\n\nif __name__ == '__main__':\n    print(input())\n```",
    "indented fence": f"1. So:\n   ```python\n   {HEAD}       return [2 * x for x in xs]\n   ```",
    "a usage block first": f"Use: \n```python\nprint(doubled([1]))\n```\n```python\n{HEAD}    return [2 * x for x in xs]\n```",
    "a word of shell first": f"```\npytest\n```\n```python\n{HEAD}    return [2 * x for x in xs]\n```",
    "the stub quoted first": f"```python\n{HEAD}    \"\"\"Twice each.\"\"\"\n    pass\n```\nSo:\n```python\n{HEAD}    return [2 * x for x in xs]\n```",
    "a broken block first": f"```python\n{HEAD}    return [2 * x for\n```\nSo:\n```python\n{HEAD}    return [2 * x for x in xs]\n```",
    "a helper behind": f"```python\n{HEAD}    return [twice(x) for x in xs]\n```\nwith\n```python\ndef twice(x):\n    return 2 * x\n```",
    "the future": f"```python\nfrom __future__ import annotations\n\n{HEAD}    return [2 * x for x in xs]\n```",
    "a fence behind words": f"Sure! ```python\n{HEAD}    return [2 * x for x in xs]\n```\nThis doubles each.",
    "a fence in a list": f"1. ```python\n{HEAD}    return [2 * x for x in xs]\n```\nThis doubles each.",
    "a strange escape": f"```python\n{HEAD}    pattern = '\\d'\n    return [2 * x for x in xs]\n```",
    "an exit behind it": f"```python\n{HEAD}    return [2 * x for x in xs]\nimport sys\nsys.exit(0)\n```",
    "a wrong example behind it": f"```python\n{HEAD}    return [2 * x for x in xs]\n\nassert doubled([1]) == [3]\n```",
    "half a line that compiles": f"```python\n{HEAD}    return [2 * x for x in xs]\n\nfor xs in ([1], [2]):\n    print(doubled(xs))\n\nche",
    "an example that assigns, before": f"```python\nresult = doubled([1, 2])\n```\n```python\n{HEAD}    return [2 * x for x in xs]\n```",
    "how to import it": f"```python\n{HEAD}    return [2 * x for x in xs]\n```\n```python\nfrom solution import doubled\n```",
    "a decorator and a constant": f"```python\nfrom functools import wraps\nTWO = 2\ndef same(f):\n    @wraps(f)\n    def g(*a):\n        "
    f"return f(*a)\n    return g\n\n@same\n{HEAD}    return [TWO * x for x in xs]\n\nprint(doubled([1, 2]))\n```",
    "windows newlines": f"```python\r\n{HEAD}    return [2 * x for x in xs]\r\n```\r\n",
}
WRONG = {
    "nothing": "",
    "prose": "I would multiply.",
    "prose that reads as code": "doubled",
    "wrong": f"```python\n{HEAD}    return xs\n```",
    "not the function": "```python\ndef other(xs):\n    return [2 * x for x in xs]\n```",
    "syntax": f"```python\n{HEAD}    return [2 * x for x in xs\n```",
    "leaves": f"```python\n{HEAD}    import sys\n    sys.exit(0)\n```",
    "leaves at once": f"```python\nimport os\n{HEAD}    os._exit(0)\n```",
    "a second, right try after a wrong one": f"```python\n{HEAD}    return xs\n```\nBetter:\n```python\n{HEAD}    return [2 * x for x in xs]\n```",
    "never ends in the test": f"```python\n{HEAD}    while len(xs):\n        xs = xs[:]\n    return xs\n```",
}


@pytest.mark.parametrize("kind", RIGHT)
def test_right_programs_in_any_form(kind):
    """Fault: a right function counts as wrong for the way in which a chat model presents it."""
    assert tasks.score_humaneval(RIGHT[kind], tasks.Question([], "Test/0", ROW)) == ("passed", True), tasks.program_of(RIGHT[kind], ROW)


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_programs(kind, monkeypatch):
    """Fault: an exit code taken for a pass; a program picked because it passes."""
    monkeypatch.setattr(sandbox, "run", functools.partial(sandbox.run, seconds=2.0))
    reason, passed = tasks.score_humaneval(WRONG[kind], tasks.Question([], "Test/0", ROW))
    assert not passed and reason != "passed" and "\n" not in reason


def test_reference_solutions_pass(tmp_path):
    """Fault: scoring that fails right bodies or passes wrong ones. On the 164 of the data set where MARS_HUMANEVAL names its file."""
    file = os.environ.get("MARS_HUMANEVAL")
    if not file:
        file = tmp_path / "one.jsonl.gz"
        file.write_bytes(gzip.compress((json.dumps(ROW) + "\n").encode()))
    questions = tasks.read_humaneval(file)
    assert [q.gold for q in questions if not tasks.score_humaneval(q.row["canonical_solution"], q)[1]] == []
    assert [q.gold for q in questions if tasks.score_humaneval("    return None", q)[1]] == []
    assert questions[0].messages[0]["content"].endswith("```") and questions[0].row["prompt"].strip() in questions[0].messages[0]["content"]


def test_humaneval_asks_before_it_runs_code(capsys):
    """Fault: model-written programs are run without anyone having said so."""
    with pytest.raises(SystemExit) as e:
        run.main(["--model", "x", "--task", "humaneval"])
    assert e.value.code == 2 and "--allow-code" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------ the sandbox

CHECK = "assert f(2) == 4\n"
GOOD = "def f(x):\n    return 2 * x\n"
STOPPED = {  # program: what its reason holds
    "while True: pass": "timed out",
    "import time\ntime.sleep(60)": "timed out",
    "import os\nos.close(1)\nos.close(2)\nwhile True: pass": "timed out",
    "while True: print('x' * 1000)": "printed too much",
    "x = bytearray(3 * 10**9)": "MemoryError",
    "input()": "EOFError",
    "import sys\nsys.exit(0)": "left with exit code 0",
    "import os\nos._exit(0)": "without reaching the end",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "import socket\nsocket.create_connection(('127.0.0.1', 9))": "no network",
    "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:9')": "no network",
    "f = open('big', 'wb')\nfor _ in range(200): f.write(bytes(2**20))": "OSError",
    "files = [open(f'{i}', 'w') for i in range(500)]": "Too many open files",
    "def f(x): return x": "AssertionError",
    "print('passed')": "NameError",
}


@pytest.mark.parametrize("program", STOPPED)
@pytest.mark.parametrize("namespaces", [True, False])
def test_programs_are_stopped(program, namespaces):
    """Fault: a loop, a flood of memory, output or files, a call home or an early exit that hangs the evaluation or passes."""
    passed, reason = sandbox.run(program, CHECK, seconds=1, namespaces=namespaces)
    assert not passed and STOPPED[program] in reason


@pytest.mark.parametrize("namespaces", [True, False])
def test_one_program_does_not_end_the_evaluation(namespaces):
    """Fault: a program that ends its guard, or says several lines, breaks off all that follows."""
    everyone = "os.kill(-1, 9)\n" if os.geteuid() == 0 or namespaces and sandbox.mode() == "namespaces" else ""  # else it would reach you
    passed, reason = sandbox.run(f"import os, signal\nos.kill(os.getppid(), signal.SIGTERM)\n{everyone}", CHECK, namespaces=namespaces, seconds=2)
    assert not passed and reason != "passed"
    assert sandbox.run("raise ValueError('a\\nb')", CHECK, namespaces=namespaces) == (False, "ValueError: b")


def test_the_mode_is_known(monkeypatch):
    """Fault: every program fails, and a model gets 0, since Python's library cannot be read; a mode claimed that is not there."""
    assert sandbox.mode() in ("namespaces", "limits")
    monkeypatch.setattr(sandbox, "ask_guard", lambda ask: {"passed": False, "reason": "ModuleNotFoundError: No module named 'heapq'"})
    with pytest.raises(UserError, match="heapq.*must lie where everybody may read"):
        sandbox.mode()


def test_no_network_below_python():
    """Fault: what is kept from sockets is Python alone. The program calls the C library's, to a port that does answer."""
    if sandbox.mode() != "namespaces":
        pytest.skip("no namespaces here")
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"""
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
fd = libc.socket(2, 1, 0)
address = struct.pack("=HH4s8x", 2, int.from_bytes(({server.getsockname()[1]}).to_bytes(2, "big"), "little"), bytes([127, 0, 0, 1]))
assert fd > 0 and libc.connect(fd, address, 16) == -1, ctypes.get_errno()
"""
        assert sandbox.run(program) == (True, "passed")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("namespaces", [True, False])
def test_nothing_survives(namespaces, tmp_path):
    """Fault: a program's children, in sessions of their own and with nobody left to wait for them, run on; its folder stays."""
    mark = f"mars-survivor-{os.getpid()}-{namespaces}"
    program = ("import os, sys, time\nfor i in range(3):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n"
               f"            os.execv('/bin/sh', ['{mark}', '-c', 'sleep 600; true'])\n        os._exit(0)\n" + GOOD)
    many = {} if os.geteuid() == 0 else {"processes": 100_000}  # the limit may count all that this user runs
    assert sandbox.run(program, CHECK + "import time\ntime.sleep(0.3)", namespaces=namespaces, **many)[0]
    running = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            running.append(Path(f"/proc/{pid}/cmdline").read_text())
    assert running and not [command for command in running if mark in command]
    assert not sandbox.run("import os\nwhile True: os.fork()", CHECK, seconds=1, namespaces=namespaces)[0]


@pytest.mark.parametrize("namespaces", [True, False])
def test_a_program_does_not_see_our_environment(namespaces, monkeypatch):
    """Fault: a token in the environment of the evaluation is there to be read, if not in os.environ then in that of the process."""
    monkeypatch.setenv("MARS_TEST_SECRET", "tell-nobody")
    program = ("import os\nfound = str(dict(os.environ))\nfor pid in ('self', os.getppid()):\n    try:\n"
               "        found += open(f'/proc/{pid}/environ').read()\n    except OSError:\n        pass\nassert 'tell-nobody' not in found\n")
    assert sandbox.run(program, namespaces=namespaces) == (True, "passed")


def test_a_program_gets_a_folder_of_its_own_and_writes_nowhere_else(tmp_path):
    """Fault: files appear in the working tree; the next program finds those of the one before; secrets lie in its environment."""
    target = tmp_path / "there"
    assert sandbox.run(GOOD + "import os\nassert os.listdir() == [] and set(os.environ) == {'HOME', 'TMPDIR', 'PATH'}\nopen('a', 'w').write('b')", CHECK)[0]
    assert sandbox.run(GOOD + "import os\nassert os.listdir() == []", CHECK)[0]
    sandbox.run(f"open({str(target)!r}, 'w').write('x')", CHECK)
    if os.geteuid() == 0 or sandbox.mode() == "namespaces":
        assert not target.exists()
