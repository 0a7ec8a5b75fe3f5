"""The shape of a model by its hub id: config.json from the hub that the job will ask, or from its cache.

Surface: HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, HF_HUB_CACHE and HF_HOME as huggingface_hub reads them, and its cache's
folders; `GET {endpoint}/{id}/resolve/{revision}/config.json`. Weights are never fetched. A known name is not asked for
unless HF_ENDPOINT names a hub: what stands there under that name is what the job will load.
"""

from __future__ import annotations

import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from contracts import bounded
from contracts.plain import loads as plain
from planner.forecast.models import ModelError, hub_id, model_from_config, model_named
from planner.forecast.specs import ModelSpec

_SECONDS = 10.0
_MOST_BYTES = 1 << 20
_COMMIT = re.compile(r"[0-9a-f]{40}")


def shape_of(name: str, revision: str, environment: Mapping[str, str] = os.environ) -> ModelSpec | None:
    """The model's shape; None where the known names are to answer. Raises ModelError for a name that nobody knows."""
    if hub_id(name) != name or bounded.exists(name):
        return None
    try:
        model_named(name)
        known = True
    except ModelError:
        known = False
    if known and not environment.get("HF_ENDPOINT"):
        return None
    why = ""
    found = _cached(name, revision, environment)
    if found is None and environment.get("HF_HUB_OFFLINE", "").upper() not in ("1", "ON", "YES", "TRUE"):
        try:
            found = _fetched(name, revision, environment)
        except (OSError, ValueError) as error:
            why = f"; {_endpoint(environment)}: {error}"
    if found is not None:
        return model_from_config(found, name=name)
    if known:
        return None
    raise ModelError(f"model={name!r}: not a known name{why}; give the path of its config.json with --model")


def _endpoint(environment: Mapping[str, str]) -> str:
    return (environment.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _home(environment: Mapping[str, str]) -> Path:
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(environment.get("HF_HOME") or cache / "huggingface").expanduser()


def _cached(name: str, revision: str, environment: Mapping[str, str]) -> Any:
    cache = Path(environment.get("HF_HUB_CACHE") or _home(environment) / "hub")
    folder = cache / f"models--{name.replace('/', '--')}"
    try:
        commit = revision if _COMMIT.fullmatch(revision) else bounded.read_text(folder / "refs" / revision, 256).strip()
        return plain(bounded.read(folder / "snapshots" / commit / "config.json", _MOST_BYTES))
    except (OSError, ValueError):
        return None


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Redirects are followed; the token goes to the hub alone."""

    def redirect_request(self, req: Any, *words: Any) -> urllib.request.Request | None:
        made = super().redirect_request(req, *words)
        if made is not None and urlsplit(made.full_url)[:2] != urlsplit(req.full_url)[:2]:
            made.remove_header("Authorization")
        return made


def _fetched(name: str, revision: str, environment: Mapping[str, str]) -> Any:
    endpoint = _endpoint(environment)
    if urlsplit(endpoint).scheme not in ("http", "https"):
        raise ValueError(f"HF_ENDPOINT={endpoint!r}: must be http://HOST or https://HOST")
    request = urllib.request.Request(f"{endpoint}/{name}/resolve/{quote(revision, safe='')}/config.json")  # noqa: S310
    if token := environment.get("HF_TOKEN") or _token(environment):
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.build_opener(_SameHost).open(request, timeout=_SECONDS) as answer:
        body = answer.read(_MOST_BYTES + 1)
    if len(body) > _MOST_BYTES:
        raise ValueError("config.json is larger than 1 MiB, which none is")
    return plain(body)


def _token(environment: Mapping[str, str]) -> str:
    try:
        return bounded.read_text(environment.get("HF_TOKEN_PATH") or _home(environment) / "token", _MOST_BYTES).strip()
    except (OSError, ValueError):
        return ""
