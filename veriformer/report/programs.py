"""Scripts of failures of programs (`veriformer.external`): they start the program and speak with it by themselves."""

from __future__ import annotations

import os

from veriformer.external import PREFIX, VJP, command_words
from veriformer.operations import OPERATIONS
from veriformer.subject import Implementation

SPEAKING = '''
COMMAND, FOLDER, RUNNING = {words!r}, tempfile.mkdtemp(), []


def program():
    if not RUNNING:  # it hangs no longer than this script
        pipes = {{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}}
        alarm = lambda: signal.alarm({patience})
        RUNNING.append(subprocess.Popen(COMMAND, cwd={folder!r}, preexec_fn=alarm, **pipes))
    return RUNNING[0]


def parts(value, name):
    if isinstance(value, (dict, list)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {{key: part for word, one in pairs for key, part in parts(one, f"{{name}}.{{word}}").items()}}
    return {{name: value}}


def ask(name, given):
    """The arrays that the program answers with, by name."""
    given = {{key: part for word, value in given.items() for key, part in parts(value, word).items()}}
    arrays = {{key: np.array(value) for key, value in given.items() if isinstance(value, np.ndarray)}}
    words = {{key: value for key, value in given.items() if key not in arrays}}
    words = {{key: str(w) if isinstance(w, float) and not math.isfinite(w) else w for key, w in words.items()}}
    kind = next((array.dtype for array in arrays.values() if array.dtype.kind not in "biu"), np.dtype("float32"))
    bits = {{key: array.view(np.uint16) for key, array in arrays.items() if array.dtype.name == "bfloat16"}}
    np.savez(FOLDER + "/in.npz", **(arrays | bits))
    files = {{"arrays": FOLDER + "/in.npz", "results": FOLDER + "/out.npz"}}
    program().stdin.write(json.dumps({{"call": name, "dtype": kind.name, "keywords": words, **files}}) + "\\n")
    program().stdin.flush()
    line = program().stdout.readline()
    if not line:
        print("the program ended:", program().wait())
        sys.exit(1)
    if not json.loads(line).get("ok"):
        raise RuntimeError(line)
    with np.load(FOLDER + "/out.npz") as found:
        found = dict(found)
    return {{key: r.view(kind) if bits and r.dtype == np.uint16 else r for key, r in found.items()}}


def nested(flat):
    """Nested dicts of dotted names."""
    tree = {{}}
    for name, value in flat.items():
        level, *words = tree, *(int(word) if word.isdigit() else word for word in name.split("."))
        for word in words[:-1]:
            level = level.setdefault(word, {{}})
        level[words[-1]] = value
    return tree


def called(name, places, results, several):
    """A function that has the program make the call."""

    def function(*positional, **keywords):
        positional = [list(one) if isinstance(one, tuple) else one for one in positional]
        found = ask(name, {{**dict(zip(places, positional)), **keywords}})
        if not results:
            return tuple(nested(found).get(place) for place in places[1:])
        named = [result for result in results if result in found]
        found = [found[result] for result in named] if len(named) == len(results) else list(found.values())
        return found if several else found[0]

    return function

'''


def speaking_lines(implementation: Implementation, patience: int) -> list[str]:
    """Lines that say how the program is asked, none where the implementation is no program."""
    commands = {where for where, _ in implementation.description.places.values() if where.startswith(PREFIX)}
    if not commands:
        return []
    words = command_words(commands.pop().removeprefix(PREFIX))
    imports = ["import json", "import subprocess", "import tempfile"]
    return [*imports, *SPEAKING.format(words=words, folder=os.getcwd(), patience=patience).splitlines()]


def called_line(name: str) -> str:
    """The line that binds an operation's name, or that of its gradients, to a function which asks the program."""
    table = OPERATIONS[name.removesuffix(VJP)]
    places = [*(["cotangent"] if name.endswith(VJP) else []), *table.positional]
    if name.endswith(VJP):
        return f"{name} = called({name!r}, {[*places, *table.options]!r}, [], True)"
    return f"{name} = called({name!r}, {places!r}, {list(table.results)!r}, {table.several})"
