#!/usr/bin/env bash
# Fashion-MNIST from gzipped files to a trained network: `make demo`, or this script by itself.
#
#   DEMO_EPOCHS=N   passes over the 60,000 pictures (4: about 92 % of the test pictures are right)
#   DEMO_SEED=N     of weights and order (0)
#   DEMO_PRECISION  fp16, fp32 or bf16 (fp16)
#   DEMO_OUTPUT=DIR where everything lands (output)
#   NO_INSTALL=1    installs no package; names what is missing and stops
#
# output/ then holds data/ (TFRecords), checkpoints/, model.safetensors, report.json. Data that are
# there and sound are used again. A run that was interrupted goes on where it stopped.
set -u
cd "$(dirname "$0")/.." || exit 1

epochs=${DEMO_EPOCHS:-4}
seed=${DEMO_SEED:-0}
precision=${DEMO_PRECISION:-fp16}
build=${BUILD:-build}
output=${DEMO_OUTPUT:-output}
source=/usr/share/datasets/fashion-mnist # of the Debian package dataset-fashion-mnist
train="$output/data/train-*-of-*" test="$output/data/test-*-of-*"

say() { printf '\n== %s\n' "$*"; }

# shards NAME COUNT SOURCE: TFRecords of PNG pictures, unless they are there and every checksum fits
shards() {
    local name=$output/data/$1
    if [ -s "$name-classes.txt" ] && "$build/tfrecord" verify "$name@$2" >/dev/null 2>&1; then
        echo "$name@$2: is there already"
        return
    fi
    "$build/tfrecord" from-idx --force --classes "$output/classes.txt" \
        "$source/$3-images-idx3-ubyte.gz" "$source/$3-labels-idx1-ubyte.gz" "$name@$2"
}

make_data() {
    mkdir -p "$output/data" &&
        printf '%s\n' T-shirt/top Trouser Pullover Dress Coat Sandal Shirt Sneaker Bag \
            'Ankle boot' >"$output/classes.txt" &&
        shards train 8 train && shards test 2 t10k
}

# A finished run, or one of other settings, is not gone on with: what it left makes room.
make_room() {
    local settings="epochs $epochs, seed $seed, $precision" before
    before=$(cat "$output/settings" 2>/dev/null)
    if [ -e "$output/model.safetensors" ] || [ "$before" != "$settings" ]; then
        rm -f "$output"/checkpoints/checkpoint-*.safetensors
    fi
    rm -f "$output/model.safetensors" "$output/report.json"
    echo "$settings" >"$output/settings"
}

run_training() {
    "$build/train" --data "$train" --val-data "$test" --arch lenet \
        --precision "$precision" --epochs "$epochs" --batch-size 64 --optimizer adamw --lr 0.003 \
        --schedule onecycle --augment flip --mean 0.286 --std 0.353 --seed "$seed" \
        --print-freq 200 --checkpoint-dir "$output/checkpoints" --keep 1 \
        --report "$output/report.json" --export "$output/model.safetensors"
}

say "what is needed"
tests/setup.sh demo || exit 1
echo "compiler, libraries and pictures are there; the programs take half a minute to build"
make -s --no-print-directory ZLIB=1 "BUILD=$build" "$build/tfrecord" "$build/train" \
    "$build/predict" || exit 1

say "data: Fashion-MNIST as TFRecords"
make_data || exit 1

say "training: lenet in $precision (fp16: with FP32 masters and dynamic loss scaling)"
make_room
run_training
status=$?
if [ $status != 0 ]; then
    [ $status -lt 128 ] || echo "demo: stopped; \`make demo\` goes on from $output/checkpoints" >&2
    exit $status
fi

say "a few test pictures"
"$build/predict" --weights "$output/model.safetensors" --data "$test" --limit 4 --top 3 --draw ||
    exit 1

say "what to try next"
cat <<END
the pictures that it gets wrong:
    $build/predict --weights $output/model.safetensors --data '$test' | grep wrong
what a record holds, and every setting with what came of it:
    $build/tfrecord head $output/data/train-00000-of-00008
    cat $output/report.json
a deeper network:
    $build/train --data '$train' --val-data '$test' --arch resnet20 --epochs 5
how it works: look for >>mixed in mptrain.h
END
