#!/bin/sh
# Train the demo target's one-pass drafters. An interrupted run goes on where it stopped.
#
# Usage: drafters.sh WORK       (needs treegraft installed, and one core)
#
# Writes the corpus to WORK/texts, and a drafter each to WORK/dflash and WORK/heads; what a wheel carries are their
# config.json and model.safetensors, in plugins/treegraft_plugins/hf/demo_pair/. The block drafter is trained in five
# rounds, each from the weights of the one before: the rate falls at the end of each. The last has a wider feed-forward.
set -e
here=$(dirname "$0")
work=$1
python "$here/texts.py" "$work/texts"
common="--target demo:target --text $work/texts/train --held-out $work/texts/held_out --gamma 2"
dflash="$common --length 384 --num-windows 256 --num-held-out 24 --batch 4 --anchors 96 --label-temperature 0.8
    --learning-rate 0.02 --save-every 100
    --target-layer 1 --target-layer 4 --target-layer 7 --target-layer 9 --target-layer 11"
treegraft fit dflash $dflash --out "$work/dflash-first" --steps 1700 --num-continued 1536 --measure-every 750
treegraft fit dflash $dflash --out "$work/dflash-second" --start "$work/dflash-first" --steps 3500 --num-continued 2048 \
    --measure-every 500
treegraft fit dflash $dflash --out "$work/dflash-third" --start "$work/dflash-second" --steps 8000 --num-continued 2048 \
    --measure-every 500 --seed 3
treegraft fit dflash $dflash --out "$work/dflash-fourth" --start "$work/dflash-third" --steps 5000 \
    --num-windows 512 --num-continued 5120 --measure-every 500 --seed 5
test -d "$work/dflash-wide" || python "$here/widen.py" "$work/dflash-fourth" "$work/dflash-wide" 832
treegraft fit dflash $dflash --out "$work/dflash" --start "$work/dflash-wide" --steps "${DFLASH_STEPS:-7000}" \
    --num-windows 512 --num-continued 9728 --measure-every 500 --seed 7
treegraft fit heads $common --out "$work/heads" --steps "${HEADS_STEPS:-240}" --measure-every 120 --save-every 40
