#!/usr/bin/env bash
# What README.md, the lessons' comments and `make help` promise, tried as a reader would try it.
# Needs the programs in build/. One line a check: "ok ...", "FAIL ...: what". Exit 1 if one failed.
set -u
cd "$(dirname "$0")/.." || exit 1
. tests/checks.sh

CC=${CC:-cc}
programs=${MPT_TEST_BUILD:-build}
work=$(mktemp -d "${TMPDIR:-/tmp}/mptrain-docs.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT

# same NAME EXPECTED FOUND: two texts
same() {
    if [ "$2" = "$3" ]; then
        echo "ok docs: $1"
    else
        echo "FAIL docs: $1: expected '$(tr '\n' '|' <<<"$2")' but found '$(tr '\n' '|' <<<"$3")'"
    fi
}

# block FENCE N: the Nth fenced block of README.md that begins with this line
block() {
    awk -v fence="$1" -v n="$2" '
        inside && /^```/ { exit }
        inside { print; next }
        other && /^```/ { other = 0; next }
        other { next }
        $0 == fence && --n == 0 { inside = 1; next }
        /^```/ { other = 1 }' README.md
}

# The first block is a session: a command behind "$ ", what it prints below it.
check_session() {
    local command expected
    command=$(block '```' 1 | sed -n 's/^\$ build\///p')
    expected=$(block '```' 1 | sed '1,/^\$ build\//d')
    # shellcheck disable=SC2086
    same "README's session shows what tfrecord prints" "$expected" \
        "$([ -n "$command" ] && "$programs"/$command 2>&1)"
}

# The C program, built by the line below it, in a directory that holds nothing but the header.
check_program() {
    local build
    build=$(block '```' 2 | sed 's/ && .*//')
    cp mptrain.h "$work"
    block '```c' 1 >"$work/app.c"
    same "README's program compiles: $build" "" "$(cd "$work" && ${build/#cc/$CC} 2>&1)"
    same "README's program counts records" "37 records" \
        "$("$work/a.out" tests/data/imagenet-00000-of-00004 2>&1)"
}

# The line "build: cc ... -o NAME ..." in each lesson, quick, and NAME elsewhere.
check_lessons() {
    local file build name
    for file in examples/[0-9]*.c examples/tfrecord.c examples/train.c examples/predict.c; do
        build=$(sed -n 's/.*[Bb]uild: *\(cc .*[a-z]\).*/\1/p' "$file" | sed 's| \*/||')
        name=$(sed -n 's/.* -o \([^ ]*\).*/\1/p' <<<"$build")
        build=${build/#cc/$CC}
        build=${build/-O2/-O0}
        same "$file builds as it says" "" "$(${build/-o $name/-o $work/$name} 2>&1)"
        [ -x "$work/$name" ] || echo "FAIL docs: $file: its build line makes no program"
        git rev-parse --git-dir >/dev/null 2>&1 || continue
        same "git ignores the program of $file" "$name" "$(git check-ignore "$name")"
    done
}

check_clean() {
    mkdir -p "$work/ours" "$work/theirs"
    touch "$work/ours/flags" "$work/theirs/thesis"
    make --no-print-directory clean "BUILD=$work/ours" >/dev/null 2>&1
    make --no-print-directory clean "BUILD=$work/theirs" >/dev/null 2>&1
    same "make clean removes BUILD if it is one" "theirs" "$(cd "$work" && ls -d ours theirs 2>&-)"
}

run_checks check_session check_program check_lessons check_clean
