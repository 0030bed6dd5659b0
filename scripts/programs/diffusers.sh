#!/usr/bin/env bash
# diffusers' LoRA script on a tiny model: diffusers.sh SOURCE FOLDER [option of accelerate launch]
set -euo pipefail
python "$(dirname "$0")/diffusers_rows.py" make "$2"
accelerate launch --num_processes 1 ${3:+"$3"} "$1/examples/text_to_image/train_text_to_image_lora.py" \
  --pretrained_model_name_or_path "$2/model" --train_data_dir "$2/images" --resolution 64 --train_batch_size 4 \
  --max_train_steps 6 --learning_rate 1e-3 --rank 4 --seed 1 --output_dir "$2/out" --report_to tensorboard
python "$(dirname "$0")/diffusers_rows.py" losses "$2/out"
