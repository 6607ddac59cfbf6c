"""The tasks of eval.run: what is asked, what is right. Every task is a way to read questions and a way to score an answer's text.

    arithmetic   generated problems, or with --data any chats whose answers end in "#### number"; an answer without #### is wrong
    gsm8k        the number after the last ####, else in the last \\boxed{}, else the last number
    svamp        the same, of one-step word problems
    humaneval    the function passes its tests, in eval/sandbox.py
"""

import ast
import gzip
import json
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


# ------------------------------------------------------------------------------------------------------------ numbers

NUMBER = re.compile(r"(?:(?<![\w.,)\]}])[-−])?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+")


def last_number(text: str) -> float | None:
    """After the last ####, else in the last \\boxed{}, else the last one anywhere; None where there is none.

    "$29.00", "29." and "\\boxed{29}" are 29, "1,000" is 1000, a minus counts unless something stands before it ("9-4" ends in 4).
    """
    if "####" in text:
        text, which = text.rpartition("####")[2].split("\n")[0], 0
    elif boxed := re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", text):
        text, which = boxed[-1], -1
    else:
        which = -1
    found = NUMBER.findall(text)
    return float(found[which].replace("−", "-").replace("$", "").replace(",", "")) if found else None


def score_number(number: Callable) -> Callable:
    """A scorer that compares what `number` finds in the text with the gold number."""

    def score(text: str, question: Question) -> tuple[float | None, bool]:
        said = number(text)
        return said, said is not None and abs(said - question.gold) < 1e-6

    return score


def read_arithmetic(file, n: int = 2000) -> list[Question]:
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
FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.M | re.S)

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

    Code blocks up to the first that defines the function (helpers may come in blocks of their own), else the text from its first line
    of code, else the text as the function's body. The prompt's imports and helpers come first.
    """
    name, prompt = row["entry_point"], row["prompt"]
    defines = re.compile(rf"^(?:async )?def {re.escape(name)}\b", re.M)
    before = prompt[: defines.search(prompt).start()] if defines.search(prompt) else ""
    blocks = FENCE.findall(text)
    whole = next((i for i, b in enumerate(blocks) if defines.search(textwrap.dedent(b))), None)
    if whole is not None:
        parts = [textwrap.dedent(b) for b in blocks[: whole + 1]]
        helpers = [p for p in parts[:-1] if compiles(p)]
        least = parts[-1][: defines.search(parts[-1]).end()].count("\n") + 1
        if code := longest_program(parts[-1], least):
            return "\n".join([before, *helpers, code])
    if not blocks and (found := defines.search(text)):
        for start in (m.start() for m in CODE.finditer(text[: found.end()])):
            if code := longest_program(text[start:], text[start : found.end()].count("\n") + 1):
                return f"{before}\n{code}"
    head, given = prompt.rstrip(), (blocks[0] if blocks else text).strip("\n")
    forms = [form for body in (given, given.expandtabs(4))
             for form in (body, "    " + body.lstrip(), textwrap.indent(textwrap.dedent(body), "    "))]  # fmt: skip
    found = [longest_program(f"{head}\n{form}", head.count("\n") + 1) for form in forms]
    return max((code for code in found if code and has_body(code, name)), key=lambda code: code.count("\n"),
               default=f"{before}\n{text}")  # which fails, and the sample file shows why


def has_body(code: str, name: str) -> bool:
    """Whether the function is more than its docstring."""
    return any(isinstance(d, ast.FunctionDef | ast.AsyncFunctionDef) and d.name == name and len(d.body) > (ast.get_docstring(d) is not None)
               for d in ast.walk(ast.parse(code)))  # fmt: skip


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
