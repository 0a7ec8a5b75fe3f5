#!/bin/sh
# Installs Topoflight into PREFIX from the checkout that contains this file: the build step of both images, and of any host
# without containers.
#   install.sh PREFIX [agent|finetune] [all|packages|project]
# `packages` creates the prefix with the locked packages, and `project` adds Topoflight itself. They are two layers of an
# image, and a change of the code changes only the second one. DESTDIR puts the project's files below another root.
# PYTHON names the interpreter (3.11 or newer). The agent's prefix holds no torch.
set -eu
prefix=${1:?install.sh PREFIX [agent|finetune] [all|packages|project]}
kind=${2:-agent}
part=${3:-all}
source=$(cd "$(dirname "$0")/../.." && pwd)

lock=$kind
case $kind in
    agent) ;;
    finetune) lock=image ;;  # with what reads the hub's data sets and what QLoRA needs
    *) echo "install.sh: $kind: must be agent or finetune" >&2; exit 2 ;;
esac
case $part in
    all | packages | project) ;;
    *) echo "install.sh: $part: must be all, packages or project" >&2; exit 2 ;;
esac

# pip runs in a separate environment, so that neither pip nor the build tools of the wheel are installed into the prefix
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"${PYTHON:-python3}" -m venv "$tools"
pip() { "$tools/bin/pip" --quiet --no-cache-dir --disable-pip-version-check "$@"; }
install() { pip --python "$prefix/bin/python" install --no-warn-script-location "$@"; }

packages() {
    "${PYTHON:-python3}" -m venv --without-pip "$prefix"
    # everything by hash
    install --no-deps --require-hashes -r "$source/locks/$lock.txt"
    if [ "$kind" = finetune ]; then
        # by version only: each machine has its own file of it (locks/README.md)
        install "$(sed -n 's/.*"\(torch==[0-9.]*\)".*/\1/p' "$source/pyproject.toml")"
        return
    fi
    # Of kubernetes' 126 MB the agent imports only the client's transport and the configuration
    # (docs/decisions/0009): neither the asynchronous copy, with the packages that serve it only, nor the classes of
    # each object and API group. Only torch requires setuptools.
    pip --python "$prefix/bin/python" uninstall --yes aiohttp aiohappyeyeballs aiosignal frozenlist multidict propcache yarl
    for package in "$prefix"/lib/python*/site-packages/kubernetes; do
        rm -rf "$package/aio"
        find "$package/client/models" "$package/client/api" -type f ! -name __init__.py -delete
        find "$package" -depth -type d -empty -delete
    done
}

project() {
    pip install --no-deps --require-hashes -r "$source/locks/build.txt"
    pip wheel --no-deps --no-build-isolation --wheel-dir "$tools/wheel" "$source"
    install --no-deps ${DESTDIR:+--root "$DESTDIR"} "$tools"/wheel/*.whl
}

case $part in all | packages) packages ;; esac
case $part in all | project) project ;; esac
[ -n "${DESTDIR:-}" ] || [ "$part" = packages ] || "$prefix/bin/topoflight" --version
