"""What the product's source never does: run text as code, unpickle, start a shell, trust YAML tags or foreign code.

Ruff's rules of flake8-bandit find eval, exec, pickle, shells and unsafe YAML (`make lint`); that none is excused, and
what they do not know, is held here. And what is installed is what is locked, with hashes, and what pyproject.toml
asks for.
"""

import ast
import json
import re
from importlib import metadata

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rigs.tables import PYPROJECT, ROOT, each_row, rows_of

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
# What docstrings put between backticks that is neither a name nor a text of their function
OTHER_WORDS = {"datasets", "env", "lengths", "lost", "null", "output", "transport"}


def test_the_linter_holds_its_rules_and_nothing_is_excused() -> None:
    lint = PYPROJECT["tool"]["ruff"]["lint"]
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
    from finetune.weights import open_source

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04cposix\nsystem\n(X\x05\x00\x00\x00false\x85R.")
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        open_source(JobConfig(model_name_or_path=str(tmp_path)))
    (tmp_path / "model.safetensors").write_bytes(b"\x80\x04cposix\nsystem\n(X\x05\x00\x00\x00false\x85R.")
    with pytest.raises(ConfigError, match=r"/model\.safetensors: "):
        open_source(JobConfig(model_name_or_path=str(tmp_path)))


rows = rows_of(__file__)

LOCKS = ("agent", "finetune", "image", "dev", "build")
PROJECT = PYPROJECT["project"]


def locked(name: str) -> dict[str, Requirement]:
    """Every entry of a lock; each has at least one hash."""
    found = {}
    for entry in re.split(r"\n(?=\S)", (ROOT / f"locks/{name}.txt").read_text()):
        if entry.startswith("#"):
            continue
        head, *hashes = entry.replace("\\\n", "").split("--hash=")
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", one.strip()) for one in hashes), head
        requirement = Requirement(head.strip())
        found[canonicalize_name(requirement.name)] = requirement
    return found


def version(requirement: Requirement) -> str:
    (pin,) = requirement.specifier
    assert pin.operator == "=="
    return pin.version


def wanted_of(*extras: str) -> list[Requirement]:
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    return [made for made in map(Requirement, lines) if canonicalize_name(made.name) not in ("topoflight", "torch")]


@each_row(("name", "extras"), rows("locks"))
def test_a_lock_holds_what_pyproject_asks_for(name: str, extras: tuple[str, ...]) -> None:
    """Every dependency is there, in a version that is allowed."""
    found = locked(name)
    for wanted in wanted_of(*extras):
        entry = found.get(canonicalize_name(wanted.name))
        assert entry is not None, f"{wanted.name}: make lock"
        assert wanted.specifier.contains(version(entry), prereleases=True), f"{wanted}: locked is {entry}: make lock"


def test_the_smaller_locks_are_parts_of_the_larger() -> None:
    """One package has one version."""
    agent, finetune, image, dev, build = (locked(name) for name in LOCKS)
    for part, whole in ((agent, finetune), (finetune, image), (image, dev), (build, dev)):
        assert {name: version(entry) for name, entry in part.items()}.items() <= {
            name: version(entry) for name, entry in whole.items()
        }.items()


def test_torch_is_pinned_by_version_and_not_by_hash() -> None:
    """Its file differs by machine: pyproject.toml names the version, the Makefile takes the same."""
    (pin,) = [line for line in PROJECT["optional-dependencies"]["bench"] if line.startswith("torch==")]
    older = "torch==2.11.0"  # of gpu-older, in a separate environment
    assert set(re.findall(r"torch==\S+", (ROOT / "Makefile").read_text())) == {pin, older}
    assert not any("torch" in locked(name) for name in LOCKS)
    needs = {
        canonicalize_name(Requirement(line).name) for line in metadata.requires("torch") or () if "extra ==" not in line
    }
    pure = {name for name in needs if not name.startswith(("nvidia-", "triton"))}
    assert pure <= set(locked("finetune")), "what torch needs: locks/torch-needs.in, then make lock"


def test_what_runs_here_is_what_is_locked() -> None:
    """The environment of these tests was installed from the lock."""
    wrong = {}
    for name, entry in locked("dev").items():
        if entry.marker is not None and not entry.marker.evaluate(dict(default_environment())):
            continue
        try:
            found = metadata.version(name).removeprefix("v")  # one package writes it so
        except metadata.PackageNotFoundError:
            found = "missing"
        if found != version(entry):
            wrong[name] = (found, version(entry))
    assert wrong == {}


def test_the_licences_and_the_sbom_are_of_the_agents_lock() -> None:
    """The page of licences is what `make sbom` would write now; the SBOM names every package with a purl and a hash."""
    import sys

    sys.path.insert(0, str(ROOT / "locks"))
    import inventory

    assert inventory.table() == (ROOT / "docs/reference/licences.md").read_text(encoding="utf-8"), "make sbom"
    bom = inventory.sbom()
    made = bom["components"]
    assert len(made) > 20
    named = [one["bom-ref"] for one in made]
    assert len({*named, bom["metadata"]["component"]["bom-ref"]}) == len(named) + 1  # what its specification asks for
    assert [one["dependsOn"] for one in bom["dependencies"]] == [named]
    assert all(one["purl"].startswith("pkg:pypi/") and one["properties"] for one in made)


def test_docstrings_name_what_exists() -> None:
    """A word between backticks is a name or a text of the function or its class, or a function of the product."""
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}
    scopes = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    defined = {node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, scopes)}
    wrong = []
    for name, tree in trees.items():
        for owner in (node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef)):
            members = {node.target.id for node in owner.body
                       if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}  # fmt: skip
            for function in (node for node in owner.body if isinstance(node, scopes[:2])):
                text, rest = ast.get_docstring(function) or "", ast.unparse(ast.Module(function.body[1:], []))
                words = set(re.findall(r"\w+", f"{ast.unparse(function.args)} {rest}"))
                wrong += [f"{name}: {function.name}: `{word}`" for word in re.findall(r"`([a-z][a-z_]*)`", text)
                          if word not in words | members | defined | OTHER_WORDS]  # fmt: skip
    assert not wrong
