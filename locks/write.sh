#!/bin/sh
# Writes every lock from pyproject.toml: locks/write.sh UV [--upgrade]. Versions in the locks stay unless told otherwise.
set -eu
uv=${1:?locks/write.sh UV [--upgrade]}
shift
cd "$(dirname "$0")/.."
compile() {
    out=$1
    shift
    "$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
        --custom-compile-command "make lock" --override locks/without-torch.txt --output-file "$out" "$@"
}
compile locks/dev.txt pyproject.toml locks/torch-needs.in --extra finetune --extra dev "$@"
compile locks/image.txt pyproject.toml locks/torch-needs.in --extra finetune --extra qlora --constraint locks/dev.txt
compile locks/finetune.txt pyproject.toml locks/torch-needs.in --extra finetune --constraint locks/image.txt
compile locks/agent.txt pyproject.toml --constraint locks/finetune.txt
printf 'hatchling\neditables\n' | compile locks/build.txt - --constraint locks/dev.txt
