"""The pytest plugin: laws are collected once and judged as in `check`; other suites are left alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from toys import ROOT, SOFTMAX, run_python, softmax

import veriformer
from veriformer.catalogue import all_laws

pytest_plugins = ["pytester"]
WRONG = SOFTMAX.replace("return e /", "return 2 * e /")
LAWS = sum(law.operation == "softmax" for law in all_laws())
CONFORMANCE = """
import veriformer
from mylib import softmax
TestSoftmax = veriformer.conformance(softmax=softmax, effort="smoke", dtypes=["float32"], laws={laws})
"""
QUICK = '["equals-the-reference", "returns-an-array", "temperature-matters"]'


@pytest.fixture(autouse=True)
def library(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a right and a wrong softmax; options from outside are not seen."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    pytester.makepyfile(mylib=SOFTMAX, wrong=WRONG)
    # pytest cannot rewrite what this process has imported already, and says so; a user's pytest has not
    ignored = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
    pytester.makeini(f"[pytest]\nfilterwarnings =\n    error\n    {ignored}\n")


def run(pytester: pytest.Pytester, *words: str, apart: bool = False) -> pytest.RunResult:
    """pytest in the folder; apart: in a process of its own, where only it has imported anything."""
    if apart:
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", *words, timeout=120)
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *words)


def judge(
    pytester: pytest.Pytester, target: str, *words: str, keyword: str = "", apart: bool = False
) -> pytest.RunResult:
    """The laws of softmax under pytest, from the installed package."""
    fixed = ("--veriformer-effort", "smoke", "--veriformer-dtype", "float32", "--veriformer-json", "all.json")
    chosen = ("-k", keyword) if keyword else ()
    return run(
        pytester, "--pyargs", "veriformer.properties", "--veriformer", target, *fixed, *chosen, *words, apart=apart
    )


def rows(pytester: pytest.Pytester) -> dict[str, str]:
    report = json.loads((pytester.path / "all.json").read_text())
    assert report["complete"] is True and report["schema"] == "veriformer/report/1"
    return {row["law"]: row["verdict"] for row in report["rows"]}


THREE = "(equals-the-reference and not gradient) or returns-an-array or temperature-matters"


def test_the_laws_judge_a_target_from_the_installed_package(pytester: pytest.Pytester) -> None:
    done = judge(pytester, "softmax=mylib:softmax", "--veriformer-in-process", keyword=THREE, apart=True)
    done.assert_outcomes(passed=2, skipped=1, deselected=LAWS - 3)
    done.stdout.fnmatch_lines(["veriformer: *", "mylib:softmax  numpy *", "*softmax: takes axis"])
    assert set(rows(pytester).items()) == {
        ("softmax/equals-the-reference", "pass"),
        ("softmax/returns-an-array", "pass"),
        ("softmax/temperature-matters", "not_provided"),
    }


def test_a_failing_law_shows_its_block_and_no_traceback(pytester: pytest.Pytester) -> None:
    done = judge(pytester, "softmax=wrong:softmax", keyword="equals-the-reference and not gradient")
    done.assert_outcomes(failed=1, deselected=LAWS - 1)
    text = done.stdout.str()
    assert "FAIL  softmax/equals-the-reference  wrong:softmax  float32" in text and "case shape=[1]; x=[0]" in text
    assert "Traceback" not in text and not re.search(r"\.py:\d", text)
    assert rows(pytester) == {"softmax/equals-the-reference": "fail"}


@pytest.mark.parametrize("patterns", ["test_*.py", "check_*.py", "*.py"])
def test_every_law_is_collected_once_whatever_python_files_says(pytester: pytest.Pytester, patterns: str) -> None:
    pytester.makeini(f"[pytest]\npython_files = {patterns}\n")
    done = judge(pytester, "softmax=mylib:softmax", "--veriformer-in-process", "--collect-only", "-q")
    ids = [line.rpartition("::")[2] for line in done.outlines if "::" in line]
    assert len(ids) == len(set(ids)) == LAWS and all(name.endswith("[mylib:softmax-float32]") for name in ids)


def test_the_clone_collects_the_same_laws(pytester: pytest.Pytester) -> None:
    words = ("--veriformer", f"softmax={pytester.path}/mylib.py:softmax", "--veriformer-in-process")
    more = ("--veriformer-dtype", "float32", "--collect-only", "-q", "--rootdir", str(ROOT))
    done = run(pytester, str(ROOT / "properties"), *words, *more, apart=True)
    assert sum("::" in line for line in done.outlines) == LAWS


@pytest.mark.parametrize("plugin", ["veriformer.plugin", "no:veriformer.plugin"])
def test_a_conformance_class_runs_with_and_without_the_plugin(pytester: pytest.Pytester, plugin: str) -> None:
    pytester.makepyfile(test_mine=CONFORMANCE.format(laws=QUICK))
    done = run(pytester, "-p", plugin, "test_mine.py", "-rs")
    done.assert_outcomes(passed=2, skipped=1)
    done.stdout.fnmatch_lines(["SKIPPED*not provided: needs temperature*"])


@pytest.mark.parametrize("plugin", ["veriformer.plugin", "no:veriformer.plugin"])
def test_a_conformance_class_fails_with_the_block(pytester: pytest.Pytester, plugin: str) -> None:
    text = CONFORMANCE.format(laws='["softmax/equals-the-reference"]').replace("from mylib", "from wrong")
    pytester.makepyfile(test_mine=text)
    done = run(pytester, "-p", plugin, "test_mine.py", "--tb=short")
    done.assert_outcomes(failed=1)
    block = [
        "*FAIL  softmax/equals-the-reference  wrong:softmax  float32*",
        "*case shape=[[]1]*",
        "*script .veriformer/*",
    ]
    done.stdout.fnmatch_lines(block)
    (script,) = (pytester.path / ".veriformer").glob("*.py")
    assert run_python(str(script), folder=pytester.path).returncode == 1
    (pytester.path / "wrong.py").write_text(SOFTMAX)
    assert run_python(str(script), folder=pytester.path).returncode == 0


def test_a_conformance_class_knows_expected_failures(pytester: pytest.Pytester) -> None:
    known = ', expected=[veriformer.Expected("softmax/equals-the-reference", "twice", case={"x": [0.0]})]'
    text = CONFORMANCE.format(laws='["softmax/equals-the-reference"]' + known)
    pytester.makepyfile(test_mine=text.replace("from mylib", "from wrong"), test_gone=text)
    done = run(pytester, "test_mine.py", "test_gone.py")
    done.assert_outcomes(xfailed=1, failed=1)
    done.stdout.fnmatch_lines(["*XPASS  softmax/equals-the-reference*", "*remove this entry: twice*"])


def test_a_conformance_class_of_something_unknown_is_a_usage_error() -> None:
    with pytest.raises(veriformer.UsageError, match="unknown operation 'sofmax'; nearest is 'softmax'"):
        veriformer.conformance(sofmax=softmax)
    with pytest.raises(veriformer.UsageError, match=r"Expected\('softmax/none'\): there is no such law; nearest is"):
        veriformer.conformance(softmax=softmax, expected=[veriformer.Expected("softmax/none", "a reason")])


@pytest.mark.skipif(find_spec("xdist") is None, reason="pytest-xdist is not installed")
def test_two_workers_give_the_same_verdicts(pytester: pytest.Pytester) -> None:
    words, keyword = ("softmax=wrong:softmax", "--veriformer-in-process"), f"{THREE} or sums-to-one or order-is-kept"
    judge(pytester, *words, "-p", "no:xdist", keyword=keyword)
    alone = rows(pytester)
    judge(pytester, *words, "-p", "xdist", "-n", "2", keyword=keyword, apart=True)
    assert rows(pytester) == alone and sorted(set(alone.values())) == ["fail", "not_provided", "pass"]


def test_an_empty_collection_is_exit_code_4(pytester: pytest.Pytester) -> None:
    pytester.mkdir("empty")
    assert run(pytester, "empty", "--veriformer", "softmax=mylib:softmax").ret == 4
    assert run(pytester, "empty").ret == pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--veriformer", "sofmax=mylib:softmax"], "unknown operation 'sofmax'; nearest is 'softmax'"),
        (["--veriformer", "softmax=mylib:sofmax"], "mylib has no attribute 'sofmax'; nearest is 'softmax'"),
        (["--veriformer-json", "no/such/all.json"], "all.json cannot be written"),
        (
            ["--veriformer", "softmax=mylib:softmax", "--veriformer-require", "temperature"],
            "softmax does not take temperature",
        ),
        (["--veriformer", "softmax=mylib:softmax", "--veriformer-declare", "layot=BTHD"], "unknown capability 'layot'"),
    ],
)
def test_a_wrong_option_ends_the_run_with_one_line(pytester: pytest.Pytester, words: list[str], message: str) -> None:
    done = run(pytester, "--veriformer-in-process", *words)
    text = done.stdout.str() + done.stderr.str()
    assert done.ret == pytest.ExitCode.USAGE_ERROR and message in text
    assert "Traceback" not in text and "INTERNALERROR" not in text


NEIGHBOUR = """
import pytest
def pytest_addoption(parser):
    parser.addoption("--device", default="cpu")
    parser.addoption("--impl", default="fast")
@pytest.fixture
def device(request):
    return request.config.getoption("--device")
@pytest.fixture
def case():
    return "theirs"
"""


def test_an_existing_suite_is_undisturbed(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(NEIGHBOUR)
    pytester.makepyfile(
        test_theirs="""
        import sys
        def test_device(device, case, request):
            assert (device, case, request.config.getoption("--impl")) == ("gpu", "theirs", "slow")
            assert not {"torch", "hypothesis", "numpy", "rich"} & set(sys.modules)
        """
    )
    done = run(pytester, "-p", "no:hypothesispytest", "--device", "gpu", "--impl", "slow", apart=True)
    done.assert_outcomes(passed=1)
    assert "veriformer:" not in done.stdout.str() and not (pytester.path / ".veriformer").exists()


def test_the_plugin_imports_nothing_heavy() -> None:
    heavy = ("torch", "hypothesis", "numpy", "rich", "jinja2", "veriformer.law", "veriformer.checking")
    code = f"import sys, veriformer.plugin; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_options_and_fixtures_bear_our_name(pytester: pytest.Pytester) -> None:
    text = run(pytester, "--help").stdout.str()
    ours = text.partition("laws for Transformer parts")[2].partition("\n\n")[0]
    assert ours.count("--veriformer") >= 12
    fixtures = run(pytester, "--fixtures", "-q").stdout.str()
    assert "veriformer" not in fixtures
