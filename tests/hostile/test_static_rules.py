"""What the product's source never does: run text as code, unpickle, start a shell, trust YAML tags or foreign code.

Ruff's rules of flake8-bandit find eval, exec, pickle, shells and unsafe YAML (`make lint`); that none is excused, and
what they do not know, is held here.
"""

import ast
import json
import re
import tomllib

import pytest
import yaml
from rigs.tables import ROOT

from contracts.job_config import ConfigError, JobConfig
from contracts.yaml_text import YamlTextError, _UniqueKeyLoader, load_all
from planner.lint.documents import _Texts

ROOMS = ("agent", "planner", "collectives", "topology", "probes", "finetune", "contracts", "hardware")
SOURCES = {str(path.relative_to(ROOT)): path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))}
# exec, mktemp, pickle and its kin, eval, YAML's loaders, shells, contexts without certificates
RULES = ["S102", "S301", "S302", "S306", "S307", "S323", "S506", "S602", "S604", "S605", "S609"]
WORKER = {"agent/http/worker.py"}
RANKS = {"agent/jobs/namespaces.py"}  # forks of a verb, which send nothing back but their exit codes
PICKLES = {"collectives/traces/rank_files.py"}  # Python's reader, without what makes a pickle code
UNPICKLES = re.compile(r"(pickle|cPickle|marshal|shelve|dill|joblib|cloudpickle)$")
XML = re.compile(r"(xml\.sax|lxml)\b")  # readers that follow entities to other files
WANTED = {"trust_remote_code": False, "weights_only": True, "use_safetensors": True, "shell": False}
# Calls that flake8-bandit does not know
CALLS = {"compile", "__import__", "pty.spawn", "asyncio.create_subprocess_shell", "torch.load", "torch.save"}
NAMES = {call.rpartition(".")[2] for call in CALLS}
# Modules that may mark a text as safe: drawings and files of our own, and YAML that is quoted
MARKED = {"agent/pages.py", "agent/http/pages.py", "planner/kubernetes/manifests.py"}


def test_the_linter_holds_its_rules_and_nothing_is_excused() -> None:
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert "S" in lint["select"] and not set(RULES) & set(lint["ignore"])
    assert not [rules for place, rules in lint["per-file-ignores"].items() if not place.startswith(("tests", "bench"))
                and set(RULES) & set(rules)]  # fmt: skip
    excused = set()
    for name, path in SOURCES.items():
        said = re.findall(r"# (?:ruff: )?noqa(?::([\w, ]+))?", path.read_text(encoding="utf-8"))
        assert "" not in said, f"{name}: a noqa without a rule"
        excused |= {(name, rule) for rule in set(re.findall(r"S\d+", " ".join(said))) & set(RULES)}
    assert not excused


def test_no_object_is_unpickled_and_no_code_of_a_model_is_run() -> None:
    """The agent hands objects to its own worker alone and receives only texts and bytes; a verb to its ranks."""
    imports, piped, called, wrong = set(), set(), set(), []
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                named = [one.name for one in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                imports |= {name for one in named if UNPICKLES.match(one)}
                piped |= {name for one in named if one.startswith("multiprocessing")}
                wrong += [(name, one) for one in named if XML.match(one)]
            elif isinstance(node, ast.Call):
                wrong += [(name, ast.unparse(node)) for word in node.keywords if word.arg in WANTED
                          and getattr(word.value, "value", "computed") is not WANTED[word.arg]]  # fmt: skip
                if getattr(node.func, "id", getattr(node.func, "attr", "")) in NAMES:
                    called |= {(name, ast.unparse(node.func))}
    assert (imports, piped, wrong) == (PICKLES, WORKER | RANKS, [])
    assert not [(name, call) for name, call in called if call in CALLS]
    agents = [part for part in trees["agent/http/worker.py"].body if getattr(part, "name", "") != "main"]
    received = [node.attr for part in agents for node in ast.walk(part) if isinstance(node, ast.Attribute)]
    assert "recv_bytes" in received and "recv" not in received  # only `main`, in the worker, takes objects


def test_the_safe_loader_with_an_end_makes_plain_data_only() -> None:
    """The loaders of our own know no tag that PyYAML's safe loader does not."""
    assert _UniqueKeyLoader.yaml_constructors == _Texts.yaml_constructors == yaml.SafeLoader.yaml_constructors
    for text in ("!!python/object/apply:os.system [id]", "!!python/name:os.system"):
        for loader in (None, _Texts):
            with pytest.raises(YamlTextError):
                load_all(text, most_aliases=0, make_loader=loader)


def test_templates_escape_everything_but_our_own_markup() -> None:
    """`| safe` is nowhere in a template; Markup() in code only around what is ours or quoted."""
    templates = {path: path.read_text(encoding="utf-8") for path in (ROOT / "agent/templates").glob("*.j2")}
    assert templates
    assert not [path for path, text in templates.items() if re.search(r"\|\s*safe\b|autoescape\s+false", text)]
    makes = re.compile(r"\bMarkup\((?!\))")
    assert {name for name, path in SOURCES.items() if makes.search(path.read_text(encoding="utf-8"))} == MARKED


def test_no_file_names_a_registry_or_a_place_to_fetch_code_from() -> None:
    """Installing takes what the machine's own index gives."""
    names = (ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "deploy/images/install.sh")
    for path in (*names, *(path for path in (ROOT / "locks").iterdir() if path.is_file())):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"index-url|find-links|trusted-host|https?://|git\+", text), path


@pytest.mark.long  # imports torch
def test_weights_are_never_unpickled(tmp_path):
    """pytorch_model.bin is a pickle: a folder with nothing else has no weights.

    tests/finetune/test_finetune_hub.py and _config.py show that code of a model is not run.
    """
    from finetune.weights import source_of

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04cposix\nsystem\n(X\x05\x00\x00\x00false\x85R.")
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        source_of(JobConfig(model_name_or_path=str(tmp_path)))
    (tmp_path / "model.safetensors").write_bytes(b"\x80\x04cposix\nsystem\n(X\x05\x00\x00\x00false\x85R.")
    with pytest.raises(ConfigError, match=r"/model\.safetensors: "):
        source_of(JobConfig(model_name_or_path=str(tmp_path)))
