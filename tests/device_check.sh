#!/usr/bin/env bash
# All that only a GPU can tell, on the GPU of this machine, in eight minutes at most: do the kernels
# compute what they should there, does training on it equal training on the CPU, and how fast is it?
#
#   tests/device_check.sh             runs it: `make device-check`
#   tests/device_check.sh --dry-run   shows what would run, and for how long at most
#   tests/device_check.sh --on-cpu    the same programs in miniature on the CPU runner: a test of
#                                     this script
#
# One line a part: "ok ...", "FAIL ...", "SKIP ...: why"; exit 1 if one failed. The numbers land in
# build/device-check.json, what was printed in build/device-check.txt. docs/device-results.md tells
# what to do with them.
set -u
cd "$(dirname "$0")/.." || exit 1
. tests/checks.sh

mode=${1:---run}
cuda_home=${CUDA_HOME:-/usr/local/cuda}
total_seconds=480
out=build/device
results=build/device-check
work=$(mktemp -d "${TMPDIR:-/tmp}/mptrain-device.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT

# record RESULT NAME SECONDS TEXT: the line of one part, and its row of the report
record() {
    local text
    text=$(tr '\t\n' '  ' <<<"$4" | sed 's/ *$//')
    case $1 in
    ok) echo "ok device: $2 ($3 s)${text:+: $text}" ;;
    *) echo "$1 device: $2: $text" ;;
    esac
    printf '%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "$text" >>"$work/parts"
}

# part NAME SECONDS COMMAND...: one part, stopped after so many seconds or when all are over. Its
# output goes to DIR/NAME.log; the last line of it to the report. Status 0: it ran and succeeded.
part() {
    local name=$1 limit=$2 left=$((total_seconds - SECONDS)) begun=$SECONDS log status
    shift 2
    log=$out/${name// /-}.log
    if [ "$mode" = --dry-run ]; then
        echo "$name, at most $limit s: $*"
        return 0
    fi
    if [ "$left" -lt 5 ]; then
        record SKIP "$name" 0 "the $total_seconds seconds are over"
        return 1
    fi
    timeout -k 5 $((limit < left ? limit : left)) "$@" >"$log" 2>&1 </dev/null
    status=$?
    case $status in
    0) record ok "$name" $((SECONDS - begun)) "$(tail -n 1 "$log")" ;;
    124 | 137) record FAIL "$name" $((SECONDS - begun)) "stopped after $((SECONDS - begun)) s" ;;
    *)
        grep '^FAIL ' "$log" | head -n 20
        record FAIL "$name" $((SECONDS - begun)) "status $status: $(tail -n 1 "$log")"
        ;;
    esac
    return $status
}

# ---- the device and its programs -----------------------------------------------------------------

# ask FIELD: what nvidia-smi says of the first GPU
ask() { nvidia-smi --id=0 --query-gpu="$1" --format=csv,noheader 2>/dev/null | head -n 1; }

find_device() {
    device=$(ask name) driver=$(ask driver_version) capability=$(ask compute_cap | tr -d .)
    [ "$mode" != --on-cpu ] || device="the CPU runner" driver=none capability=80
    if [ "$mode" = --dry-run ]; then
        device=${device:-none}
    elif [ -z "$device" ]; then
        echo "SKIP device: no GPU here: nvidia-smi $(command -v nvidia-smi >/dev/null &&
            echo 'names none' || echo 'is not there')"
        return 1
    elif [ "$mode" = --run ] && [ ! -x "$cuda_home/bin/nvcc" ]; then
        echo "SKIP device: no nvcc in $cuda_home/bin"
        return 1
    fi
    commit=$(git describe --always --dirty 2>/dev/null || echo unknown)
    printf '%s\t%s\t%s\n' "$commit" "$device" "$driver" >"$work/parts"
    echo "# $device, driver $driver, commit $commit"
}

# The architecture at hand alone, if this nvcc knows it: building for all takes longer than we have.
choose_archs() {
    "$cuda_home/bin/nvcc" --list-gpu-arch 2>/dev/null | grep -qx "compute_$capability" &&
        echo "CUDA_ARCHS=$capability"
}

build() {
    local arch programs=() test
    tests=()
    for test in tests/cuda/test_*.c; do
        [ -e "$test" ] && tests+=("$(basename "$test" .c)")
    done
    if [ "$mode" = --on-cpu ]; then
        bin=build/cuda_on_cpu/sm_80
        for test in "${tests[@]}" bench_device train; do programs+=("$bin/$test"); done
        part build 300 make -j2 build/train build/tfrecord "${programs[@]}"
        return
    fi
    bin=$out/cuda
    arch=$(choose_archs)
    for test in "${tests[@]}" bench_device; do programs+=("$bin/$test"); done
    part build 170 make -j"$(nproc)" "BUILD=$out" "CUDA_HOME=$cuda_home" ${arch:+"$arch"} \
        "$out/train" "$out/tfrecord" "$out/train-cuda" "${programs[@]}"
}

# ---- is it right? --------------------------------------------------------------------------------

run_tests() {
    local test
    for test in "${tests[@]}"; do
        part "$test" 60 "$bin/$test"
    done
}

# train NAME NETWORK RATE PROGRAM OPTIONS...: five steps, one JSON object a line in NAME.steps
train() {
    local name=$1 network=$2 rate=$3
    shift 3
    timeout 60 "$@" --data "$work/data/train@1" --arch "$network" --batch-size 20 --image-size 32 \
        --augment none --epochs 3 --steps 5 --lr "$rate" --seed 1 --workers 1 --log-format json \
        --print-freq 1 --report "$work/$name.json" >"$work/$name.steps"
}

# compare NETWORK RATE PRECISION TOLERANCE: the CPU's losses against the GPU's
compare() {
    local cpu=build/train gpu=$bin/train
    [ "$mode" = --on-cpu ] || cpu=$out/train gpu=$out/train-cuda
    train "cpu-$1-$3" "$1" "$2" "$cpu" --precision "$3" --device cpu &&
        train "gpu-$1-$3" "$1" "$2" "$gpu" --precision "$3" --device cuda &&
        python3 tests/device_report.py parity "$work/cpu-$1-$3.steps" "$work/gpu-$1-$3.steps" "$4"
}

repeat() {
    local gpu=$bin/train
    [ "$mode" = --on-cpu ] || gpu=$out/train-cuda
    train again lenet 0.05 "$gpu" --precision fp16 --device cuda &&
        python3 tests/device_report.py same "$work/gpu-lenet-fp16.json" "$work/again.json"
}

# Tolerances are ten times what the CPU's own losses change by: in FP32 when pictures change by a
# millionth (lenet 3e-6, resnet20 2e-4: batch norm of 20 pictures lets differences grow), in FP16
# when FP32 takes its place (4e-4, 5e-4). lenet's loss falls to a sixtieth in these steps, so that a
# gradient that is a little wrong shows.
run_parity() {
    local tfrecord=build/tfrecord
    [ "$mode" = --on-cpu ] || tfrecord=$out/tfrecord
    if [ "$mode" != --dry-run ]; then
        mkdir -p "$work/data"
        python3 tests/device_report.py pictures "$work/pictures" &&
            "$tfrecord" from-folder "$work/pictures" "$work/data/train@1" >"$out/data.log" 2>&1
    fi
    export -f train compare repeat
    export work out bin mode
    part "lenet in fp32" 60 bash -c 'compare lenet 0.05 fp32 5e-5'
    part "lenet in fp16" 60 bash -c 'compare lenet 0.05 fp16 4e-3'
    part "the same bits again" 30 bash -c repeat
    [ "$mode" != --on-cpu ] || return # too slow for it; `make emulate` has resnet20
    part "resnet20 in fp32" 60 bash -c 'compare resnet20 0.001 fp32 2e-3'
    part "resnet20 in fp16" 60 bash -c 'compare resnet20 0.001 fp16 5e-3'
}

# ---- how fast is it? -----------------------------------------------------------------------------

run_bench() {
    local smoke=()
    [ "$mode" = --on-cpu ] && smoke=(--smoke)
    if part benchmark 130 "$bin/bench_device" --json "$out/bench.json" "${smoke[@]}"; then
        [ "$mode" = --dry-run ] || sed 's/^/    /' "$out/benchmark.log"
    fi
}

run_torch() {
    local batch status log=$out/torch.log left=$((total_seconds - SECONDS))
    if [ "$mode" = --dry-run ]; then
        echo "PyTorch, at most 70 s, if there is one: python3 tests/cuda/bench_torch.py BATCH_SIZE"
        return
    fi
    batch=$(sed -n 's/^"training_batch_size": \([0-9]*\),$/\1/p' "$out/bench.json" 2>/dev/null)
    if [ -z "$batch" ] || [ "$mode" = --on-cpu ]; then
        record SKIP PyTorch 0 "there is nothing to compare with"
        return
    elif [ "$left" -lt 5 ]; then
        record SKIP PyTorch 0 "the $total_seconds seconds are over"
        return
    fi
    timeout $((left < 70 ? left : 70)) python3 tests/cuda/bench_torch.py "$batch" \
        >"$out/torch.json" 2>"$log"
    status=$?
    case $status in
    0) record ok PyTorch 0 "$(cat "$out/torch.json")" ;;
    3) record SKIP PyTorch 0 "no torch that sees a GPU" ;;
    *) record SKIP PyTorch 0 "status $status: $(tail -n 1 "$log")" ;;
    esac
}

# Bad addresses, and races in shared memory: slow, so last, and on the smaller tests alone.
run_sanitizer() {
    local sanitizer test
    sanitizer=$(PATH=$PATH:$cuda_home/bin command -v compute-sanitizer)
    if [ "$mode" = --dry-run ]; then
        sanitizer=${sanitizer:-compute-sanitizer}
    elif [ -z "$sanitizer" ]; then
        record SKIP compute-sanitizer 0 "not there"
        return
    fi
    for test in "${tests[@]}"; do
        part "memcheck $test" 45 "$sanitizer" --error-exitcode 1 "$bin/$test"
        part "racecheck $test" 45 "$sanitizer" --tool racecheck --error-exitcode 1 "$bin/$test"
    done
}

# ---- all of it -----------------------------------------------------------------------------------

check_device() {
    mkdir -p "$out"
    find_device || return
    build || return
    run_tests
    run_parity
    run_bench
    run_torch
    run_sanitizer
    [ "$mode" = --dry-run ] ||
        python3 tests/device_report.py report "$work/parts" "$out" >"$results.json"
}

mkdir -p build
if [ "$mode" = --dry-run ]; then
    check_device
else
    run_checks check_device | tee "$results.txt"
    exit "${PIPESTATUS[0]}"
fi
