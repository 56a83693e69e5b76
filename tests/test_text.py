"""Text of every letter, in every locale: on the standard streams, and in files."""

import ast
import io
import json
import re
import sys

import pytest
from small_runs import ONE_DEVICE, ROOT, launch

from specrl_jax.command_line import cli

# Python's standard streams are ASCII here, and files that are opened without an encoding may be.
ASCII = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LANG": "C"}
CONFIG = """
import small_runs

def get_config():
    config = small_runs.small_config()
    config.update_from_flattened_dict({
        "data.source": "jsonl", "data.path": __file__.replace(".py", ".jsonl"), "data.name": "",
        "data.prompt_len": 4, "tokenizer.alphabet": "0123456789 😀é", "sft.mistake_rate": 0.0,
        "data.eval_prompts": 2, "rollout.draft": "previous",
    })
    config.data.options = {}
    return config
"""


def _stream(encoding, content=b""):
    return io.TextIOWrapper(io.BytesIO(content), encoding=encoding, errors="strict")


@pytest.mark.parametrize(
    ("encoding", "printed"),
    [
        ("ascii", rb"\U0001f600 \xe9 \udc80"),
        ("latin-1", b"\\U0001f600 \xe9 \\udc80"),
        ("utf-8", "😀 é ".encode() + rb"\udc80"),
    ],
)
def test_output_escapes_what_its_encoding_lacks(monkeypatch, encoding, printed):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, _stream(encoding))
    with cli.user_errors():
        for output in (sys.stdout, sys.stderr):
            print("😀 é \udc80", end="", file=output, flush=True)
            assert output.buffer.getvalue() == printed


@pytest.mark.parametrize(
    ("encoding", "content", "text"),
    [
        ("ascii", "😀 é".encode(), "😀 é"),
        ("utf-8", "😀 é".encode(), "😀 é"),
        ("utf-8", b"a\xff", "a\ufffd"),
        ("latin-1", b"\xe9", "é"),
    ],
)
def test_input_is_read_whatever_it_holds(monkeypatch, encoding, content, text):
    monkeypatch.setattr(sys, "stdin", _stream(encoding, content))
    with cli.user_errors():
        assert sys.stdin.read() == text


@pytest.mark.slow
def test_a_run_with_emoji_ends_and_goes_on_where_the_terminal_is_ascii(tmp_path):
    rows = [{"question": f"{i} 😀", "answer": str(i)} for i in range(10)]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "emoji.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "emoji.py").write_text(CONFIG, encoding="utf-8")
    run = tmp_path / "a run"
    command = (f"--config={tmp_path / 'emoji.py'}", f"--workdir={run}")
    said = []
    for steps in (1, 2):  # the second command resumes
        done = launch("launch/train.py", *command, f"--config.train.steps={steps}",
                      **ASCII, **ONE_DEVICE)  # fmt: skip
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert r"a prompt: " in said[0]
    assert r"\U0001f600" in said[0]
    assert "resumed" in said[1]
    done = launch("launch/generate.py", f"--run={run}", "1 😀", **ASCII, **ONE_DEVICE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


def test_help_is_printed_where_the_terminal_is_ascii():
    done = launch("launch/train.py", "--help", **ASCII)
    assert done.returncode == 0, done.stderr
    assert r"\xb7" in done.stdout  # a letter of a comment in configs/grpo.py


def _without_encoding(source: str) -> list[int]:
    """Lines that open a file, or a process's output, as text of the locale's encoding."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [call.lineno for call in calls if _takes_the_locale_s(call)]


def _takes_the_locale_s(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    owner = getattr(getattr(call.func, "value", None), "id", "")
    named = {keyword.arg for keyword in call.keywords}
    if "encoding" in named:
        return False
    if name == "open" and owner != "os":
        modes = [x.value for x in call.args if isinstance(x, ast.Constant)]
        return not any(re.fullmatch(r"[rwa]b\+?", str(mode)) for mode in modes)
    if name == "read_text":
        return not call.args
    of_a_process = name in ("run", "Popen") and named & {"text", "universal_newlines"}
    return name == "write_text" or bool(of_a_process)


def test_no_file_has_the_locale_s_encoding():
    wrong = ["open(p)", "open(p, 'w')", "p.open('a+')", "p.read_text()", "p.write_text(x)",
             "subprocess.run(a, text=True)"]  # fmt: skip
    right = ["open(p, 'rb')", "os.open(p, os.O_PATH)", "open(p, encoding='utf-8')",
             "p.read_text('utf-8')"]  # fmt: skip
    assert _without_encoding("\n".join([*right, *wrong])) == [5, 6, 7, 8, 9, 10]
    files = [file for folder in ("specrl_jax", "launch", "configs", "docs")
             for file in (ROOT / folder).rglob("*.py")]  # fmt: skip
    assert len(files) > 100
    found = {f.name: lines for f in files if (lines := _without_encoding(f.read_text("utf-8")))}
    assert found == {}
