#!/usr/bin/env bash
# Runs the tests and counts them. The last line is "N passed, N failed, N skipped"; the exit status
# is 0 only when nothing failed.
#
#   tests/run.sh quick              programs, test binaries, compile matrix, style, documents
#   tests/run.sh asan|ubsan|tsan    the programs and test binaries, built with that sanitizer
#   tests/run.sh quick asan tsan    several of them, counted together
#   tests/run.sh sanitizer-compiler asan   prints the compiler that `asan` would use
#
# All parts speak one language: a line "ok NAME", "FAIL NAME where: what" or "SKIP NAME: reason" for
# each test, and a line "# totals ..." at the end. A part that ends without it has crashed: that
# counts as a failure, in the name of the test that was running ("# run NAME").
set -u
cd "$(dirname "$0")/.." || exit 1

JOBS=${MPT_TEST_JOBS:-2}
# A hang must not hold up everything else for ever; this is far above what any part takes.
TIME_LIMIT=${MPT_TEST_TIME_LIMIT:-$([ -n "${MPT_TEST_FULL:-}" ] && echo 3600 || echo 300)}
PROGRAMS=${PROGRAMS-tfrecord train predict bench}
results=build/results # MODE/NAME.lines: what counts; MODE/NAME.log: all that was printed
scratch=$(mktemp -d "${TMPDIR:-/tmp}/mptrain-tests.XXXXXX") || exit 1
trap 'rm -rf "$scratch"' EXIT

sanitizer_flags() {
    case $1 in
    asan) echo "-fsanitize=address" ;;
    ubsan) echo "-fsanitize=undefined,float-cast-overflow -fno-sanitize-recover=all" ;;
    tsan) echo "-fsanitize=thread" ;;
    esac
}

# The first compiler whose sanitized program not only links but starts (on some kernels an older
# ThreadSanitizer does not).
sanitizer_compiler() {
    local compiler
    for compiler in "${CC:-cc}" clang gcc; do
        # shellcheck disable=SC2046,SC2086
        echo 'int main(void) { return 0; }' |
            $compiler $(sanitizer_flags "$1") -x c - -o "$scratch/probe" 2>/dev/null &&
            "$scratch/probe" 2>/dev/null && echo "$compiler" && return
    done
    return 1
}

# report OUT TITLE: prints what one part brought, and all it said if something failed. Parts run
# side by side, so one at a time.
report() {
    {
        echo "---- $2"
        cat "$1.lines"
        grep -q '^FAIL ' "$1.lines" &&
            grep -v -E '^(ok|FAIL|SKIP|# run|# totals) ' "$1.log" | tail -n 60 | sed 's/^/    | /'
    } >"$1.report"
    flock "$results" cat "$1.report"
}

# part OUT COMMAND...: runs one part into OUT.log, OUT.lines.
part() {
    local out=$1 begun=$SECONDS status
    shift
    # The braces catch what bash says about a signal. In the foreground, so that Ctrl-C ends all.
    {
        timeout --foreground -k 10 "$TIME_LIMIT" "$@" >"$out.log" 2>&1 </dev/null
    } 2>>"$out.log"
    status=$?
    {
        grep -E '^(ok|FAIL|SKIP) ' "$out.log"
        judge_end "$out" $status
    } >"$out.lines"
    report "$out" "$(basename "$out") ($((SECONDS - begun)) s)"
}

# judge_end OUT STATUS: a FAIL line if the part ended otherwise than its lines say.
judge_end() {
    local name running
    name=$(basename "$1")
    running=$(sed -n 's/^# run \(.*\)/ while running \1/p' "$1.log" | tail -n 1)
    if ! grep -q '^# totals ' "$1.log"; then
        case $2 in
        124 | 137) echo "FAIL $name stopped after $TIME_LIMIT s$running" ;;
        *) echo "FAIL $name crashed with exit status $2$running" ;;
        esac
    elif [ "$2" != 0 ] && ! grep -q '^FAIL ' "$1.log"; then
        echo "FAIL $name exit status $2 after its last test (a leak, or a fault at exit)"
    fi
}

# build OUT NAME...: makes programs and tests, below BUILD; each counts as a test of its own.
build() {
    local out=$1 target status begun=$SECONDS
    shift
    make --no-print-directory -k -j "$JOBS" "BUILD=$BUILD" "${@/#/$BUILD/}" >"$out.log" 2>&1
    status=$?
    for target in "$@"; do
        if [ -x "$BUILD/$target" ]; then
            echo "ok $BUILD/$target compiles"
        else
            echo "FAIL $BUILD/$target does not compile"
        fi
    done >"$out.lines"
    [ $status = 0 ] || grep -q '^FAIL ' "$out.lines" || echo "FAIL make: see the log" >>"$out.lines"
    report "$out" "$BUILD ($((SECONDS - begun)) s)"
}

# tests_of MODE: the tests, as their places below BUILD. Those of tests/cuda/ are executed by the
# CPU, as sm_80 would; convolutions also as sm_70 and sm_75, which have engines of their own.
tests_of() {
    local test
    for test in tests/test_*.c; do echo "tests/$(basename "$test" .c)"; done
    for test in tests/cuda/test_*.c; do echo "cuda_on_cpu/sm_80/$(basename "$test" .c)"; done
    [ "$1" = quick ] || return 0
    echo "cuda_on_cpu/sm_70/test_conv_kernels"
    echo "cuda_on_cpu/sm_75/test_conv_kernels"
}

# run_mode MODE: one of the words of the usage above
run_mode() {
    local out=$results/$1 test name
    local -a tests
    mkdir -p "$out"
    mapfile -t tests < <(tests_of "$1")
    export BUILD=build
    [ "$1" = quick ] || use_sanitizer "$1" || return
    export MPT_TEST_BUILD=$BUILD TMPDIR=$scratch
    export TRAIN_CUDA=$BUILD/cuda_on_cpu/sm_80/train PREDICT_CUDA=$BUILD/cuda_on_cpu/sm_80/predict
    # shellcheck disable=SC2086
    build "$out/build" $PROGRAMS cuda_on_cpu/sm_80/{train,predict} "${tests[@]}"
    [ "$1" = quick ] && part "$out/style" tests/style.sh &
    for test in "${tests[@]}"; do
        [ -x "$BUILD/$test" ] || continue
        while [ "$(jobs -rp | wc -l)" -ge "$JOBS" ]; do wait -n; done
        name=${test#tests/} name=${name#cuda_on_cpu/}
        part "$out/${name//\//-}" "$BUILD/$test" &
    done
    wait
    [ "$1" = quick ] || return
    part "$out/docs" tests/docs.sh
    part "$out/compile" tests/compile/matrix.sh
    # In quick no sanitizers: they are continuous integration's matter.
    # shellcheck disable=SC2086
    part "$out/runner" tests/cuda_on_cpu/check_runner.sh ${MPT_TEST_FULL:+asan tsan msan} plain
    [ -z "${MPT_TEST_FULL:-}" ] || part "$out/demo" tests/demo.sh
}

# The sanitized build is for finding faults while running: warnings are the other builds' matter.
use_sanitizer() {
    BUILD=build/$1
    if ! CC=$(sanitizer_compiler "$1"); then
        echo "SKIP $1: no compiler here has this sanitizer" | tee "$results/$1/build.lines"
        return 1
    fi
    CXX=g++
    [[ $CC != *clang* ]] || CXX=clang++
    CFLAGS="-O1 -g -fno-omit-frame-pointer $(sanitizer_flags "$1")"
    WARNINGS=
    export CC CXX CFLAGS WARNINGS
}

if [ "${1:-}" = sanitizer-compiler ]; then
    sanitizer_compiler "${2:?asan, ubsan or tsan}"
    exit
fi
rm -rf "$results"
mkdir -p "$results"

# The tests ask for more memory than there is, to see the error; the sanitizers must answer with
# NULL then, as the C library does.
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1:allocator_may_return_null=1}
export TSAN_OPTIONS=${TSAN_OPTIONS:-halt_on_error=1:allocator_may_return_null=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}

for mode in "$@"; do
    case $mode in
    quick | asan | ubsan | tsan) (run_mode "$mode") ;;
    *) echo "usage: tests/run.sh quick|asan|ubsan|tsan..." >&2 && exit 2 ;;
    esac
done

count() { cat "$results"/*/*.lines 2>/dev/null | grep -c "^$1 "; }
failed=$(count FAIL)
if [ "$failed" != 0 ]; then
    echo "---- failed"
    grep -H '^FAIL ' "$results"/*/*.lines | sed "s|^$results/\(.*\)\.lines:|\1: |"
fi
echo "$(count ok) passed, $failed failed, $(count SKIP) skipped"
[ "$failed" = 0 ]
