#!/usr/bin/env bash
# Reads exports back by the code of the projects they are for, each in an environment of its own under .venv-peers.
#   bash benchmarks/peers.sh [olmo|torchtune|megatron|axolotl|unsloth]...        # default: all of them
# One line for each: passed, failed, or not installable here. Exit 1 when one failed. No GPU is needed.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
TORCH=${TORCH:-torch==2.13.0}
FOLDER=${PEERS:-.venv-peers}
export PIP_DISABLE_PIP_VERSION_CHECK=1

packages() { # what to install for a project, on top of packsvc
    case $1 in
        olmo) echo ai2-olmo-core google-cloud-storage ;;
        # The last torchao that torchtune 0.6.1 can be imported with.
        torchtune) echo torchtune torchao==0.9.0 ;;
        # Only its dataset is used (tests/export/megatron_loader.py): what it depends on needs CUDA to build.
        megatron) echo --no-deps megatron-core megatron-bridge ;;
        # Only its loader and collator are used: what it pins does not go together with a CPU build of PyTorch.
        axolotl) echo --no-deps axolotl peft colorama posthog distro backoff numba llvmlite addict trl accelerate psutil safetensors ;;
        # Only its part about packing is used: the package refuses to be imported without a GPU.
        unsloth) echo --no-deps unsloth trl accelerate psutil safetensors ;;
        *) echo "no such project: $1" >&2; return 2 ;;
    esac
}

failed=0
for name in "${@:-olmo torchtune megatron axolotl unsloth}"; do
    for project in $name; do
        wanted=$(packages "$project")
        bin=$FOLDER/$project/bin
        log=$FOLDER/$project.log
        mkdir -p "$FOLDER"
        test -x "$bin/python" || "$PYTHON" -m venv "$FOLDER/$project"
        # shellcheck disable=SC2086
        if ! { "$bin/pip" install -q "$TORCH" && "$bin/pip" install -q -e ".[torch]" datasets pytest pytest-timeout hypothesis \
            && "$bin/pip" install -q $wanted; } >"$log" 2>&1; then
            echo "$project: not installable here, see $log"
            continue
        fi
        if "$bin/python" -m pytest -p no:cacheprovider tests/export/test_peers.py -k "$project" >"$log" 2>&1; then
            echo "$project: $(tail -1 "$log")"
        else
            echo "$project: FAILED, see $log"
            failed=1
        fi
    done
done
exit $failed
