"""What the resident agent consists of, from the installed metadata: a CycloneDX document and a table of licences.

Specification: CycloneDX 1.6 (JSON), Package URLs, the core metadata of Python packages. Hashes are those of the lock.
`python locks/inventory.py --sbom FILE --licences FILE`
"""

from __future__ import annotations

import argparse
import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COPYLEFT = re.compile(r"\b(A?GPL|LGPL|MPL|EPL|CDDL|EUPL)", re.IGNORECASE)


def locked(name: str) -> dict[str, list[str]]:
    """Hashes by "name==version" of a lock's entries that stand for this platform."""
    found = {}
    for entry in re.split(r"\n(?=\S)", (ROOT / f"locks/{name}.txt").read_text(encoding="utf-8")):
        match = re.match(r"([\w.-]+==[^\s;\\]+)", entry)
        if match:
            found[match[1]] = re.findall(r"sha256:([0-9a-f]{64})", entry)
    return found


def licence(name: str) -> str:
    """SPDX expression, else classifiers, else the first line of the field."""
    about = metadata.metadata(name)
    if expression := about.get("License-Expression"):
        return str(expression)
    classified = [
        str(line).split(" :: ")[-1] for line in about.get_all("Classifier") or () if "License ::" in str(line)
    ]
    stated = str(about.get("License") or "").strip().splitlines()
    return " or ".join(classified) or (stated[0][:80] if stated else "not stated")


def components() -> list[dict[str, Any]]:
    """One per package of the agent's lock that is installed here."""
    made = []
    for pin, hashes in sorted(locked("agent").items()):
        name, version = pin.split("==")
        try:
            said = licence(name)
        except metadata.PackageNotFoundError:
            continue  # of another platform
        made.append({
            "type": "library", "name": name, "version": version, "bom-ref": f"pkg:pypi/{name}@{version}",
            "purl": f"pkg:pypi/{name}@{version}", "licenses": [{"license": {"name": said}}],
            "properties": [{"name": "topoflight:sha256", "value": value} for value in hashes],
        })  # fmt: skip
    return made


def sbom() -> dict[str, Any]:
    """The CycloneDX document."""
    version = metadata.version("topoflight")
    root = {"type": "application", "name": "topoflight", "version": version, "bom-ref": f"topoflight@{version}"}
    found = components()
    return {
        "bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "metadata": {"component": root},
        "components": found,
        "dependencies": [{"ref": root["bom-ref"], "dependsOn": [one["bom-ref"] for one in found]}],
    }  # fmt: skip


_LICENCES = """\
# Licences of the resident agent's packages

By `make sbom` from the packages' metadata, for `locks/agent.txt`.
"""


def table() -> str:
    """docs/reference/licences.md."""
    rows = []
    for one in components():
        said = one["licenses"][0]["license"]["name"]
        rows.append(f"- {one['name']} {one['version']}: {said}{' (copyleft)' if COPYLEFT.search(said) else ''}")
    return "\n".join((_LICENCES, *rows)) + "\n"


def main() -> None:
    """Write both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sbom", type=Path)
    parser.add_argument("--licences", type=Path)
    options = parser.parse_args()
    for path, text in ((options.sbom, json.dumps(sbom(), indent=1) + "\n"), (options.licences, table())):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
