#!/usr/bin/env bash
# The CUDA-on-CPU runner, tested: its own tests in several orders, and planted bugs, each of which
# must be found, and must not be once it is mended. Built plain, with AddressSanitizer and
# UndefinedBehaviorSanitizer, with ThreadSanitizer and with MemorySanitizer.
#
#   tests/cuda_on_cpu/check_runner.sh                  all builds
#   tests/cuda_on_cpu/check_runner.sh plain asan       some of them
#
# One line a check: "ok ...", "FAIL ... where: what", "SKIP ...: why". Exit 1 if one failed.
set -u
cd "$(dirname "$0")/../.." || exit 1
. tests/checks.sh

here=tests/cuda_on_cpu
builds=${*:-plain asan tsan msan}
jobs=${MPT_TEST_JOBS:-2}
work=$(mktemp -d "${TMPDIR:-/tmp}/mptrain-runner.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
flags="-std=c++17 -g -Wall -Wextra -Wpedantic -Wshadow -Werror -fno-strict-aliasing -I. -Itests
       -I$here/include"
case $(uname -m) in x86_64) flags="$flags -mavx2 -mf16c -mfma" ;; esac

# A hang must not hold up everything else: no check here takes more than some seconds.
limit() { timeout -k 5 120 "$@"; }

# build_flags BUILD: the compiler's
build_flags() {
    case $1 in
    plain) echo "-O1" ;;
    asan) echo "-O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined" ;;
    tsan) echo "-O1 -fsanitize=thread" ;;
    msan) echo "-O1 -fsanitize=memory -fsanitize-memory-track-origins" ;;
    esac
}

# The first compiler whose program not only links but starts. Clang first for ThreadSanitizer, which
# is several times faster there with the hundreds of fibers of a block; only clang has MSan.
compiler_for() {
    local compiler list="${CXX:-g++} g++ clang++"
    case $1 in tsan | msan) list="clang++ ${CXX:-g++} g++" ;; esac
    for compiler in $list; do
        # shellcheck disable=SC2046
        echo 'int main() { return 0; }' |
            $compiler $(build_flags "$1") -x c++ - -o "$work/probe" 2>/dev/null &&
            "$work/probe" 2>/dev/null && echo "$compiler" && return
    done
    return 1
}

# build BUILD COMPILER: test_runner.BUILD and bugs.BUILD
build() {
    local part sanitize
    sanitize=$(build_flags "$1")
    # shellcheck disable=SC2086
    $2 $flags $sanitize -c $here/runtime.cpp -o "$work/runtime.$1.o" || return 1
    for part in test_runner bugs; do
        # shellcheck disable=SC2086
        $2 $flags $sanitize -include $here/device.h $here/$part.cpp "$work/runtime.$1.o" \
            -o "$work/$part.$1" -lpthread || return 1
    done
}

# tests BUILD NAME VARIABLE=VALUE...: the runner's tests in this environment
tests() {
    local build=$1 name=$2
    shift 2
    if ! limit env "$@" "$work/test_runner.$build" >"$work/said" 2>&1; then
        echo "FAIL runner: tests, $build, $name: $(grep -m 1 -E '^FAIL|cuda_on_cpu:|ERROR|WARNING' \
            "$work/said" || tail -n 1 "$work/said")"
        return
    fi
    echo "ok runner: tests, $build, $name ($(grep -c '^ok ' "$work/said") cases)"
}

check_tests() {
    tests "$1" "as it comes"
    [ "$1" = plain ] || return
    tests "$1" "greedy" CUDA_ON_CPU_SCHEDULE=greedy CUDA_ON_CPU_SEED=1 CUDA_ON_CPU_FRAGMENTS=1
    tests "$1" "another seed" CUDA_ON_CPU_SEED=2 CUDA_ON_CPU_FRAGMENTS=2
    tests "$1" "eager streams" CUDA_ON_CPU_STREAMS=eager
    tests "$1" "without the guard" CUDA_ON_CPU_GUARD=0
}

# The two ways to be without a device.
check_no_device() {
    local variable said
    for variable in CUDA_ON_CPU_DEVICES=0 CUDA_ON_CPU_DRIVER=old; do
        said=$(limit env $variable "$work/test_runner.plain" no_device 2>&1)
        if grep -q '^ok no_device' <<<"$said"; then
            echo "ok runner: $variable"
        else
            echo "FAIL runner: $variable: $(grep -m 1 ^FAIL <<<"$said")"
        fi
    done
}

check_speed() {
    # shellcheck disable=SC2086
    if ${CXX:-g++} $flags -O1 -include $here/device.h $here/test_speed.cpp "$work/runtime.plain.o" \
        -o "$work/test_speed" >"$work/said" 2>&1 && limit "$work/test_speed" >"$work/said"; then
        echo "ok runner: test_speed computes what it should"
    else
        echo "FAIL runner: test_speed: $(grep -m 1 -E 'error|WRONG' "$work/said")"
    fi
}

# orders BUILD: the environments in which bugs are looked for. Three seeds in a row have the three
# manners in which streams run.
orders() {
    local seed
    for seed in 0 1 2; do echo "CUDA_ON_CPU_SEED=$seed CUDA_ON_CPU_SCHEDULE=shuffled"; done
    [ "$1" = plain ] || return
    for seed in 3 4 5; do echo "CUDA_ON_CPU_SEED=$seed CUDA_ON_CPU_SCHEDULE=greedy"; done
}

# try_bug BUILD NAME WANTED [fixed]: says in how many orders the output contains the text
try_bug() {
    local build=$1 name=$2 wanted=$3 fixed=${4:-} order found=0 tried=0
    while read -r order; do
        # shellcheck disable=SC2086
        limit env $order "$work/bugs.$build" "$name" $fixed >"$work/said.$name.$build" 2>&1
        grep -q -- "$wanted" "$work/said.$name.$build" && found=$((found + 1))
        tried=$((tried + 1))
    done < <(orders "$build")
    echo "$found $tried"
}

# check_bug BUILD NAME WANTED...
check_bug() {
    local build=$1 name=$2 found tried
    shift 2
    read -r found tried < <(try_bug "$build" "$name" "$*")
    if [ "$found" = 0 ] || { [ "$*" != wrong ] && [ "$found" != "$tried" ]; }; then
        echo "FAIL runner: bug $name, $build: '$*' in $found of $tried orders:" \
            "$(tail -n 1 "$work/said.$name.$build")"
        return
    fi
    echo "ok runner: bug $name found, $build: '$*' in $found of $tried orders"
    read -r found tried < <(try_bug "$build" "$name" "^right" fixed)
    if [ "$found" = "$tried" ] && ! grep -q -i -E 'error|warning' "$work/said.$name.$build"; then
        echo "ok runner: bug $name mended, $build"
    else
        echo "FAIL runner: bug $name mended, $build: right in $found of $tried orders:" \
            "$(tail -n 1 "$work/said.$name.$build")"
    fi
}

check_bugs() {
    local build name wanted
    while read -r build name wanted; do
        [ "$build" = "$1" ] || continue
        while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
        check_bug "$build" "$name" "$wanted" &
    done < <("$work/bugs.$1")
    wait
}

check_build() {
    local compiler
    if ! compiler=$(compiler_for "$1"); then
        echo "SKIP runner: $1: no compiler here has this sanitizer"
        return
    fi
    if ! build "$1" "$compiler" >"$work/said" 2>&1; then
        echo "FAIL runner: $1: $compiler: $(grep -m 1 -E 'error|warning' "$work/said")"
        return
    fi
    echo "ok runner: $1 builds with $compiler"
    check_tests "$1"
    [ "$1" != plain ] || { check_no_device && check_speed; }
    check_bugs "$1"
}

check_builds() {
    local build
    for build in $builds; do check_build "$build"; done
}

# Stacks are switched by ucontext on processors for which there is no code of our own.
check_ucontext() {
    local said
    # shellcheck disable=SC2086
    said=$({ ${CXX:-g++} $flags -O1 -DCUDA_ON_CPU_UCONTEXT -include $here/device.h \
        $here/test_runner.cpp $here/runtime.cpp -o "$work/ucontext" -lpthread &&
        limit "$work/ucontext"; } 2>&1)
    if grep -q '^# totals .* 0 failed' <<<"$said"; then
        echo "ok runner: tests, ucontext"
    else
        echo "FAIL runner: tests, ucontext: $(grep -m 1 -E '^FAIL|error' <<<"$said")"
    fi
}

# The numbers and signatures of the headers, against ours and NVIDIA's.
check_api() {
    local name include said
    for name in "our" "NVIDIA's"; do
        include=$here/include
        [ "$name" = our ] || include=${CUDA_HOME:-/usr/local/cuda}/include
        if [ ! -e "$include/cublas_v2.h" ]; then
            echo "SKIP runner: api.c with $name headers: they are not here"
        elif said=$(${CC:-cc} -std=c11 -Wall -Wextra -Werror -isystem "$include" -c $here/api.c \
            -o /dev/null 2>&1); then
            echo "ok runner: api.c with $name headers"
        else
            echo "FAIL runner: api.c with $name headers: $(grep -m 1 error <<<"$said")"
        fi
    done
}

run_checks check_api check_ucontext check_builds
