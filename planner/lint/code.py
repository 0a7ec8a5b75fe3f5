"""Variables in files that are neither shell nor data: Dockerfile, systemd unit, Python.

Specification: Dockerfile reference (ENV in both forms, ARG, RUN), systemd.exec(5) Environment=, Python's `ast`.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator

from planner.lint.shell import Assigned, Inner, Script, read_shell, read_words

_PYTHON_SETTERS = {"setdefault", "putenv", "setenv", "set_env", "add_env", "set_environ", "__setitem__"}
_ENVIRONMENT_NAME = re.compile(r"[A-Z][A-Z0-9_]*_[A-Z0-9_]+\Z")
_ENV_FLAGS = ("-x", "-e", "--env", "-env", "-genv")  # of Open MPI, docker run, Hydra
_LINE = re.compile(
    r"""(?:environ(?:\[|\.setdefault\(|\.putenv\()|putenv\(|setenv\()\s*["'](?P<name>\w+)["']\]?\s*(?:=(?!=)|,)\s*
        (?P<value>"[^"]*"|'[^']*'|[^\s,)#]+)""",
    re.VERBOSE,
)


def read_dockerfile(text: str) -> Script:
    """ENV and what RUN, CMD and ENTRYPOINT write or set; build arguments have their defaults."""
    script = Script()
    known: dict[str, str | None] = {}
    for line, instruction, rest in _instructions(text):
        if instruction == "ARG":
            name, equals, value = rest.partition("=")
            known[name.strip()] = value.strip().strip("\"'") if equals else None
        elif instruction == "ENV":
            words = rest if re.match(r"[A-Za-z_]\w*=", rest) else "{}={}".format(*_legacy(rest))
            found = read_shell("export " + words, known=known, line=line)
            for each in found.assigned:
                known[each.name] = each.value
                script.assigned.append(each)
        elif instruction in ("CMD", "ENTRYPOINT"):
            found = _command(rest, line, known)
            script.assigned += found.assigned
            script.inner += found.inner
        elif instruction == "RUN":  # what it exports ends with its layer; what it writes stays
            script.inner += read_shell(rest, known=known, line=line).inner
        elif instruction == "COPY" and "<<" in rest:
            script.inner += read_shell("cat > " + rest.split("\n", 1)[0].split()[-1] + " " + rest, line=line).inner
    return script


def _legacy(rest: str) -> tuple[str, str]:
    """`ENV NAME all that follows`."""
    name, _, value = rest.partition(" ")
    return name, shlex.quote(value.strip().strip('"'))


def _command(rest: str, line: int, known: dict[str, str | None]) -> Script:
    if rest.startswith("["):
        try:
            words = ast.literal_eval(rest)
        except (ValueError, SyntaxError):
            words = None
        if isinstance(words, list) and all(isinstance(word, str) for word in words):
            return read_words(words, line)
    return read_shell(rest, known=known, line=line)


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Each instruction with the number of its first line; continued lines and here-documents belong to it."""
    rows = text.splitlines()
    at = 0
    while at < len(rows):
        first = at
        match = re.match(r"\s*([A-Za-z]+)\s+(.*)", rows[at])
        if match is None or rows[at].lstrip().startswith("#"):
            at += 1
            continue
        parts = [match[2]]
        while parts[-1].rstrip().endswith("\\") and at + 1 < len(rows):
            at += 1
            if rows[at].lstrip().startswith("#"):
                parts.append("\\")
                continue
            parts.append(rows[at])
        body = "\n".join(parts)
        body = re.sub(r"\\\s*\n(?:\\\n)*", " ", body).removesuffix("\\")
        end = re.search(r"<<-?\s*[\"']?(\w+)", body)
        while end and at + 1 < len(rows):
            at += 1
            body += "\n" + rows[at]
            if rows[at].strip() == end[1]:
                break
        yield first + 1, match[1].upper(), body.strip()
        at += 1


def read_systemd(text: str) -> Script:
    """Environment= of a unit: several assignments on a line, each may be quoted as a whole."""
    script = Script()
    for number, row in enumerate(text.replace("\\\n", " ").splitlines(), start=1):
        key, equals, rest = row.strip().partition("=")
        if not equals or row.lstrip().startswith(("#", ";")):
            continue
        if key == "Environment":
            try:
                words = shlex.split(rest)
            except ValueError:
                words = rest.split()
            for word in words:
                name, separator, value = word.partition("=")
                if separator:
                    script.assigned.append(Assigned(name=name, value=value, raw=value, line=number))
        elif key == "EnvironmentFile":
            script.files.append(rest.strip().lstrip("-"))
        elif key.startswith("Exec"):
            found = read_shell(rest, line=number)
            script.assigned += found.assigned
    return script


# -- Python


def read_python(text: str) -> Script:
    """Assignments to os.environ and to dictionaries of variables, and commands in strings."""
    script = Script()
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        _lines(text, script)
        return script
    try:
        _Python(script).visit(tree)
    except RecursionError:
        _lines(text, script)
    return script


def _lines(text: str, script: Script) -> None:
    """Line by line, where the text is no whole Python (another version of it, a cut piece, a notebook)."""
    for number, row in enumerate(text.splitlines(), start=1):
        bare = row.strip()
        if bare.startswith(("%env ", "%set_env ")):
            name, _, value = bare.split(None, 1)[1].replace(" ", "=", 1).partition("=")
            _add(script, name.strip(), value.strip().lstrip("="), value.strip(), number, "")
        elif bare.startswith("!"):
            script.assigned += read_shell(bare[1:], line=number).assigned
        elif not bare.startswith("#"):
            for match in _LINE.finditer(row):
                value = match["value"]
                quoted = value[:1] in "\"'"
                _add(script, match["name"], value[1:-1] if quoted or value.isdigit() else None, value, number, "")


def _add(script: Script, name: str, value: str | None, raw: str, line: int, scope: str) -> None:
    script.assigned.append(Assigned(name=name, value=value, raw=raw, line=line, scope=scope))


class _Python(ast.NodeVisitor):
    def __init__(self, script: Script) -> None:
        self.script = script
        self.constants: dict[str, str] = {}
        self.scopes: list[str] = []

    @property
    def scope(self) -> str:
        return "; ".join(self.scopes)

    def value(self, node: ast.expr) -> str | None:
        """The text an expression gives, where it is a constant."""
        if isinstance(node, ast.Constant):
            return "" if node.value is None else str(node.value)
        if isinstance(node, ast.Name):
            return self.constants.get(node.id)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "str"
            and len(node.args) == 1
        ):
            return self.value(node.args[0])
        if isinstance(node, ast.Call) and _called(node) in ("get", "getenv") and len(node.args) == 2:
            return self.value(node.args[1])  # what it is where nothing is set outside
        if isinstance(node, ast.JoinedStr):
            parts = [self.value(part.value if isinstance(part, ast.FormattedValue) else part) for part in node.values]
            return None if None in parts else "".join(part for part in parts if part is not None)
        return None

    def add(self, name_node: ast.expr, value_node: ast.expr, line: int) -> None:
        """One variable, where the name is a constant that looks like one."""
        name = self.value(name_node)
        if name is not None and _ENVIRONMENT_NAME.match(name):
            _add(self.script, name, self.value(value_node), ast.unparse(value_node)[:120], line, self.scope)

    def visit_Assign(self, node: ast.Assign) -> None:
        """`os.environ["A"] = ...`, and constants that later values name."""
        for target in node.targets:
            if isinstance(target, ast.Subscript):
                self.add(target.slice, node.value, node.lineno)
            elif isinstance(target, ast.Name):
                text = self.value(node.value)
                if text is None:
                    self.constants.pop(target.id, None)
                else:
                    self.constants[target.id] = text
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        """A dictionary of variables: `os.environ.update({...})`, `env={...}`, `env_vars={...}`."""
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None:
                self.add(key, value, key.lineno)
        self.generic_visit(node)

    def visit_List(self, node: ast.List) -> None:
        """A command's words: `["mpirun", "-x", "A=1", "-genv", "B", "2", ...]`."""
        words = [self.value(each) for each in node.elts]
        for at, flag in enumerate(words[:-1]):
            line, name, equals, value = node.elts[at + 1].lineno, *(words[at + 1] or "").partition("=")
            if flag in _ENV_FLAGS and equals and _ENVIRONMENT_NAME.match(name):
                _add(self.script, name, value, value, line, self.scope)
            elif flag in ("-genv", "-env") and at + 2 < len(words):
                self.add(node.elts[at + 1], node.elts[at + 2], line)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """`os.environ.setdefault(...)`, `os.putenv(...)`, `dict(A=...)`, `update(A=...)`."""
        if _called(node) in _PYTHON_SETTERS and len(node.args) == 2:
            self.add(node.args[0], node.args[1], node.lineno)
        for keyword in node.keywords:
            if keyword.arg and keyword.arg.startswith(("NCCL_", "TORCH_NCCL_")):
                self.add(ast.Constant(value=keyword.arg), keyword.value, node.lineno)
        pairs = {keyword.arg: keyword.value for keyword in node.keywords}
        if "name" in pairs and "value" in pairs:  # V1EnvVar(name=..., value=...)
            self.add(pairs["name"], pairs["value"], node.lineno)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        """What stands below a condition is set only where it holds."""
        test = ast.unparse(node.test)[:80]
        if "__name__" in test:
            self.generic_visit(node)
            return
        for title, body in ((f"if {test}", node.body), (f"else of if {test}", node.orelse)):
            self.scopes.append(title)
            for each in body:
                self.visit(each)
            self.scopes.pop()

    def visit_Constant(self, node: ast.Constant) -> None:
        """Commands and scripts in strings."""
        text = node.value
        if isinstance(text, str) and re.search(r"(?:export |-x |-e |--env[= ])\s*(?:TORCH_)?NCCL_\w+=", text):
            self.script.inner.append(Inner(text=text, target="string.sh", line=node.lineno))

    def visit_Expr(self, node: ast.Expr) -> None:
        """A docstring is prose."""
        if not (isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)):
            self.generic_visit(node)


def _called(node: ast.Call) -> str:
    return (
        node.func.attr
        if isinstance(node.func, ast.Attribute)
        else node.func.id
        if isinstance(node.func, ast.Name)
        else ""
    )
