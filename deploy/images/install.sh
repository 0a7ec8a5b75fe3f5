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
    agent) wanted=$source ;;
    finetune) wanted="$source[finetune]" ;;
    *) echo "install.sh: $kind: must be agent or finetune" >&2; exit 2 ;;
esac
"$python" -m venv "$prefix"
"$prefix/bin/pip" install --quiet --no-cache-dir --disable-pip-version-check \
    --constraint "$source/constraints.txt" "$wanted"
# what the running product never needs
"$prefix/bin/pip" uninstall --quiet --yes pip
"$prefix/bin/topoflight" --version
