#!/usr/bin/env bash
# The compile matrix: mptrain.h in every way in which a program may include it, with gcc and clang,
# as C and as C++. Each cell is one test. It passes when its commands succeed in silence: a warning
# fails it, even where it is no error. Two cells run at a time.
#
#   tests/compile/matrix.sh          all cells
#   tests/compile/matrix.sh WORD     the cells with WORD in their names
# shellcheck disable=SC2016,SC2034 # cells are written in single quotes and use variables later
set -u
cd "$(dirname "$0")/../.." || exit 1

only=${1:-}
src=tests/compile
strict_cpp="-Wall -Wextra -Wpedantic -Wshadow -Werror -I."
strict_c="$strict_cpp -Wstrict-prototypes"
libs="-lm -lpthread"
jobs=${MPT_TEST_JOBS:-2}
CC=${CC:-cc}
CXX=${CXX:-c++}
work=$(mktemp -d "${TMPDIR:-/tmp}/mptrain-compile.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
num_cells=0

# cell NAME COMMANDS: runs the commands in the background; $tmp is a directory of their own. They
# see all variables of the moment, so they stand in single quotes.
cell() {
    [[ $1 == *"$only"* ]] || return 0
    while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
    num_cells=$((num_cells + 1))
    tmp=$work/$(printf %03d $num_cells)
    mkdir "$tmp"
    run_cell "$1" "$2" >"$tmp.result" &
}

run_cell() {
    local status said
    (
        set -e
        eval "$2"
    ) >"$tmp/said" 2>&1
    status=$?
    if [ $status = 0 ] && [ ! -s "$tmp/said" ]; then
        echo "ok compile: $1"
        return
    fi
    said=$(grep -m 1 -E 'error|warning' "$tmp/said" || head -n 1 "$tmp/said")
    echo "FAIL compile: $1 (exit $status): ${said:-without a word}"
    head -n 20 "$tmp/said" | sed 's/^/    /'
}

# use_compilers FAMILY: $c and $cpp compile strictly; a standard follows as -std=. $look finds all
# that is to be warned of: gcc sees unused functions only when it really compiles.
use_compilers() {
    case $1 in
    gcc) cc=gcc cxx=g++ look='-c -o /dev/null' ;;
    clang) cc=clang cxx=clang++ look=-fsyntax-only ;;
    esac
    c="$cc $strict_c"
    cpp="$cxx -x c++ $strict_cpp"
}

# use_language STANDARD: $compile
use_language() {
    case $1 in
    *++*) compile="$cpp -std=$1" ;;
    *) compile="$c -std=$1" ;;
    esac
}

for family in gcc clang; do
    use_compilers $family

    for std in c99 c11 gnu17 c++17; do
        use_language $std
        cell "header, $family $std" '$compile -fsyntax-only $src/header.c'
        cell "implementation, $family $std" '$compile $look $src/implementation.c'
    done

    for std in c99 c++17; do
        use_language $std
        for option in ZLIB NO_IMAGE NO_THREADS; do
            cell "MPTRAIN_$option, $family $std" \
                '$compile -DMPTRAIN_$option $look $src/implementation.c'
        done
        cell "all options, $family $std" '$compile -DMPTRAIN_ZLIB -DMPTRAIN_NO_IMAGE \
            -DMPTRAIN_NO_THREADS $look $src/implementation.c'
    done

    # -ffast-math is what trainers are built with. More optimisers have more to say, and take long:
    # the usual one, -O2, is in the build of the programs and the tests.
    levels=("-O0" "-O1 -ffast-math")
    [ "${MPT_TEST_FULL:-0}" = 0 ] ||
        levels+=("-O2 -DMPTRAIN_ZLIB" "-O2 -ffast-math" "-O3 -march=native" "-Os -DNDEBUG")
    for flags in "${levels[@]}"; do
        cell "app, $family $flags" '$c $flags $src/app.c -o $tmp/app $libs -lz; $tmp/app'
    done

    # Compilers may then forget inf and NaN; the trainer must not.
    cell "skipped steps, $family -O2 -ffast-math" '
        $c -O2 -ffast-math $src/fast_math.c -o $tmp/app $libs
        $tmp/app'

    # The C library hides POSIX in strict C99 once a header of its own was read.
    cell "after stdio.h, $family gnu17" '$c -std=gnu17 -c $src/late.c -o $tmp/late.o'
    cell "after stdio.h, $family c99 gives advice" '
        if $c -std=c99 -fsyntax-only $src/late.c 2>$tmp/advice; then echo "compiled"; fi
        grep -q _POSIX_C_SOURCE $tmp/advice || head -n 5 $tmp/advice'

    cell "header alone reads no stdio, stdlib, string, pthread, $family" '
        $c -M $src/header.c >$tmp/headers
        if grep -o -E "/(stdio|stdlib|string|pthread|math|zlib)\.h" $tmp/headers; then exit 1; fi'

    cell "two files, C and C, $family" '
        $c -std=c99 -c $src/implementation.c -o $tmp/i.o
        $c -std=c11 -c $src/user.c -o $tmp/u.o
        $cc $tmp/i.o $tmp/u.o -o $tmp/app $libs
        $tmp/app'
    cell "two files, C and C++, $family" '
        $c -std=c99 -c $src/implementation.c -o $tmp/i.o
        $cpp -std=c++17 -c $src/user.c -o $tmp/u.o
        $cxx $tmp/i.o $tmp/u.o -o $tmp/app $libs
        $tmp/app'
    cell "two files, C++ and C, $family" '
        $cpp -std=c++17 -c $src/implementation.c -o $tmp/i.o
        $c -std=c99 -c $src/user.c -o $tmp/u.o
        $cxx $tmp/i.o $tmp/u.o -o $tmp/app $libs
        $tmp/app'
    cell "two private copies, $family" '
        $c -std=c99 -c $src/private_copy.c -o $tmp/first.o
        $c -std=c99 -DSECOND -c $src/private_copy.c -o $tmp/second.o
        $cc $tmp/first.o $tmp/second.o -o $tmp/app $libs
        $tmp/app'
done

# As the first lines of the manual say, in a directory that holds nothing else.
cell "plain $CC -O2 app.c -lm -lpthread" '
    cp mptrain.h $src/app.c $tmp
    cd $tmp
    $CC -O2 app.c -lm -lpthread
    ./a.out'
cell "plain $CXX -O2 app.cpp -lm -lpthread" '
    cp mptrain.h $tmp
    cp $src/app.c $tmp/app.cpp
    cd $tmp
    $CXX -O2 app.cpp -lm -lpthread
    ./a.out'

wait
cat "$work"/*.result
failed=$(cat "$work"/*.result | grep -c '^FAIL ')
echo "# totals $((num_cells - failed)) passed, $failed failed, 0 skipped"
[ "$failed" = 0 ]
