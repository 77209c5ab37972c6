"""Programs as targets: what they may say, what becomes of wrong answers, and nothing of them left running."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from test_isolate import gone
from toys import run_python

from veriformer.boundary import Request
from veriformer.calling import UsageError
from veriformer.catalogue import all_laws
from veriformer.checking import in_process
from veriformer.isolate import Remote
from veriformer.law import find_laws
from veriformer.report.script import save, script_of
from veriformer.running import Item
from veriformer.subject import Implementation
from veriformer.targets import Options, load

PROGRAM = """
import json, os, sys, time
import numpy as np

BROKEN = True
HELLO = {"operations": {"softmax": ["axis"], "softmax_vjp": []}}

def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return {"out": e / e.sum(axis, keepdims=True)}

def call(name, arrays, keywords):
    return softmax(**arrays, **keywords)

def hello():
    print(json.dumps(HELLO), flush=True)

#CHANGE

if __name__ == "__main__":
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["call"] == "hello":
            hello()
            continue
        arrays = dict(np.load(asked["arrays"]))
        found = call(asked["call"], arrays, asked["keywords"])
        if isinstance(found, str):
            print(found, flush=True)
            continue
        if found:
            np.savez(asked["results"], **found)
        print(json.dumps({"ok": True}), flush=True)
"""
NOTES = """
def call(name, arrays, keywords):
    print("working", file=sys.stderr)
    with open("asked.json", "a") as file:
        print(json.dumps([name, os.getpid(), os.environ["OMP_NUM_THREADS"], keywords], default=str), file=file)
    if name == "softmax":
        return softmax(**arrays, **keywords)
    p, c = softmax(arrays["x"], **keywords)["out"], arrays["cotangent"]
    return {"x": p * (c - (p * c).sum(keywords["axis"], keepdims=True))}
"""
WRONG = """
def call(name, arrays, keywords):
    {line}
    return softmax(**arrays, **keywords)
"""
ROWS = Request({"x": np.array([[0.0, 0.0], [1.0, 1.0]])}, {}, "float32")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes a program with a change into the working folder and gives a target of it."""
    monkeypatch.chdir(tmp_path)

    def write(change: str = "", operation: str = "softmax=") -> str:
        (tmp_path / "program.py").write_text(PROGRAM.replace("#CHANGE", change))
        return f"{operation}subprocess:{sys.executable} program.py"

    return write


@pytest.fixture
def opened() -> Iterator[Callable[..., Remote]]:
    """Workers that are closed in the end."""
    found: list[Remote] = []

    def begin(target: str, **rest: float) -> Remote:
        found.append(Remote(target, Options(), **rest))
        return found[-1]

    yield begin
    for one in found:
        one.close()


def asked(folder: Path) -> list[list[object]]:
    return [json.loads(line) for line in (folder / "asked.json").read_text().splitlines()]


@pytest.mark.parametrize("operation", ["softmax=", ""])
def test_a_program_is_a_target(operation: str, program: Callable[..., str], opened: Callable[..., Remote]) -> None:
    remote = opened(program(NOTES, operation))
    about = remote.descriptions[0]
    assert about.name.startswith("subprocess:") and about.framework == "numpy" and about.vjps == {"softmax"}
    assert dict(about.plans["softmax"].keywords) == {"axis": "axis"} and list(about.plans) == ["softmax"]
    ones = remote.call(about.name, "softmax", ROWS)
    other = remote.call(about.name, "softmax", Request(ROWS.arrays, {"axis": 0}, "float64"))
    assert ones.results[0].tolist() == [[0.5, 0.5], [0.5, 0.5]] and ones.dtypes == ("float32",)
    assert np.allclose(other.results[0], [[0.26894142] * 2, [0.73105858] * 2]) and other.dtypes == ("float64",)
    graded = Request(ROWS.arrays, {}, "float32", gradient=("x",), cotangents=(np.array([[1.0, 0.0], [0.0, 0.0]]),))
    assert remote.call(about.name, "softmax", graded).gradients["x"].tolist() == [[0.25, -0.25], [0, 0]]  # type: ignore[union-attr]
    calls = asked(Path.cwd())
    assert [name for name, *_ in calls] == ["softmax", "softmax", "softmax", "softmax_vjp"]
    assert len({pid for _, pid, *_ in calls}) == 1 and {threads for *_, threads, _ in calls} == {"1"}
    assert [keywords for *_, keywords in calls] == [{"axis": -1}, {"axis": 0}, {"axis": -1}, {"axis": -1}]
    remote.close()
    assert gone(int(str(calls[0][1])))


def test_a_program_works_in_process(program: Callable[..., str]) -> None:
    (one,) = load(program(), Options())
    assert one.boundaries["softmax"].cross(ROWS).results[0].tolist() == [[0.5, 0.5], [0.5, 0.5]]


ANSWERS = [
    ("os._exit(3)", "crash", "the program ended (exit code 3)"),
    ("os.abort()", "crash", "the program ended (SIGABRT)"),
    ("1 / 0", "crash", "the program ended (exit code 1)"),
    ("print('hello there')", "raised", "ProgramError: printed 'hello there' on stdout, which is for answers"),
    ("print('x' * 10**6)", "raised", "ProgramError: printed 'xxxxx"),
    ("""return '{"refused": "not today"}'""", "refused", "NotImplementedError: not today"),
    ("""return '{"error": "a bug"}'""", "raised", "ProgramError: a bug"),
    ("return '{}'", "raised", "ProgramError: answered {}"),
    ("return '[1]'", "raised", "ProgramError: printed '[1]'"),
    ("return None", "type", "the program answered without writing its results"),
    ("return {'a': arrays['x'], 'b': arrays['x']}", "type", "the program wrote a, b, wanted out"),
    ("return {'out': np.array([None])}", "type", "the program's results cannot be read: ValueError"),
    ("os.fork() or time.sleep(600)", "ok", ""),
    ("time.sleep(600)", "timeout", "no answer within"),
]
EACH = WRONG.format(
    line="\n    ".join(
        f"if arrays['x'][0, 0] == {number}: open('pid', 'w').write(str(os.getpid())); {line}"
        for number, (line, *_) in enumerate(ANSWERS, 2)
    )
)


def test_a_wrong_answer_is_one_outcome_and_the_next_call_is_answered(
    program: Callable[..., str], opened: Callable[..., Remote]
) -> None:
    remote = opened(program(EACH))
    name = remote.descriptions[0].name
    for number, (line, kind, words) in enumerate(ANSWERS, 2):
        remote.hung, remote.patience = False, 2.0 if kind == "timeout" else 20.0
        outcome = remote.call(name, "softmax", Request({"x": np.full((1, 2), float(number))}, {}, "float32"))
        assert (outcome.kind, outcome.message[: len(words)]) == (kind, words), line
        assert kind not in ("crash", "timeout") or gone(int(Path("pid").read_text()))
        remote.patience = 20.0
        assert remote.call(name, "softmax", ROWS).results[0].tolist() == [[0.5, 0.5], [0.5, 0.5]], line


@pytest.mark.parametrize(
    ("change", "target", "words"),
    [
        ("HELLO = {'operations': {'sofmax': []}}", "", "names 'sofmax', which is no operation; nearest is 'softmax'"),
        ("HELLO = {'operations': {'softmax': ['axes']}}", "", "'axes' has no default and no known meaning; nearest is"),
        ("HELLO = {'operations': {'softmax': ['x']}}", "", "softmax names the keyword 'x', which it cannot have"),
        ("HELLO = {'operations': {'decoder_lm': []}}", "", "decoder_lm is, or is given, an object; that takes Python"),
        ("HELLO = {'operations': {'softmax_vjp': []}}", "", "names 'softmax_vjp', which is no operation"),
        ("HELLO = {'operations': {'softmax': []}}", "gelu=", "has no gelu; it has softmax"),
        ("HELLO = {'operations': {'softmax': []}, 'dtypes': ['float8']}", "", "float8"),
        ("HELLO = {'operations': {'softmax': []}, 'declare': {'colour': 1}}", "", "unknown capability 'colour'"),
        ("HELLO = {'operations': ['softmax']}", "", "said something else than"),
        ("HELLO = {}", "", "named no operations"),
        ("hello = lambda: print('Loading…', flush=True)", "", "printed 'Loading\\u2026' on stdout"),
        ("hello = lambda: os._exit(9)", "", "ended (exit code 9); wanted one line of JSON"),
        ("import no_such_module", "", "ended (exit code 1); wanted one line of JSON"),
    ],
)
def test_a_program_that_says_nothing_sensible_is_a_usage_error(
    change: str, target: str, words: str, program: Callable[..., str]
) -> None:
    with pytest.raises(UsageError) as caught:
        load(program(change, target), Options())
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", "wants a command"),
        ("no-such-program x", "no-such-program is no program that can be found"),
        ("./plain.txt", "./plain.txt cannot be run: chmod +x"),
        ("'open", "No closing quotation"),
    ],
)
def test_a_program_that_is_not_there_is_a_usage_error(
    command: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.txt").write_text("text")
    for target in (f"softmax=subprocess:{command}", f"subprocess:{command}"):
        with pytest.raises(UsageError, match=words.replace("+", r"\+")) as caught:
            load(target, Options())
        assert "\n" not in str(caught.value)


COMPOSITES = """
HELLO = {"operations": {name: words for name, words in [
    ("attention_with_lse", ["mask"]), ("clip_by_global_norm", ["max_norm"]), ("multi_head_attention", ["heads"]),
    ("multi_head_attention_vjp", []), ("alibi_bias", []),
]}, "dtypes": ["float32", "bfloat16"], "declare": {"grouped_heads": False}}

def call(name, arrays, keywords):
    kinds = {key: str(array.dtype) for key, array in arrays.items()}
    open(name + ".json", "w").write(json.dumps([kinds, keywords]))
    if name == "attention_with_lse":
        return {"lse": np.zeros((1, 1, 1), "f4"), "out": arrays["v"]}
    if name == "clip_by_global_norm":
        return {key: array for key, array in arrays.items()}
    if name == "multi_head_attention_vjp":
        return {"x": arrays["x"], "params.wq": arrays["params.wq"]}
    return {"whatever": np.zeros([keywords[k] for k in ("heads", "query_length", "key_length")], "f4")
            if name == "alibi_bias" else arrays["x"]}
"""


def test_arrays_of_every_kind_travel_by_name(program: Callable[..., str]) -> None:
    (one,) = load(program(COMPOSITES, ""), Options())
    cross = {name: boundary.cross for name, boundary in one.boundaries.items()}
    assert set(one.description.capabilities["alibi_bias"].dtypes) == {"float32", "bfloat16"}
    assert not one.description.capabilities["attention_with_lse"].grouped_heads

    def said(name: str) -> list[object]:
        return json.loads(Path(f"{name}.json").read_text())  # type: ignore[no-any-return]

    one4, mask = np.full((1, 1, 1, 1), 1.5), np.ones((1, 1, 1, 1), bool)
    both = cross["attention_with_lse"](Request({"q": one4, "k": one4, "v": one4, "mask": mask}, {}, "bfloat16"))
    assert [r.tolist() for r in both.results] == [[[[[1.5]]]], [[[0.0]]]] and both.dtypes == ("bfloat16", "float32")
    assert said("attention_with_lse") == [{"q": "uint16", "k": "uint16", "v": "uint16", "mask": "bool"}, {}]
    grads = {"grads.0": np.ones(2), "grads.1": np.zeros((1, 1))}
    clipped = cross["clip_by_global_norm"](Request(grads, {"max_norm": np.inf}, "float32"))
    assert [r.tolist() for r in clipped.results] == [[1, 1], [[0]]]
    assert said("clip_by_global_norm")[1] == {"max_norm": "inf"}
    square = np.ones((1, 1, 1))
    weights = {f"params.{name}": np.full((1, 1), 2.0) for name in ("wq", "wk", "wv", "wo")}
    request = Request(
        {"x": square, "memory": square, **weights}, {"heads": 1}, "float32",
        gradient=("x", "params.wq", "params.wk"), cotangents=(square,),
    )  # fmt: skip
    outcome = cross["multi_head_attention"](request)
    assert outcome.kind == "ok", outcome.message
    graded = outcome.gradients
    assert {name: None if g is None else g.tolist() for name, g in graded.items()} == {
        "x": [[[1.0]]], "params.wq": [[2.0]], "params.wk": None,
    }  # fmt: skip
    assert set(said("multi_head_attention_vjp")[0]) == {"cotangent", "x", "memory", *weights}  # type: ignore[call-overload]
    bias = cross["alibi_bias"](Request({}, {"heads": 2, "query_length": 1, "key_length": 3}, "float32"))
    assert bias.results[0].shape == (2, 1, 3)
    assert ml_dtypes.bfloat16(1.5).view(np.uint16) == 0x3FC0


SCRIPTED = {
    "value": ("softmax/equals-the-reference", "arrays['x'] = arrays['x'] * (1 + BROKEN)"),
    "error": ("softmax/returns-an-array", """if BROKEN: return '{"error": "a bug"}'"""),
    "ends": ("softmax/returns-an-array", "if BROKEN: os.abort()"),
    "hangs": ("softmax/returns-an-array", "if BROKEN: time.sleep(600)"),
    "gradient": (
        "softmax/gradient-equals-the-reference",
        "if name == 'softmax_vjp': p = softmax(arrays['x'], **keywords)['out']; c = arrays['cotangent']; "
        "return {'x': p * (c - (p * c).sum(keywords['axis'], keepdims=True)) * (1 + BROKEN)}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTED)
def test_a_script_speaks_with_the_program_by_itself(
    name: str, program: Callable[..., str], opened: Callable[..., Remote], tmp_path: Path
) -> None:
    law, line = SCRIPTED[name]
    target = program(WRONG.format(line=line))
    if name == "hangs":
        remote = opened(target, patience=2.0)
        one = Implementation(remote.descriptions[0], remote.call, target)
    else:
        one = in_process(load(target, Options())[0])
    row = Item(find_laws(all_laws(), [law])[0], one, "float32", "smoke").run()
    assert row.verdict == {"error": "error", "ends": "crash", "hangs": "timeout"}.get(name, "fail"), row.reason
    path = tmp_path / "script.py"
    save(script_of(row, one), path)
    if name == "hangs":
        path.write_text(path.read_text().replace("alarm(30)", "alarm(8)"))
    assert "veriformer" not in "".join(line for line in path.read_text().splitlines() if "import" in line)
    start = time.monotonic()
    assert run_python(str(path), folder=tmp_path).returncode == 1 and time.monotonic() - start < 25
    (tmp_path / "program.py").write_text((tmp_path / "program.py").read_text().replace("BROKEN = True", "BROKEN = 0"))
    done = run_python(str(path), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_script_in_bfloat16_sends_bits(program: Callable[..., str], tmp_path: Path) -> None:
    change = WRONG.format(line="return {'out': (arrays['x'] * 0 + 0x3F00 * (not BROKEN)).astype('u2')}")
    (loaded,) = load(program(change + "\nHELLO['dtypes'] = ['bfloat16']"), Options())
    one, law = in_process(loaded), find_laws(all_laws(), ["softmax/equals-the-reference"])[0]
    row = Item(law, one, "bfloat16", "smoke").run()
    assert row.verdict == "fail" and row.failure is not None
    save(script_of(row, one), tmp_path / "script.py")
    assert run_python("script.py", folder=tmp_path).returncode == 1
