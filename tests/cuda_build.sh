#!/usr/bin/env bash
# `make cuda` where nvcc is: does it build, without warnings, for every architecture that nvcc
# knows, and what does build/train-cuda say where there is no GPU? Part of continuous integration.
# One line a check: "ok ...", "FAIL ...", "SKIP ...: why". Exit 1 if one failed.
set -u
cd "$(dirname "$0")/.." || exit 1
. tests/checks.sh

cuda_home=${CUDA_HOME:-/usr/local/cuda}
work=$(mktemp -d "${TMPDIR:-/tmp}/mptrain-cuda.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT

# same NAME EXPECTED FOUND: two texts
same() {
    if [ "$2" = "$3" ]; then
        echo "ok cuda: $1"
    else
        echo "FAIL cuda: $1: expected '$(tr '\n' '|' <<<"$2")' but found '$(tr '\n' '|' <<<"$3")'"
    fi
}

check_no_nvcc() {
    same "without nvcc, make cuda says so in one line" \
        "make: no nvcc in /no-such-place/bin: install the CUDA toolkit, or tell where it is: $(
        )make CUDA_HOME=/path/to/cuda" \
        "$(make --no-print-directory cuda CUDA_HOME=/no-such-place BUILD="$work/none" 2>&1 |
            grep -v '^make: \*\*\*')"
}

# What nvcc knows of our architectures is what kernels.o has to hold.
check_build() {
    local known wanted
    if [ ! -x "$cuda_home/bin/nvcc" ]; then
        echo "SKIP cuda: make cuda: no nvcc in $cuda_home/bin"
        return
    fi
    if ! make --no-print-directory cuda CUDA_HOME="$cuda_home" >"$work/build.log" 2>&1; then
        cat "$work/build.log" >&2
        echo "FAIL cuda: make cuda: $(grep -m 1 -i error "$work/build.log")"
        return
    fi
    echo "ok cuda: make cuda"
    same "no warnings" "" "$(grep -i warning "$work/build.log")"
    known=" $("$cuda_home/bin/nvcc" --list-gpu-arch | sed 's/compute_//' | tr '\n' ' ')"
    wanted=$(for arch in 70 75 80 86 89 90 90a; do
        [[ $known == *" ${arch%a} "* ]] && echo "sm_$arch"
    done)
    same "kernels.o holds $(tr '\n' ' ' <<<"$wanted")" "$wanted" \
        "$(sed -n "s/.*Compiling entry function .* for '\(sm_[0-9a-z]*\)'.*/\1/p" \
            build/kernels.log | sort -u)"
    check_no_gpu
}

# The data are there and good, so that nothing but the missing GPU can be the matter.
check_no_gpu() {
    local status
    if [ -e /dev/nvidiactl ] || [ -e /dev/dxg ]; then
        echo "SKIP cuda: train-cuda without a GPU: this machine has one"
        return
    fi
    mkdir -p "$work/pictures/0"
    cp tests/data/images/plain-*.png "$work/pictures/0"
    build/tfrecord from-folder "$work/pictures" "$work/train@1" >"$work/said" 2>&1
    build/train-cuda --data "$work/train-*" --device cuda --arch lenet --steps 1 --batch-size 2 \
        >"$work/out" 2>"$work/err"
    status=$?
    same "without a GPU, train-cuda says so in one line and ends with status 1" "1 line, status 1" \
        "$(grep -c 'GPU' "$work/err") line, status $status$(
            [ "$(wc -l <"$work/err")" = 1 ] || cat "$work/err")"
}

make --no-print-directory all >"$work/programs" 2>&1 || cat "$work/programs" >&2
run_checks check_no_nvcc check_build
