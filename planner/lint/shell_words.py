"""Words and simple commands of a shell script, with their quotes: what a shell does before it expands anything.

Specification: POSIX shell (XCU 2.2 quoting, 2.3 tokens, 2.7 redirection, 2.7.4 here-documents); bash(1) arrays.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_LIMIT_COMMANDS = 100_000
_DOCUMENT = re.compile(r"<<-?[ \t]*[\"']?(\w+)[\"']?[^\n<]*\n")
_OPERATORS = ("&&", "||", ";;", ";", "|&", "|", "&", "(", ")", "\n")


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a word under one kind of quote."""

    text: str
    quote: str  # "", "'" or '"'


Word = tuple[Piece, ...]


@dataclass(slots=True)
class Command:
    """One simple command and what joins it to its neighbours."""

    line: int
    words: list[Word]
    after: str = ""  # the operator before it: "&&" and "||" make it conditional
    to: str = ""  # file its output is written to
    piped: bool = False  # its output goes into the next command
    document: str = ""  # here-document
    literal: bool = False  # the here-document's word was quoted: nothing is expanded


class _Lexer:
    def __init__(self, text: str, line: int) -> None:
        self.text, self.at, self.line = text, 0, line
        self.documents: list[tuple[Command, str, bool, bool]] = []  # command, end word, strip tabs, literal

    def peek(self, text: str) -> bool:
        return self.text.startswith(text, self.at)


def commands_of(text: str, first_line: int) -> Iterator[Command]:
    """Simple commands in order, with what joins them; keywords are words like others."""
    waiting: list[Command] = []  # a here-document comes with the next line, also for a command before a pipe
    for command, whole in _in_order(text, first_line):
        waiting.append(command)
        if whole:
            yield from waiting
            waiting.clear()
    yield from waiting


def _in_order(text: str, first_line: int) -> Iterator[tuple[Command, bool]]:
    """The commands as they begin, and whether all here-documents up to there have been read."""
    lexer = _Lexer(text.replace("\r\n", "\n"), first_line)
    current = Command(lexer.line, [])
    count = 0
    while lexer.at < len(lexer.text):
        operator = next((each for each in _OPERATORS if lexer.peek(each)), None)
        char = lexer.text[lexer.at]
        if operator is not None:
            ended, current = _operator(lexer, operator, current)
            if ended is not None:
                yield ended, not lexer.documents
                count += 1
                if count > _LIMIT_COMMANDS:
                    return
            if operator == "\n":
                lexer.line += 1
            if not current.words:
                current.line = lexer.line
        elif lexer.peek("\\\n"):
            lexer.at += 2
            lexer.line += 1
        elif char in " \t\r":
            lexer.at += 1
        elif char == "#":
            end = lexer.text.find("\n", lexer.at)
            lexer.at = len(lexer.text) if end < 0 else end
        elif lexer.peek("<<<"):
            lexer.at += 3
        elif lexer.peek("<<"):
            _open_document(lexer, current)
        elif char in "<>" or (char.isdigit() and re.match(r"\d[<>]", lexer.text[lexer.at : lexer.at + 2])):
            _redirection(lexer, current)
        else:
            word = _word(lexer)
            if word:
                current.words.append(word)
    if current.words or current.document:
        yield current, True


def _operator(lexer: _Lexer, operator: str, current: Command) -> tuple[Command | None, Command]:
    """The command that ends with the operator, if one does, and the one that goes on after it."""
    lexer.at += len(operator)
    current.piped = operator in ("|", "|&")
    ended = current if current.words or current.document else None
    if ended is not None:
        current = Command(lexer.line, [], after=operator)
    elif operator != "\n":
        current.after = operator
    if operator == "\n":
        _documents(lexer)
    return ended, current


def _redirection(lexer: _Lexer, command: Command) -> None:
    match = re.compile(r"\d?(>>|>\||>&|<&|<>|>|<|)").match(lexer.text, lexer.at)
    if match is None or not match.group():
        lexer.at += 1
        return
    lexer.at = match.end()
    while lexer.at < len(lexer.text) and lexer.text[lexer.at] in " \t":
        lexer.at += 1
    if lexer.peek("(") or lexer.at >= len(lexer.text) or lexer.text[lexer.at] in "\n;|&)":
        return
    target = "".join(piece.text for piece in _word(lexer))
    if match.group(1) in (">", ">>", ">|"):
        command.to = target


def _open_document(lexer: _Lexer, command: Command) -> None:
    lexer.at += 2
    tabs = lexer.peek("-")
    lexer.at += tabs
    while lexer.at < len(lexer.text) and lexer.text[lexer.at] in " \t":
        lexer.at += 1
    if lexer.at >= len(lexer.text) or lexer.text[lexer.at] in "\n;|&()<>":
        return
    word = _word(lexer)
    end = "".join(piece.text for piece in word)
    lexer.documents.append((command, end, tabs, any(piece.quote for piece in word)))


def _documents(lexer: _Lexer) -> None:
    """The here-documents that begin at the next line."""
    for command, end, tabs, literal in lexer.documents:
        lines = []
        while lexer.at < len(lexer.text):
            stop = lexer.text.find("\n", lexer.at)
            stop = len(lexer.text) if stop < 0 else stop
            row = lexer.text[lexer.at : stop]
            lexer.at = stop + 1
            lexer.line += 1
            if (row.lstrip("\t") if tabs else row) == end:
                break
            lines.append(row.lstrip("\t") if tabs else row)
        command.document, command.literal = "\n".join(lines), literal
    lexer.documents.clear()


def _word(lexer: _Lexer) -> Word:
    pieces: list[Piece] = []
    plain = ""
    text = lexer.text
    start = lexer.at
    while lexer.at < len(text):
        char = text[lexer.at]
        if lexer.peek("\\\n"):
            lexer.at += 2
            lexer.line += 1
        elif char == "\\":
            pieces += [Piece(plain, ""), Piece(text[lexer.at + 1 : lexer.at + 2], "'")]
            plain = ""
            lexer.at += 2
        elif char in "'\"" or lexer.peek("$'") or lexer.peek('$"'):
            pieces.append(Piece(plain, ""))
            plain = ""
            lexer.at += char == "$"
            quote = text[lexer.at]
            inside = _quoted(lexer, quote)
            pieces.append(Piece(inside, quote))
        elif char == "$" or char == "`":
            plain += _dollar(lexer)
        elif char == "(" and plain.endswith("=") and not any(piece.quote for piece in pieces):
            plain += _balanced(lexer, "(", ")")  # an array: NAME=(one two)
        elif char in " \t\r\n;|&()<>":
            break
        else:
            plain += char
            lexer.at += 1
    if lexer.at == start:
        lexer.at += 1
    if plain:
        pieces.append(Piece(plain, ""))
    return tuple(piece for piece in pieces if piece.text or piece.quote)


def _quoted(lexer: _Lexer, quote: str) -> str:
    lexer.at += 1
    found = ""
    text = lexer.text
    while lexer.at < len(text) and text[lexer.at] != quote:
        char = text[lexer.at]
        if quote == '"' and lexer.peek("\\\n"):
            lexer.at += 2
            lexer.line += 1
            continue
        if quote == '"' and char == "\\" and text[lexer.at + 1 : lexer.at + 2] in ('"', "\\", "`"):
            found += text[lexer.at + 1]
            lexer.at += 2
            continue
        if quote == '"' and char == "$" and lexer.peek("$("):
            found += _dollar(lexer)
            continue
        lexer.line += char == "\n"
        found += char
        lexer.at += 1
    lexer.at += 1
    return found


def _dollar(lexer: _Lexer) -> str:
    """`$NAME`, `${...}`, `$(...)` or `...` as they stand."""
    text = lexer.text
    if lexer.peek("$("):
        lexer.at += 1
        return "$" + _balanced(lexer, "(", ")")
    if lexer.peek("${"):
        lexer.at += 1
        return "$" + _balanced(lexer, "{", "}")
    if lexer.peek("`"):
        end = text.find("`", lexer.at + 1)
        end = len(text) if end < 0 else end + 1
        found = text[lexer.at : end]
        lexer.line += found.count("\n")
        lexer.at = end
        return found
    lexer.at += 1
    return "$"


def _balanced(lexer: _Lexer, opening: str, closing: str) -> str:
    depth, start, quote = 0, lexer.at, ""
    arithmetic = lexer.peek("((")  # where << shifts
    text = lexer.text
    while lexer.at < len(text):
        char = text[lexer.at]
        document = None if quote or arithmetic else _DOCUMENT.match(text, lexer.at)
        if document is not None:  # whatever stands in it closes nothing
            end = re.compile(rf"^[ \t]*{document[1]}[ \t]*$", re.MULTILINE).search(text, document.end())
            stop = len(text) if end is None else end.end()
            lexer.line += text.count("\n", lexer.at, stop)
            lexer.at = stop
            continue
        lexer.line += char == "\n"
        lexer.at += 1
        if char == "\\":
            lexer.at += 1
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == opening:
            depth += 1
        elif char == closing:
            depth -= 1
            if depth == 0:
                break
    return text[start : lexer.at]


def raw_text(word: Word) -> str:
    """The word as it stands, without its quotes."""
    return "".join(piece.text for piece in word)
