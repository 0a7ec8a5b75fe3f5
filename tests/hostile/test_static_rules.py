"""What the product's source never does: run text as code, unpickle, start a shell, trust YAML tags or foreign code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rigs.tables import each_row

ROOT = Path(__file__).parent.parent.parent
ROOMS = ("agent", "planner", "collectives", "topology", "probes", "finetune")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))

ALLOWED = {
    "collectives/traces/calls.py": ["import pickle"],  # Python's reader, without what makes a pickle code
    "agent/jobs/script_rank.py": ["compile()", "exec()"],  # the user's own script
}
NAMES = {"eval", "exec", "compile", "__import__"}
MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "joblib", "cloudpickle", "xml.sax", "lxml", "telnetlib"}
PIPED = {"multiprocessing", "multiprocessing.connection"}  # which unpickle, too: between the agent and its own worker
WORKER = {"agent/http/worker.py", "agent/http/questions.py"}
CALLS = {
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput",
    "yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all", "yaml.full_load_all", "tempfile.mktemp",
    "torch.load", "torch.save", "ssl._create_unverified_context", "pty.spawn", "asyncio.create_subprocess_shell",
}  # fmt: skip
LOADERS = {"SafeLoader", "_Loader", "_Texts"}  # contracts.yaml_text: a SafeLoader with an end to merging, and its texts


def dotted(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def wrongs(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"line {node.lineno}: import {name}" for name in names if name in MODULES)
        if not isinstance(node, ast.Call):
            continue
        called = dotted(node.func)
        if (isinstance(node.func, ast.Name) and called in NAMES) or called in CALLS:
            yield f"line {node.lineno}: {called}()"
        if called.startswith("yaml.") and called.split(".")[1] in ("load", "load_all", "parse", "compose", "scan"):
            loader = next((dotted(word.value) for word in node.keywords if word.arg == "Loader"), "none")
            if loader.removeprefix("yaml.") not in LOADERS:
                yield f"line {node.lineno}: {called}() with Loader {loader}"
        for word in node.keywords:
            value = getattr(word.value, "value", "computed")
            if word.arg == "shell" and called.startswith("subprocess.") and value is not False:
                yield f"line {node.lineno}: shell={value}"
            wanted = {"trust_remote_code": False, "weights_only": True, "use_safetensors": True}
            if word.arg in wanted and value is not wanted[word.arg]:
                yield f"line {node.lineno}: {word.arg}={value}"


def test_only_the_worker_is_handed_objects() -> None:
    """And what it answers is texts and bytes: the agent receives nothing that is unpickled."""
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
    piped = {
        name for name, tree in trees.items() for node in ast.walk(tree)
        if (isinstance(node, ast.ImportFrom) and node.module in PIPED)
        or (isinstance(node, ast.Import) and PIPED.intersection(alias.name for alias in node.names))
    }  # fmt: skip
    assert piped == WORKER
    received = [node.attr for node in ast.walk(trees["agent/http/worker.py"]) if isinstance(node, ast.Attribute)]
    assert "recv_bytes" in received and "recv" not in received


@each_row("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_text_becomes_code(path: Path) -> None:
    """No eval, pickle, shell, unsafe YAML or code of a model's own, in any module."""
    found = [wrong.partition(": ")[2] for wrong in wrongs(ast.parse(path.read_text(encoding="utf-8")))]
    assert found == ALLOWED.get(str(path.relative_to(ROOT)), [])


@pytest.mark.parametrize(
    "text",
    [
        "eval(x)", "exec(x)", "import pickle", "from marshal import loads", "os.system(x)",
        "subprocess.run(x, shell=True)",
        "subprocess.run(x, shell=y)", "yaml.load(x)", "yaml.load(x, Loader=yaml.Loader)", "yaml.unsafe_load(x)",
        "torch.load(x)", "f(x, trust_remote_code=True)", "f(x, trust_remote_code=y)", "f(x, use_safetensors=False)",
    ],
)  # fmt: skip
def test_the_rule_sees_what_it_forbids(text: str) -> None:
    """Each thing that is forbidden is found where it stands."""
    assert list(wrongs(ast.parse(text)))


def test_the_safe_loader_with_an_end_makes_plain_data_only() -> None:
    """The loaders of our own know no tag that PyYAML's safe loader does not."""
    import yaml

    from contracts.yaml_text import YamlTextError, _Loader, _Texts, load_all

    assert _Loader.yaml_constructors == _Texts.yaml_constructors == yaml.SafeLoader.yaml_constructors
    for text in (
        "!!python/object/apply:os.system [id]",
        "!!python/name:os.system",
        "!!python/object/new:os.system [id]",
    ):
        for texts in (False, True):
            with pytest.raises(YamlTextError):
                load_all(text, most_aliases=0, texts=texts)


def test_templates_escape_everything_but_our_own_markup() -> None:
    """`| safe` stands nowhere in a template; Markup() in code only around files and drawings of our own."""
    for path in (ROOT / "agent/pages/templates").glob("*.j2"):
        assert not re.search(r"\|\s*safe\b|autoescape\s+false", path.read_text(encoding="utf-8")), path
    # manifests.py: for YAML, no HTML: what it quotes itself
    marked = {path.name for path in SOURCES if re.search(r"\bMarkup\((?!\))", path.read_text(encoding="utf-8"))}
    assert marked <= {"charts.py", "runs.py", "render.py", "manifests.py"}, marked


def test_no_file_names_a_registry_or_a_place_to_fetch_code_from() -> None:
    """Installing takes what the machine's own index gives."""
    for path in (
        *(path for path in (ROOT / "locks").iterdir() if path.is_file()),
        ROOT / "Makefile",
        ROOT / "pyproject.toml",
        ROOT / "deploy/images/install.sh",
    ):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"index-url|find-links|trusted-host|https?://|git\+", text), path
