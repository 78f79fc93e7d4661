#!/usr/bin/env bash
# What `make demo` runs, from the root of the repository with packsvc on the PATH.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=pipelines/quickstart
out=$here/out
export HF_HUB_OFFLINE=1

say() { printf '\n== %s\n' "$*"; }
run() { printf '$ %s\n' "$*"; "$@"; }

say "A fresh start: an earlier demo's output is removed"
if [ -e $out/plan.json ]; then run packsvc clean $out --all --force; else echo "nothing there"; fi

say "Pack: real conversations in four formats become packs of 4,096 tokens, on a local Ray"
run packsvc pack $here/job.yaml

say "Validate: every invariant on every pack, then ids and masks against a second, slower encoder"
run packsvc validate $out --against-sources

say "Stats: what became of every row, by source"
run packsvc stats $out --by source

say "Show: pack 0 as a person reads it (the first 40 lines)"
run packsvc show $out --pack 0 | head -n 40

say "Train: stream the packs into a small Llama on the CPU; packed loss against the same examples alone"
run python $here/train.py

say "Done. Look further: packsvc show $out --pack 1, packsvc stats $out, packsvc --help"
