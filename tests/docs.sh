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

# Forty small pictures in ten classes, as `make demo` names its files.
make_small_data() {
    local pictures=(tests/data/images/{adam7,plain}-*.png) class i
    for class in 0 1 2 3 4 5 6 7 8 9; do
        mkdir -p "$work/pictures/$class"
        for i in 0 1 2 3; do
            cp "${pictures[(class + i) % ${#pictures[@]}]}" "$work/pictures/$class/$i.png"
        done
    done
    mkdir -p "$work/output/data"
    for name in train test; do
        "$programs/tfrecord" from-folder "$work/pictures" "$work/output/data/$name@2"
    done
}

# The C program, built by the line below it in a directory that holds nothing but the header, and
# run by the rest of that line.
check_program() {
    local line build run
    line=$(block '```' 3)
    build=${line%% && *} run=${line#* && }
    cp mptrain.h "$work"
    block '```c' 1 >"$work/app.c"
    same "README's program compiles: $build" "" "$(cd "$work" && ${build/#cc/$CC} 2>&1)"
    same "README's program trains" "model.safetensors" \
        "$(cd "$work" && eval "$run" 2>&1 && ls model.safetensors)"
}

# The command behind "$ build/train", for one step.
check_train() {
    local command
    command=$(block '```' 2 | sed -n 's/^\$ build\///p')
    same "README's command trains" "1 step in all" "$(
        cd "$work" && eval "'$OLDPWD/$programs'/$command --steps 1" 2>&1 |
            grep -o '^[0-9]* step in all')"
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

make_small_data >/dev/null || echo "docs: no data to train on" >&2
run_checks check_program check_train check_lessons check_clean
