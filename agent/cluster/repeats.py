"""JSON of many objects that are alike: what stands there byte for byte as before is not parsed again.

A list of NodeTopology resources has 18 KB for each node, nearly all of it the facts and the graph of a few kinds of
machine. Parsing that anew for each node takes seconds for thousands; comparing it takes none.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

REPEATED = ("fieldsV1", "gpu", "graph", "hostinfo", "interfaces", "limits", "pci", "rdma")
"""Names under which equal objects stand: parts of a NodeTopology's machine, its graph, and who wrote which field."""
MOST_KINDS = 64  # of each name; more are parsed as they come
# A quote that no backslash precedes begins or ends a string, and no string ends before a name and its colon.
_NAMED = re.compile(rf'(?<!\\)"({"|".join(REPEATED)})":[ \t\r\n]*(?=\{{)')


class Repeated(dict[str, Any]):
    """An object that several others hold; never changed."""

    __slots__ = ("key",)
    key: str  # who needs one of its content notes it here, once for all that hold it


class Repeats:
    """Parses texts that repeat one another; holds the parts that repeat for as long as it lives."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, str]] = {name: {} for name in REPEATED}  # text to the number of its object
        self._objects: list[Repeated] = []
        self._mark = f"repeated {secrets.token_hex(16)}"  # no text that came from elsewhere holds it
        self._decoder = json.JSONDecoder(object_hook=self._resolved)

    def loads(self, raw: bytes) -> Any:
        """As `json.loads`, but objects under the names of REPEATED may be shared. Raises ValueError."""
        text = raw.decode(json.detect_encoding(raw), "surrogatepass")
        kept, at = [], 0
        while found := _NAMED.search(text, at):
            kept.append(text[at : found.end()])
            at = found.end()
            known = self._known[found[1]]
            same = next((one for one in known if text.startswith(one, at)), None)  # an object's text says where it ends
            if same is None:
                if len(known) >= MOST_KINDS:
                    continue
                value, end = json.JSONDecoder().raw_decode(text, at)
                same = text[at:end]
                known[same] = f'{{"{self._mark}":{len(self._objects)}}}'
                self._objects.append(Repeated(value))
            kept.append(known[same])
            at += len(same)
        kept.append(text[at:])
        return self._decoder.decode("".join(kept))

    def _resolved(self, value: dict[str, Any]) -> dict[str, Any]:
        return self._objects[value[self._mark]] if self._mark in value else value
