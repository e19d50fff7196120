#!/bin/sh
# Train the demo target's one-pass drafters. An interrupted run goes on where it stopped.
#
# Usage: drafters.sh WORK       (needs treegraft installed, and one core)
#
# Writes the corpus to WORK/texts, and a drafter each to WORK/dflash and WORK/heads; what a wheel carries are their
# config.json and model.safetensors, in plugins/treegraft_plugins/hf/demo_pair/.
set -e
here=$(dirname "$0")
work=$1
python "$here/texts.py" "$work/texts"
common="--target demo:target --text $work/texts/train --held-out $work/texts/held_out --length 384 --num-windows 256
    --num-continued 1536 --num-held-out 24 --gamma 2 --label-temperature 0.8 --learning-rate 0.02"
treegraft fit dflash $common --out "$work/dflash" --steps "${DFLASH_STEPS:-4000}" --batch 4 --anchors 96 \
    --measure-every 500 --save-every 100 \
    --target-layer 1 --target-layer 4 --target-layer 7 --target-layer 9 --target-layer 11
mkdir -p "$work/heads"
cp -n "$work/dflash/text.npz" "$work/heads/"  # the same text
treegraft fit heads $common --out "$work/heads" --steps "${HEADS_STEPS:-600}" --batch 4 --anchors 96 --measure-every 200 --save-every 50
