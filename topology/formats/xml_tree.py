"""Untrusted XML into a small tree: no document type, no entities, bounded in size, depth and number of elements.

Specification: XML 1.0; expat's handlers see declarations before anything is expanded.
"""

from __future__ import annotations

import xml.parsers.expat as expat
from dataclasses import dataclass, field

MOST_CHARACTERS = 16 * 2**20
_DEEPEST = 64  # PCIe trees nest less than ten levels
_MOST_ELEMENTS = 200_000


class TopologyXmlError(ValueError):
    """The XML is not a topology NCCL could have written, or is refused as unsafe; says in which line."""

    def __init__(self, source: str, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}")
        self.source = source
        self.line = line
        self.message = message


@dataclass(slots=True)
class Element:
    """One element, its attributes, the line it starts in and the elements below it; text is not kept."""

    tag: str
    attributes: dict[str, str]
    line: int
    children: list[Element] = field(default_factory=list)

    def named(self, *tags: str) -> list[Element]:
        """Children with one of these tags."""
        return [child for child in self.children if child.tag in tags]


def read_tree(text: str, source: str) -> Element:
    """The root element. Raises TopologyXmlError."""
    if len(text) > MOST_CHARACTERS:
        raise TopologyXmlError(source, 1, f"{len(text)} characters are more than the {MOST_CHARACTERS} that are read")
    reader = _Reader(source)
    try:
        # An encoding declaration means nothing in text that is already decoded.
        reader.parser.Parse(text.removeprefix("\ufeff").lstrip().encode("utf-8", "replace"), True)
    except expat.ExpatError as error:
        skipped = text.removeprefix("\ufeff")[: len(text) - len(text.lstrip())].count("\n")
        raise TopologyXmlError(source, error.lineno + skipped, f"no well-formed XML: {error}") from None
    if reader.root is None:
        raise TopologyXmlError(source, 1, "no element found, expected <system>")
    return reader.root


class _Reader:
    def __init__(self, source: str) -> None:
        self.source = source
        self.root: Element | None = None
        self.open: list[Element] = []
        self.count = 0
        self.parser = expat.ParserCreate(encoding="utf-8")
        self.parser.StartElementHandler = self.start
        self.parser.EndElementHandler = self.end
        self.parser.StartDoctypeDeclHandler = self.refuse
        self.parser.EntityDeclHandler = self.refuse

    def error(self, message: str) -> TopologyXmlError:
        return TopologyXmlError(self.source, self.parser.CurrentLineNumber, message)

    def refuse(self, *_arguments: object) -> None:
        raise self.error("a document type or entity declaration is refused: NCCL writes none")

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self.count += 1
        if len(self.open) >= _DEEPEST or self.count > _MOST_ELEMENTS:
            raise self.error(f"more than {_DEEPEST} levels or {_MOST_ELEMENTS} elements are refused")
        element = Element(tag=tag, attributes=attributes, line=self.parser.CurrentLineNumber)
        if self.open:
            self.open[-1].children.append(element)
        else:
            self.root = element
        self.open.append(element)

    def end(self, _tag: str) -> None:
        self.open.pop()
