#!/usr/bin/env bash
# nanochat's own commands on generated documents: nanochat.sh SOURCE FOLDER [--device-type=cpu]
set -euo pipefail
python "$(dirname "$0")/nanochat_rows.py" "$2/base"
cd "$1"
shift 2
python -m scripts.tok_train --max-chars=100000 --vocab-size=512
base_train=(python -m scripts.base_train)
[[ -z "${NPROC:-}" ]] || base_train=(torchrun --standalone --nproc_per_node "$NPROC" -m scripts.base_train --)
"${base_train[@]}" --depth=2 --head-dim=32 --window-pattern=L --max-seq-len=64 --device-batch-size=2 \
  --total-batch-size=256 --eval-every=4 --eval-tokens=256 --core-metric-every=-1 --sample-every=-1 --num-iterations=8 "$@"
