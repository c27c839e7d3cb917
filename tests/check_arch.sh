#!/usr/bin/env bash
# Compiles the device code of kernels.cu for every GPU architecture, sm_70 included, and tells what
# each kernel takes: registers, shared memory, spills, CTAs an SM, tensor-core instructions. Needs
# no GPU and no CUDA installed: the compiler is CUDA 12.9's from PyPI, the last that knows sm_70; it
# is put into build/cuda12 once (about 400 MB on disk). One line a check: "ok ...", "FAIL ...",
# "SKIP ...: why". Exit 1 if one failed.
#
#   tests/check_arch.sh [FILE.cu]        checks the file (kernels.cu), after the check itself
#   tests/check_arch.sh --self-test      only that the check finds planted faults
#
#   ARCHS="70 90" tests/check_arch.sh                these architectures only
#   NVCC_LOG=build/kernels.log tests/check_arch.sh   and spills in what nvcc made of the file
set -u
cd "$(dirname "$0")/.." || exit 1
. tests/checks.sh

packages=(nvidia-cuda-nvcc-cu12==12.9.86 nvidia-cuda-nvrtc-cu12==12.9.86
    nvidia-cuda-runtime-cu12==12.9.79 nvidia-cuda-cccl-cu12==12.9.27
    nvidia-cuda-nvdisasm==13.5.37)
venv=build/cuda12
out=build/check-arch
source=${1:-kernels.cu}
work=$(mktemp -d "${TMPDIR:-/tmp}/mptrain-arch.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT

# The stamp is written last, so that half an installation is done again.
have_compiler() {
    [ "$(cat "$venv/packages" 2>/dev/null)" = "${packages[*]}" ] && return
    rm -rf "$venv"
    {
        python3 -m venv "$venv" &&
            "$venv/bin/pip" install --disable-pip-version-check "${packages[@]}" &&
            echo "${packages[*]}" >"$venv/packages"
    } >"$work/install" 2>&1 </dev/null
}

python() { PYTHONDONTWRITEBYTECODE=1 "$venv/bin/python" "$@"; }

check_itself() {
    python tests/check_arch/self_test.py "$work/self-test"
}

check_kernels() {
    if [ ! -e "$source" ]; then
        echo "FAIL check-arch: no file $source"
        return
    fi
    python tests/check_arch/check.py --out "$out" ${ARCHS:+--arch "$ARCHS"} \
        ${NVCC_LOG:+--nvcc-log "$NVCC_LOG"} "$source"
}

# What docs/kernels.md says of tiles, registers and CTAs is what was found just now.
check_tables() {
    local name="check-arch: docs/kernels.md tells what kernels.cu is"
    [ "$source" = kernels.cu ] && [ -z "${ARCHS:-}" ] || return
    if ! command -v "${CXX:-g++}" >/dev/null; then
        echo "SKIP $name: no ${CXX:-g++}"
    elif python docs/kernel_table.py --check >"$work/tables" 2>&1; then
        echo "ok $name"
    else
        echo "FAIL $name: $(tail -n 1 "$work/tables")"
    fi
}

# A Python program that dies has printed no FAIL line: it must not pass for that.
survives() { "$@" || echo "FAIL check-arch: $1 ended with status $?"; }
run_self_test() { survives check_itself; }
run_kernels() { survives check_kernels; }

if ! have_compiler; then
    why=$(grep -i -m 1 'error' "$work/install" || tail -n 1 "$work/install")
    skip() { echo "SKIP check-arch: CUDA 12.9 can't be had from PyPI: ${why:-no python3}"; }
    run_checks skip
elif [ "$source" = --self-test ]; then
    run_checks run_self_test
else
    run_checks run_self_test run_kernels check_tables
fi
