#!/usr/bin/env bash
# Sees to it that what the build and the tests need is there.
#
#   tests/setup.sh build            what `make` needs: looks only, and names what is missing
#   tests/setup.sh test             what `make test` needs
#   tests/setup.sh demo             what `make demo` needs: its pictures too
#   tests/setup.sh asan ubsan tsan  compilers whose sanitizers run
#
# Whether a thing is there is found out by using it: a program is looked up, a header is compiled.
# What is missing is installed with apt-get when this user may (root, or sudo without a password),
# one announced line for each. NO_INSTALL=1 turns that off: the packages are named, and exit is 1.
set -u
cd "$(dirname "$0")/.." || exit 1

CC=${CC:-cc}
missing=() # Debian packages, in the order in which they were found missing

# compiles COMPILER FLAGS...: does the program on stdin compile and link?
compiles() { "$@" -x c - -o /dev/null >/dev/null 2>&1; }

compiles_empty() { echo 'int main(void) { return 0; }' | compiles "$@"; }

# has_header NAME: with the first compiler that works
has_header() {
    local compiler
    for compiler in "$CC" gcc clang; do
        compiles_empty "$compiler" || continue
        printf '#include <stddef.h>\n#include <%s>\nint main(void)\n{ return 0; }\n' "$1" |
            compiles "$compiler"
        return
    done
    return 1
}

has_stb_image() { has_header stb/stb_image.h || has_header stb_image.h; }

# has_sanitizer NAME: does any of our compilers make a program with it that also starts?
has_sanitizer() { tests/run.sh sanitizer-compiler "$1" >/dev/null; }

# want PACKAGE WHAT CHECK...: notes the package when the check fails
want() {
    local package=$1 what=$2
    shift 2
    [[ " ${missing[*]} " == *" $package "* ]] && return
    "$@" >/dev/null 2>&1 && return
    missing+=("$package")
    if may_install; then
        echo "setup: no $what here; installing $package"
    else
        echo "setup: no $what here; it comes with the Debian package $package" >&2
    fi
}

may_install() {
    [ -z "${NO_INSTALL:-}" ] || [ "$NO_INSTALL" = 0 ] || return 1
    command -v apt-get >/dev/null || return 1
    [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

install_missing() {
    local log=build/setup.log
    [ ${#missing[@]} = 0 ] && return 0
    if ! may_install; then
        echo "setup: please install, then try again: apt-get install ${missing[*]}" >&2
        return 1
    fi
    mkdir -p build
    {
        as_root apt-get update
        as_root env DEBIAN_FRONTEND=noninteractive \
            apt-get install -y --no-install-recommends "${missing[@]}"
    } >"$log" 2>&1 </dev/null && return 0
    tail -n 20 "$log" >&2
    echo "setup: apt-get failed (whole log in $log): install by hand: ${missing[*]}" >&2
    return 1
}

# `make` alone installs nothing, and works without pictures.
look_for_build() {
    NO_INSTALL=1
    want gcc "working C compiler ($CC)" compiles_empty "$CC"
    if [ "${ZLIB:-1}" != 0 ] && ! has_header zlib.h; then
        want zlib1g-dev "zlib.h" false
        echo "setup: or build without compressed records: make ZLIB=0" >&2
    fi
    [ ${#missing[@]} = 0 ] || return 0
    has_stb_image || echo "setup: note: without stb_image.h (package libstb-dev) these programs" \
        "refuse pictures" >&2
}

want_libraries() {
    want gcc "gcc" compiles_empty gcc
    want libc6-dev "C library headers" has_header pthread.h
    want zlib1g-dev "zlib.h" has_header zlib.h
    want libstb-dev "stb_image.h" has_stb_image
}

want_pictures() {
    want dataset-fashion-mnist "Fashion-MNIST" \
        test -s /usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz
}

want_tools() {
    want make "make" command -v make
    want g++ "g++" command -v g++
    want clang "clang" compiles_empty clang
    want clang-format "clang-format" command -v clang-format
    want binutils "nm" command -v nm
    want python3 "python3" command -v python3
}

for need in "$@"; do
    case $need in
    build) look_for_build ;;
    test)
        want_libraries
        want_tools
        ;;
    demo)
        want make "make" command -v make
        want_libraries
        want_pictures
        ;;
    asan | ubsan | tsan)
        want_libraries
        want libclang-rt-dev "compiler for $need" has_sanitizer "$need"
        ;;
    *) echo "setup: unknown need '$need'" >&2 && exit 2 ;;
    esac
done
install_missing
