"""The tasks of eval.run: what is asked, what is right. Every task is a way to read questions and a way to score an answer's text.

    arithmetic   generated problems, or with --data any chats whose answers end in "#### number"; an answer without #### is wrong
    gsm8k        the number after the last #### that has one, else in the last \\boxed{}, else the last number
    svamp        the same, of one-step word problems
    humaneval    the function passes its tests, in eval/sandbox.py
"""

import ast
import gzip
import hashlib
import json
import math
import re
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from data import arithmetic, download, final_number, read_chats
from eval import sandbox
from model import UserError


class Question(NamedTuple):
    messages: list[dict]
    gold: object            # what the sample file shows as the right answer
    row: dict | None = None  # the data's own row, where scoring needs more


class Task(NamedTuple):
    read: Callable[[Path | None], list[Question]]                    # None: the data's own download
    score: Callable[[str, Question], tuple[object, bool]]            # (what was extracted, is it right)
    max_new_tokens: int = 256


def questions_sha256(questions: list[Question]) -> str:
    """Of what is asked and what is right: equal for equal tasks, wherever their data came from."""
    text = json.dumps([[q.messages, q.gold, q.row] for q in questions], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


# ------------------------------------------------------------------------------------------------------------ numbers

DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+"
NUMBER = re.compile(rf"(?:(?<![\w.,)\]}}])[-\u2212])?\$?(?<!\^)(?<!\^\{{)(?:{DIGITS})")  # not an exponent


def last_number(text: str) -> float | None:
    """The number after the last "####" that has one, else in the last \\boxed{}, else the last one anywhere; None where there is none.

    "$29.00", "29." and "\\boxed{29}" are 29, "1,000" is 1000, a minus counts unless something stands before it ("9-4" ends in 4).
    """
    for latex, plain in (("{,}", ","), ("\\,", ""), ("\\!", ""), ("\\$", "$")):
        text = text.replace(latex, plain)
    marked = re.findall(rf"####[\s*:]*({NUMBER.pattern})", text)
    boxed = re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", text)
    found = marked or NUMBER.findall(boxed[-1] if boxed else text)
    value = float(found[-1].replace("\u2212", "-").replace("$", "").replace(",", "")) if found else math.nan
    return value if math.isfinite(value) else None


def score_number(number: Callable) -> Callable:
    """A scorer that compares what `number` finds in the text with the gold number."""

    def score(text: str, question: Question) -> tuple[float | None, bool]:
        said = number(text)
        return said, said is not None and abs(said - question.gold) < 1e-6

    return score


def read_arithmetic(file, n: int = 5000) -> list[Question]:
    return numbered(read_chats(file) if file else [p.messages() for p in arithmetic("test", n)], file)


def numbered(chats, where=None) -> list[Question]:
    """Chats that end in an answer with "#### number" -> questions. Raises UserError naming the first that does not."""
    gold = [final_number(c[-1]["content"]) if c[-1]["role"] == "assistant" else None for c in chats]
    if None in gold:
        raise UserError(f"{where}: chat {gold.index(None) + 1} does not end in an answer with #### and a number")
    return [Question(c[:-1], g) for c, g in zip(chats, gold)]


def read_gsm8k(file) -> list[Question]:
    file = file or download("gsm8k-test")
    return numbered(read_chats(file), file)


def read_svamp(file) -> list[Question]:
    """Rows {"Body", "Question", "Answer"}. A body without its full stop gets one."""
    questions = []
    for where, row in rows(file or download("svamp"), ("Body", "Question", "Answer")):
        body = row["Body"].strip()
        body += "" if body.endswith((".", "?", "!")) else "."
        try:
            gold = float(row["Answer"])
        except ValueError:
            raise UserError(f"{where}: Answer {row['Answer']!r} is no number") from None
        questions.append(Question([{"role": "user", "content": f"{body} {row['Question'].strip()}"}], gold))
    return questions


def rows(file, fields: tuple) -> list[tuple[str, dict]]:
    """(where, row) of each line of a JSONL file, or of one packed by gzip. Raises UserError for a line that lacks one of the fields."""
    file = Path(file).expanduser()
    if not file.is_file():
        raise UserError(f"{file}: no such data file")
    content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    found = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            where = f"{file}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as e:
                raise UserError(f"{where}: {e}") from None
            if missing := [f for f in fields if not isinstance(row, dict) or f not in row]:
                raise UserError(f"{where}: no {', '.join(missing)}")
            found.append((where, row))
    if not found:
        raise UserError(f"{file}: no rows in this file")
    return found


# -------------------------------------------------------------------------------------------------------- HumanEval

ASK = "Write this Python function. Answer with the whole function in one code block.\n\n```python\n{}\n```"
FENCE = re.compile(r"(?<!\S)```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.M | re.S)  # an unclosed block goes on to the end
CODE = re.compile(r"^(?:from |import |def |class |async def |@|[A-Z_]+ = )", re.M)  # what a program may begin with


def read_humaneval(file) -> list[Question]:
    """Rows {"task_id", "prompt", "entry_point", "canonical_solution", "test"}, of the .jsonl.gz of its makers or unpacked."""
    found = rows(file or download("humaneval"), ("task_id", "prompt", "entry_point", "canonical_solution", "test"))
    return [Question([{"role": "user", "content": ASK.format(row["prompt"].strip())}], row["task_id"], row) for _, row in found]


def compiles(code: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of doubtful escapes in strings
            compile(code, "<answer>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def longest_program(code: str, least: int = 0) -> str | None:
    """The most whole lines from the start that compile, at least `least` of them; what follows (prose, half a line) is dropped."""
    lines = code.split("\n")
    return next((part for n in range(len(lines), least, -1) if compiles(part := "\n".join(lines[:n]))), None)


def program_of(text: str, row: dict) -> str:
    """The program that an answer means. Decided by syntax alone, never by what passes.

    The first code block that defines the function with a body, and of the other blocks those that only define or import and do not
    name the function; without such a block the text from its first line of code, else the text (or block) as the function's body. The
    prompt's imports and helpers come first. Calls, asserts and loops outside of definitions are examples, and are left out.
    """
    name, prompt = row["entry_point"], row["prompt"]
    defines = re.compile(rf"^(?:async )?def {re.escape(name)}\b", re.M)
    before = prompt[: defines.search(prompt).start()] if defines.search(prompt) else ""
    blocks = [textwrap.dedent(block) for block in FENCE.findall(text)]
    for i, block in enumerate(blocks):
        if code := defining(block, defines, name):
            others = [b for b in (*blocks[:i], *blocks[i + 1 :]) if only_defines(b) and not re.search(rf"\b{re.escape(name)}\b", b)]
            return joined(before, *others, code)
    if found := defines.search(text):
        for start in (m.start() for m in CODE.finditer(text[: found.end()])):
            if code := defining(text[start:], defines, name):
                return joined(before, code)
    head, given = prompt.rstrip(), (blocks[0] if blocks else text).strip("\n")
    forms = [form for body in (given, given.expandtabs(4))
             for form in (body, "    " + body.lstrip(), textwrap.indent(textwrap.dedent(body), "    "))]  # fmt: skip
    found = [longest_program(f"{head}\n{form}", head.count("\n") + 1) for form in forms]
    return max((code for code in found if code and has_body(code, name)), key=lambda code: code.count("\n"),
               default=f"{before}\n{text}")  # which fails, and the sample file shows why


def defining(code: str, defines: re.Pattern, name: str) -> str | None:
    """The longest program in code that defines the function, with a body; without the examples in it."""
    found = defines.search(code)
    program = longest_program(code, code[: found.end()].count("\n") + 1) if found else None
    return without_examples(program) if program and has_body(program, name) else None


def without_examples(code: str) -> str:
    """The code without calls, asserts and loops outside of definitions, which may fail (or be cut off) where the function is right."""
    examples = (ast.Expr, ast.Assert, ast.For, ast.While, ast.With, ast.AsyncFor, ast.AsyncWith)
    body = statements(code)
    kept = [s for s in body if not isinstance(s, examples)]
    return code if len(kept) == len(body) else ast.unparse(ast.Module(kept, []))


def statements(code: str) -> list:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(code).body


def has_body(code: str, name: str) -> bool:
    """Whether the function does more than have a docstring, `pass` or `...`."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [d.body for d in statements(code) if isinstance(d, kinds) and d.name == name]
    empty = lambda s: isinstance(s, ast.Pass) or isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)
    return any(not empty(s) for body in bodies for s in body)


def only_defines(code: str) -> bool:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
    return compiles(code) and all(isinstance(s, kinds) for s in statements(code))


def joined(*parts: str) -> str:
    """The parts one behind the other; `from __future__` lines must come before all else."""
    future = re.compile(r"^from __future__ import [^\n]*$", re.M)
    return "\n".join([*(line for p in parts for line in future.findall(p)), *(future.sub("", p) for p in parts)])


def score_humaneval(text: str, question: Question) -> tuple[str, bool]:
    row = question.row
    program = program_of(text, row)
    passed, reason = sandbox.run(program, f"{row['test']}\ncheck({row['entry_point']})")
    return reason, passed


TASKS = {
    "arithmetic": Task(read_arithmetic, score_number(final_number)),
    "gsm8k": Task(read_gsm8k, score_number(last_number)),
    "svamp": Task(read_svamp, score_number(last_number)),
    "humaneval": Task(read_humaneval, score_humaneval, 512),
}
