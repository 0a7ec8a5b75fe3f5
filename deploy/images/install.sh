#!/bin/sh
# Installs Topoflight into PREFIX from the checkout this file lies in: the one build step of both images, and of any
# host without containers.
#   install.sh PREFIX [agent|finetune]
# PYTHON names the interpreter (3.11 or newer). The agent's prefix holds no torch.
set -eu
prefix=${1:?install.sh PREFIX [agent|finetune]}
kind=${2:-agent}
source=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}

case $kind in
    agent | finetune) ;;
    *) echo "install.sh: $kind: must be agent or finetune" >&2; exit 2 ;;
esac
"$python" -m venv "$prefix"
install() { "$prefix/bin/pip" install --quiet --no-cache-dir --disable-pip-version-check "$@"; }
# everything by hash; what builds the wheel lies in a folder of its own and never comes into the prefix
install --no-deps --require-hashes -r "$source/locks/$kind.txt"
if [ "$kind" = finetune ]; then
    # by version only: each machine has its own file of it (locks/README.md)
    install "$(sed -n 's/.*"\(torch==[0-9.]*\)".*/\1/p' "$source/pyproject.toml")"
fi
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
install --no-deps --require-hashes --target "$tools" -r "$source/locks/build.txt"
PYTHONPATH=$tools install --no-deps --no-build-isolation "$source"
# what the running product never needs; older interpreters put setuptools into each venv, torch alone asks for it
case $kind in agent) spare="setuptools wheel pip" ;; *) spare=pip ;; esac
for name in $spare; do
    # an absent one is a warning to pip, and no error
    "$prefix/bin/python" -m pip uninstall --quiet --yes --disable-pip-version-check "$name" 2>/dev/null
done
"$prefix/bin/topoflight" --version
