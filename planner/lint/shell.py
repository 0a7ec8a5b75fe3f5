"""What a shell script hands to its programs: assignments, exports, and the options of launchers that carry variables.

Specification: POSIX shell (XCU 2.2 quoting, 2.6 expansions, 2.9 commands), bash(1) arrays; csh(1) setenv; fish set;
mpirun(1) -x, Hydra -genv, srun(1) and sbatch(1) --export, docker-run(1) -e, apptainer --env.

A script is read, not run: what a program prints, an argument or the environment outside gives, is unknown.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from planner.lint.shell_words import Command, Piece, Word, commands_of, raw_text
from probes.api import Finding

_LIMIT_BLOCKS = 50  # conditions inside conditions
_LIMIT_VALUE = 1 << 16  # characters; a variable that doubles itself has no end
_LIMIT_DEPTH = 6  # scripts in quotes in scripts
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=", re.DOTALL)
_INNER = re.compile(r"\b(?:TORCH_)?NCCL_[A-Z0-9_]+=|\b(?:FI|OFI|GLOO|RCCL|UCX)_[A-Z0-9_]+=")
_DOCUMENT_VALUE = re.compile(
    r"\$\(\s*cat[ \t]*<<-?[ \t]*[\"']?(?P<end>\w+)[\"']?[^\n]*\n(?P<body>.*?)\n?[ \t]*(?P=end)\s*\)", re.DOTALL
)  # NAME=$(cat <<EOF ... EOF): a script kept in a variable
_DOTTED = re.compile(r"(?:--?[\w-]+=)?\+{0,2}(?:[\w\[\]-]+\.)+((?:TORCH_)?NCCL_[A-Z0-9_]+)=")
_SETTER = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*=")
_SHELLS = {"bash", "sh", "zsh", "dash", "ksh", "csh", "tcsh", "fish"}
_CSH = re.compile(r"^[ \t]*(?:setenv\s+\w+|set\s+\w+\s*=)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """One variable as a text sets it."""

    name: str
    value: str | None  # None: comes from elsewhere; `raw` shows from where
    raw: str
    line: int
    scope: str = ""  # "" for all that follows; else the condition or command it stands in
    exported: bool = True
    unset: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """Text of another form inside: a here-document, what echo writes into a file, JSON in an option."""

    text: str
    target: str  # the file it is written to, or the program that reads it
    line: int


@dataclass(slots=True, kw_only=True)
class Script:
    """What was read of a script."""

    assigned: list[Assigned] = field(default_factory=list)
    inner: list[Inner] = field(default_factory=list)
    used: set[str] = field(default_factory=set)  # variables that are expanded somewhere
    files: list[str] = field(default_factory=list)  # files named with --env-file and the like
    findings: list[Finding] = field(default_factory=list)  # about the text itself
    commands: int = 0  # programs that it starts or settings of the shell; 0: nothing but assignments


def read_shell(text: str, *, known: dict[str, str | None] | None = None, depth: int = 0, line: int = 1) -> Script:
    """All that a script sets. `known` are variables set before it, `line` the number of its first line."""
    reader = _Reader(known={} if known is None else dict(known), depth=depth)
    for command in commands_of(text, line):
        reader.run(command)
    return reader.script


def lines_of(script: Script) -> Script:
    """A text that holds assignments only is a list of variables, whether it says export or not."""
    if script.commands == 0:
        script.assigned[:] = [replace(each, exported=True) for each in script.assigned]
    return script


def read_words(words: list[str], line: int = 1) -> Script:
    """A command given as a list of words, as `command:` and `args:` of a manifest are."""
    reader = _Reader(known={}, depth=0)
    reader.run(Command(line, [(Piece(word, "'"),) for word in words]))
    return reader.script


def expand(text: str) -> str | None:
    """A value with `${NAME:-default}` in it (compose, envsubst), with nothing else known; None where it stays open."""
    return _Reader(known={}, depth=0).value((Piece(text, '"'),))


# -- what commands set

_EXPANSION = re.compile(
    r"\$\{(?P<braced>[^{}]*(?:\{[^{}]*\}[^{}]*)*)\}|\$(?P<plain>[A-Za-z_]\w*)|\$(?P<special>[0-9@*#?$!-])|\$\(|`"
)
_BRACED = re.compile(r"(?P<name>[A-Za-z_]\w*|\d+)(?P<index>\[[^\]]*\])?(?P<rest>.*)", re.DOTALL)
_TAKES_VALUE = {
    "-x", "-e", "--env", "-env", "--envs", "--container-env",
}  # fmt: skip
_PAIRED = {"-genv", "--genv"}  # NAME and VALUE are two words
_EXPORT_LIST = {"--export", "--env-export"}
_FILES = {"--env-file", "--export-file", "--env_file"}
_SILENT = {"echo", "printf", "cat"}
_KEYWORDS = {"then", "do", "{", "!", "time", "exec", "command", "nohup", "sudo", "else", "numactl"}


class _Reader:
    def __init__(self, known: dict[str, str | None], depth: int) -> None:
        self.values: dict[str, str | None] = known
        self.arrays: dict[str, list[Word]] = {}
        self.exported: set[str] = set()
        self.all_exported = False
        self.script = Script()
        self.depth = depth
        self.blocks: list[str] = []  # conditions around the current command
        self._piped = ""  # text that the command before writes into this one
        self._held: dict[str, Assigned] = {}  # set and not exported yet

    # expansion

    def value(self, word: Word) -> str | None:
        """The word's text; None where part of it is not known."""
        text = ""
        for piece in word:
            if piece.quote == "'":
                text += piece.text
                continue
            found = self._expand(piece.text)
            if found is None:
                return None
            text += found
        return text

    def _expand(self, text: str) -> str | None:
        found, at = "", 0
        while (match := _EXPANSION.search(text, at)) is not None:
            found += text[at : match.start()]
            at = match.end()
            name, braced = match["plain"], match["braced"]
            if match.group() == "$(" and text.startswith("$((", match.start()):
                end = text.find("))", at)
                got = self._arithmetic(text[at + 1 : end]) if end > 0 else None
                at = end + 2
            elif name:
                self.script.used.add(name)
                got = self.values.get(name)
            elif braced is not None:
                got = self._braced(braced)
            else:
                got = None
            if got is None or len(found) + len(got) > _LIMIT_VALUE:
                self._mark(text)
                return None
            found += got
        return found + text[at:]

    def _arithmetic(self, text: str) -> str | None:
        """`$((512 * 1024))`, where every name in it is a known number."""

        def put(match: re.Match[str]) -> str:
            return self.values.get(match[1]) or "?"

        filled = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", put, text).strip()
        if not re.fullmatch(r"[\d\s+*/%()<>-]{1,80}", filled):
            return None
        try:
            number = _number(ast.parse(filled.replace("/", "//"), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return None
        return None if number is None else str(number)

    def _mark(self, text: str) -> None:
        """Every variable named in a text counts as used, whether its value is known or not."""
        self.script.used.update(re.findall(r"\$\{?[!#]?([A-Za-z_]\w*)", text))

    def _braced(self, text: str) -> str | None:
        self._mark("${" + text)
        match = _BRACED.fullmatch(text)
        if match is None or match["index"]:
            return None
        got, rest = self.values.get(match["name"]), match["rest"]
        if not rest:
            return got
        sign = rest.lstrip(":")[:1]
        other = rest.lstrip(":")[1:]
        if sign in ("-", "="):
            empty = got is None or (got == "" and rest.startswith(":"))
            return self._expand(other.strip("\"'")) if empty else got
        if sign == "?":
            return got
        if sign == "+" and match["name"] in self.values:
            return self._expand(other.strip("\"'"))
        return None

    def _split(self, word: Word) -> list[tuple[str | None, Word]]:
        """The words that a word becomes: an unquoted variable may hold several, an array too."""
        if len(word) == 1:
            piece = word[0]
            array = re.fullmatch(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}", piece.text)
            if array and piece.quote != "'" and array[1] in self.arrays:
                self.script.used.add(array[1])
                return [(self.value(each), each) for each in self.arrays[array[1]]]
            if piece.quote == "" and "$" in piece.text:
                value = self.value(word)
                if value is not None and re.search(r"\s", value):
                    words = [each for command in commands_of(value, 1) for each in command.words]
                    return [("".join(p.text for p in each), tuple(Piece(p.text, "'") for p in each)) for each in words]
        return [(self.value(word), word)]

    # commands

    def run(self, command: Command) -> None:
        """One simple command."""
        piped, self._piped = self._piped, ""
        words = list(command.words)
        plain = [raw_text(word) for word in words]
        words, plain = self._keywords(words, plain)
        conditional = command.after in ("&&", "||")
        scope = "; ".join(self.blocks) or (f"after {command.after}" if conditional else "")
        prefix: list[Word] = []
        while words and (words[0][0].quote == "" and _ASSIGNMENT.match(words[0][0].text)):
            prefix.append(words.pop(0))
            plain.pop(0)
        if not words:
            for word in prefix:
                self._assign(word, command.line, scope, exported=False)
            self._document(command, "")
            return
        if prefix:
            where = f"the command of line {command.line}"
            for word in prefix:
                self._assign(word, command.line, "; ".join((*self.blocks, where)), exported=True, temporary=True)
        self._program(command, words, plain, scope, piped)

    def _keywords(self, words: list[Word], plain: list[str]) -> tuple[list[Word], list[str]]:
        """Opens and closes blocks; the words behind the keywords are left."""
        while plain:
            first = plain[0]
            if first in ("if", "elif"):
                if first == "elif" and self.blocks:
                    self.blocks.pop()
                self._open(" ".join(["if", *plain[1:8]])[:80])
                return [], []
            if first == "else" and self.blocks:
                self.blocks[-1] = "else of " + self.blocks[-1].removeprefix("else of ")
            elif first in ("fi", "esac") and self.blocks:
                self.blocks.pop()
            elif first == "case":
                self._open(" ".join(plain[:3])[:80])
                return [], []
            elif first == "for" and len(plain) > 1:
                self.values[plain[1]] = None
                return [], []
            elif first in ("while", "until", "select", "function"):
                return [], []
            elif first not in _KEYWORDS and first not in ("}", "done", "fi", "esac"):
                return words, plain
            words, plain = words[1:], plain[1:]
            while (
                plain
                and first in ("sudo", "numactl", "exec", "nohup")
                and plain[0].startswith("-")
                and "=" not in plain[0]
            ):
                words, plain = words[1:], plain[1:]
        return words, plain

    def _open(self, title: str) -> None:
        if len(self.blocks) < _LIMIT_BLOCKS:
            self.blocks.append(title)

    def _program(self, command: Command, words: list[Word], plain: list[str], scope: str, piped: str) -> None:
        program = plain[0].rsplit("/", 1)[-1]
        rest = words[1:]
        self.script.commands += 1
        if program in ("export", "declare", "typeset", "local", "readonly"):
            options = "".join(each for each in plain[1:] if each.startswith("-"))
            exported = program == "export" or "x" in options
            for word in rest:
                self._declare(word, command.line, scope, exported=exported)
        elif program == "setenv" and len(rest) >= 2:
            self._put(plain[1], self.value(rest[1]), plain[2], command.line, scope, exported=True)
        elif program == "set" and {"-x", "-gx", "-xg", "-Ux", "-xU", "-lx"} & {*plain[1:3]}:
            self._set_in_fish(rest, command.line, scope)
        elif program == "set":
            self._set(words, plain)
        elif program in ("unset", "unsetenv"):
            self._unset(plain[1:], command.line, scope)
        elif program in ("read", "getopts", "mapfile", "readarray"):
            self.values.update(dict.fromkeys(name for name in plain[1:] if _NAME.match(name)))
        elif program in _SILENT or program == "tee":
            self._written(command, program, rest, piped)
        else:
            self._options(command, words)
        if program not in _SILENT and program != "tee":
            self._document(command, program)
            if piped:
                self._handed(piped, program, command.line)

    def _set_in_fish(self, rest: list[Word], line: int, scope: str) -> None:
        named = [each for each in rest if not raw_text(each).startswith("-")]
        if named:
            values = [self.value(each) for each in named[1:]]
            value = None if None in values else " ".join(each for each in values if each is not None)
            raw = " ".join(raw_text(each) for each in named[1:])
            self._put(raw_text(named[0]), value, raw, line, scope, exported=True)

    def _set(self, words: list[Word], plain: list[str]) -> None:
        options = "".join(each for each in plain[1:] if each.startswith(("-", "+")))
        self.all_exported = "-a" in plain or "allexport" in plain or (self.all_exported and "+a" not in options)
        match = re.fullmatch(r"(\w+)=?", plain[1]) if len(plain) > 2 else None
        if match and "=" in (plain[1] + plain[2]):  # csh: set name = value
            self.values[match[1]] = self.value(words[-1])

    def _unset(self, names: list[str], line: int, scope: str) -> None:
        for name in names:
            self.values.pop(name, None)
            self.script.assigned.append(Assigned(name=name, value="", raw="", line=line, scope=scope, unset=True))

    def _declare(self, word: Word, line: int, scope: str, *, exported: bool) -> None:
        for value, piece in self._split(word) if word[0].text.startswith("$") else [(None, word)]:
            text = piece[0].text if piece else ""
            if piece and _ASSIGNMENT.match(text):
                self._assign(piece, line, scope, exported=exported)
            elif piece and exported and _NAME.match(text) and value is None:
                self._export(text, line)
            elif piece and exported and value and _NAME.match(value):
                self._export(value, line)

    def _export(self, name: str, line: int) -> None:
        self.exported.add(name)
        held = self._held.pop(name, None)
        if held is not None:
            self.script.assigned.append(
                Assigned(name=name, value=held.value, raw=held.raw, line=held.line, scope=held.scope)
            )
        elif name not in self.values:
            self.script.assigned.append(Assigned(name=name, value=None, raw=f"${name}", line=line))

    def _assign(self, word: Word, line: int, scope: str, *, exported: bool, temporary: bool = False) -> None:
        match = _ASSIGNMENT.match(word[0].text)
        if match is None:
            return
        name, tail = match[1], word[0].text[match.end() :]
        rest: Word = (*((Piece(tail, word[0].quote),) if tail else ()), *word[1:])
        if tail.startswith("(") and tail.endswith(")"):
            items = [each for command in commands_of(tail[1:-1].replace("\n", " "), line) for each in command.words]
            self.arrays[name] = [*self.arrays.get(name, []), *items] if match[2] else items
            self.values[name] = None
            self._inner_words(items, line)
            return
        document = _DOCUMENT_VALUE.fullmatch(raw_text(rest).strip())
        value = self._filled(document["body"]) if document else self.value(rest)
        if match[2]:
            before = self.values.get(name)
            value = None if value is None or before is None else before + value
        self._put(name, value, raw_text(rest), line, scope, exported=exported, temporary=temporary)

    def _put(
        self, name: str, value: str | None, raw: str, line: int, scope: str, *, exported: bool, temporary: bool = False
    ) -> None:
        if not _NAME.match(name):
            return
        for outer in ("SINGULARITYENV_", "APPTAINERENV_"):  # apptainer hands these in without the prefix
            name = name.removeprefix(outer)
        if not temporary:
            self.values[name] = value
        seen = exported or self.all_exported or name in self.exported
        if exported and not temporary:
            self.exported.add(name)
        found = Assigned(name=name, value=value, raw=raw, line=line, scope=scope, exported=seen)
        if seen:
            self._held.pop(name, None)
        else:
            self._held[name] = found
        self.script.assigned.append(found)
        text = raw if value is None else value
        options = text.lstrip().startswith("-") or not name.startswith(("NCCL_", "TORCH_NCCL_"))
        if options and _INNER.search(text):
            self._nested(text, line, scope or f"{name} of line {line}")

    def _written(self, command: Command, program: str, rest: list[Word], piped: str) -> None:
        """What echo, printf, cat and tee write into a file; on the terminal it sets nothing."""
        text = command.document
        if program in ("echo", "printf"):
            values = [self.value(word) or raw_text(word) for word in rest if raw_text(word) not in ("-e", "-n", "-E")]
            text = "\n".join(each.replace("\\n", "\n") for each in values) if program == "printf" else " ".join(values)
            text = text.replace("\\n", "\n")
        elif command.document and not command.literal:
            text = self._filled(command.document)
        target = command.to
        if program == "tee":
            text = text or piped
            target = next((raw_text(word) for word in rest if not raw_text(word).startswith("-")), "")
        if target and text:
            self.script.inner.append(Inner(text=text, target=target, line=command.line))
        elif command.piped:
            self._piped = text

    def _document(self, command: Command, program: str) -> None:
        """A here-document handed to a program: a shell, Python, kubectl, ssh."""
        if command.document:
            text = command.document if command.literal else self._filled(command.document)
            if command.to:
                self.script.inner.append(Inner(text=text, target=command.to, line=command.line))
            else:
                self._handed(text, program, command.line)

    def _handed(self, text: str, program: str, line: int) -> None:
        """Text that a program reads from its standard input."""
        if program in _SHELLS or program in ("ssh", "srun", "sbatch", "su"):
            self._nested(text, line, f"here-document of line {line}")
        else:
            target = (
                "x.py" if program.startswith("python") else "manifest.yaml" if program in ("kubectl", "oc") else program
            )
            self.script.inner.append(Inner(text=text, target=target, line=line))

    def _filled(self, text: str) -> str:
        """A here-document with the variables that are known put in."""

        def put(match: re.Match[str]) -> str:
            if match["plain"]:
                self.script.used.add(match["plain"])
                value = self.values.get(match["plain"])
            else:
                value = self._braced(match["braced"]) if match["braced"] is not None else None
            return match.group() if value is None else value

        return _EXPANSION.sub(put, text).replace("\\$", "$")

    def _options(self, command: Command, words: list[Word]) -> None:
        """Variables in the words of any program: options of launchers, `env A=1`, scripts in quotes."""
        where = "; ".join((*self.blocks, f"the command of line {command.line}"))
        split = [each for word in words for each in self._split(word)]
        texts = [raw_text(word) if value is None else value for value, word in split]
        skip = 0
        bare = texts[0].rsplit("/", 1)[-1] == "env" or texts[:3] == ["kubectl", "set", "env"]
        for index, text in enumerate(texts):
            if skip:
                skip -= 1
                continue
            value = split[index][0]
            taken = self._launcher_option(texts, split, index, command.line, where)
            if taken is not None:
                skip = taken
            elif self._is_script(texts, index):
                self._inner_text(text, command.line, where)
            elif (dotted := _DOTTED.match(text)) is not None:  # Hydra's and Helm's way to a key: env_vars.NAME=VALUE
                tail = text[dotted.end() :]
                self._pair(dotted[1], None if value is None else tail.strip("\"'"), tail, command.line, where)
            elif _SETTER.match(text) and (bare or text.startswith(("NCCL_", "TORCH_NCCL_"))):
                self._setting(text, value, command.line, where)
            elif index:
                bare = bare and text.startswith("-")
                self._inner_text(text, command.line, where)
            if index == 0 and not bare and "env" in texts[1:3] and texts[0] in ("srun", "time", "nice"):
                bare = True
            if text.rsplit("/", 1)[-1] == "env":
                bare = True

    @staticmethod
    def _is_script(texts: list[str], index: int) -> bool:
        """Whether a word is what `sh -c` and its like run."""
        return (
            index > 0
            and re.fullmatch(r"-\w*c", texts[index - 1]) is not None
            and texts[0].rsplit("/", 1)[-1] not in ("srun", "gcc")
        )

    def _launcher_option(
        self, texts: list[str], split: list[tuple[str | None, Word]], index: int, line: int, where: str
    ) -> int | None:
        """Take a launcher's option that sets variables: how many words after it belong to it, None if it is none."""
        text, value = texts[index], split[index][0]
        following = texts[index + 1] if index + 1 < len(texts) else ""
        option, equals, tail = text.partition("=")
        if text in _PAIRED or (text == "-env" and "=" not in following and index + 2 < len(texts)):
            if index + 2 >= len(texts):
                return 0
            self._pair(following, split[index + 2][0], texts[index + 2], line, where)
            return 2
        if text in _TAKES_VALUE:
            self._setting(following, split[index + 1][0] if following else None, line, where)
            return 1
        if equals and option in _TAKES_VALUE:
            self._setting(tail, None if value is None else tail, line, where)
        elif text.startswith(("-xNCCL_", "-eNCCL_")):
            self._setting(text[2:], None if value is None else text[2:], line, where)
        elif option in _EXPORT_LIST:
            self._export_list(tail if equals else following, line, where)
            return 0 if equals else 1
        elif option in _FILES:
            self.script.files.append(tail if equals else following)
        else:
            return None
        return 0

    def _setting(self, text: str, value: str | None, line: int, scope: str) -> None:
        """NAME=VALUE, several with commas between them (apptainer), or NAME alone, which hands on what is set."""
        parts = re.split(r",(?=[A-Z_][A-Z0-9_]*=)", text)
        for part in parts:
            name, equals, tail = part.partition("=")
            if equals:
                self._pair(name, None if value is None else tail, tail, line, scope)
            elif _NAME.match(name) and name in self._held:
                self.script.used.add(name)

    def _pair(self, name: str, value: str | None, raw: str, line: int, scope: str) -> None:
        if _NAME.match(name):
            self.script.assigned.append(Assigned(name=name, value=value, raw=raw, line=line, scope=scope))
            if _INNER.search(raw) and not name.startswith("NCCL_"):
                self._inner_text(raw, line, scope)

    def _export_list(self, text: str, line: int, scope: str) -> None:
        """srun --export=ALL,A=1,B=2: a comma ends a value, so a list of interfaces is cut."""
        for part in text.split(","):
            name, equals, tail = part.partition("=")
            if equals:
                self._pair(name, tail if "$" not in tail else self._expand(tail), tail, line, scope)

    def _inner_words(self, words: list[Word], line: int) -> None:
        command = Command(line, [(Piece("options", ""),), *words])
        self._options(command, command.words)

    def _inner_text(self, text: str, line: int, scope: str) -> None:
        if not _INNER.search(text) and "NCCL_" not in text:
            return
        if text.lstrip().startswith(("{", "[")) and '"' in text:
            self.script.inner.append(Inner(text=text, target="option.json", line=line))
        elif re.search(r"\s", text) or ";" in text or "=" in text:
            self._nested(text.split("=", 1)[1] if text.startswith("--") and "=" in text else text, line, scope)

    def _nested(self, text: str, line: int, scope: str) -> None:
        if self.depth >= _LIMIT_DEPTH:
            return
        if "os.environ" in text:
            self.script.inner.append(Inner(text=text, target="x.py", line=line))
            return
        inner = read_shell(text, known=self.values, depth=self.depth + 1, line=line)
        for each in inner.assigned:
            joined = "; ".join(part for part in (scope, each.scope) if part)
            self.script.assigned.append(
                Assigned(
                    name=each.name, value=each.value, raw=each.raw, line=line, scope=joined or f"line {line}",
                    exported=each.exported, unset=each.unset,
                )
            )  # fmt: skip
        self.script.inner += inner.inner
        self.script.used |= inner.used
        self.script.files += inner.files


def _number(node: ast.expr) -> int | None:
    """The value of an expression of integers; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) < 1 << 62:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _number(node.operand)
        return None if value is None else -value
    if not isinstance(node, ast.BinOp):
        return None
    left, right = _number(node.left), _number(node.right)
    if left is None or right is None:
        return None
    match node.op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.FloorDiv():
            return left // right
        case ast.Mod():
            return left % right
        case ast.LShift() if 0 <= right < 63:
            return left << right
        case ast.RShift() if 0 <= right < 63:
            return left >> right
    return None


def sbatch_directives(text: str) -> Iterator[tuple[int, str]]:
    """`#SBATCH --export=...` and the same of other schedulers: the line's number and its words."""
    for number, row in enumerate(text.splitlines(), start=1):
        match = re.match(r"\s*#(?:SBATCH|PBS|BSUB|FLUX:|\$)\s+(.*)", row)
        if match and "=" in match[1]:
            yield number, match[1].split(" #")[0]


def is_csh(text: str) -> bool:
    """Whether a script is of the C shell."""
    return bool(_CSH.search(text)) or bool(re.match(r"#!.*csh", text))
