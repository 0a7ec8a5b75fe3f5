"""Definitions of other projects' kinds, from the corpus: what their API servers would refuse or drop of an object."""

from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """A structural CRD schema as JSON schema that refuses what the API server would prune."""
    made = {k: v for k, v in schema.items() if not k.startswith("x-kubernetes") and k not in ("format", "nullable")}
    if "(?i)" in str(made.get("pattern")):
        del made["pattern"]  # Go's regular expression, not JavaScript's
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if schema.get("x-kubernetes-embedded-resource") or schema.get("x-kubernetes-preserve-unknown-fields"):
        made.pop("properties", None)
        return {"type": made["type"]} if "type" in made else {}
    if "properties" in made:
        made["properties"] = {k: strict(v) for k, v in made["properties"].items()}
        made["additionalProperties"] = False
    elif isinstance(made.get("additionalProperties"), dict):
        made["additionalProperties"] = strict(made["additionalProperties"])
    if "items" in made:
        made["items"] = strict(made["items"])
    return made


def without_required(schema: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in schema.items() if k != "required"}


@cache
def definition(corpus: Path, api_version: str, kind: str) -> Any:
    """The strict schema of a kind; AssertionError where the corpus holds no definition of it."""
    group, version = api_version.split("/")
    files = [path for path in (corpus / "crds").glob(f"{group}_*.yaml")
             if kind.lower()[:-1] in path.name.replace("-", "")]  # fmt: skip
    held = [one for path in files for one in yaml.load_all(path.read_text(), Loader=LOADER)
            if one["spec"]["names"]["kind"] == kind]  # fmt: skip
    assert held, f"no definition of {kind} of {api_version}"
    return of_version(next(one for one in held[0]["spec"]["versions"] if one["name"] == version), kind)


def of_version(version: dict[str, Any], kind: str) -> dict[str, Any]:
    """The strict schema of a version in a CRD."""
    schema = version["schema"]["openAPIV3Schema"]
    schema["properties"].update(apiVersion={"type": "string"}, kind={"type": "string"}, metadata={"type": "object"})
    made = without_required(strict(schema))
    if kind == "ClusterPolicy":  # a patch: the operator's own fields are required of the whole only
        made["properties"]["spec"] = without_required(made["properties"]["spec"])
    return made


def validate(corpus: Path, document: dict[str, Any]) -> None:
    """Raise where the object has a field that its API would drop, or a value that it would refuse."""
    jsonschema.validate(document, definition(corpus, document["apiVersion"], document["kind"]))
