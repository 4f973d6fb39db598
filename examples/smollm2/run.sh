#!/usr/bin/env bash
# From nothing to a 4-bit model that answers word problems: fetch, warm start, train, evaluate, serve, ask. Called by `make real-model`.
# bash run.sh [short] with SVAMP's files in the folder $DATA, or from the Hub.
set -euo pipefail
here=$(dirname "$0")
out=runs/smollm2

python "$here/prepare.py" $out ${DATA:+--data "$DATA"}
if [ "${1:-}" = short ]; then
    warm="--max_steps 8" train="--max_steps 4" score="--limit 20 --k 2"
else
    warm="" train="" score="--k 4"
fi
python "$here/warm_start.py" $out $warm
qarl-trl export $out/start $out/start-w4a16 --scheme W4A16 --group_size 64
accelerate launch --num_processes 1 --cpu -m qarl_trl.cli train --config "$here/qarl.yaml" $train
for model in start start-w4a16 qarl; do
    rm -rf $out/eval-$model
    qarl-trl eval $out/$model --suite $out/test.jsonl --temperature 1 --max_new_tokens 24 $score --output_dir $out/eval-$model
done
python "$here/ask.py" $out/qarl "Anna has 23 apples. She gives 7 to Tom and buys 5 more. How many apples does Anna have?"
