#!/usr/bin/env bash
# The style checks. What a text shows is checked by style.py; here, what the compiler makes of it:
# names that the library exports, data that it can write to, functions that it calls.
# One line a check: "ok ...", "FAIL ... where: what", "SKIP ...: why". Exit 1 if one failed.
set -u
cd "$(dirname "$0")/.." || exit 1
. tests/checks.sh

CC=${CC:-cc}
work=$(mktemp -d "${TMPDIR:-/tmp}/mptrain-style.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT

# verdict NAME COMPLAINTS: no complaints, no failure
verdict() {
    if [ -z "$2" ]; then
        echo "ok style: $1"
    else
        echo "FAIL style: $1: $(tr '\n' ';' <<<"$2" | sed 's/;$//; s/;/; /g')"
    fi
}

# "NAME CLASS TYPE SECTION" of each symbol: class as nm prints it, U for undefined ones.
symbols() {
    nm -f sysv "$1" | awk -F'|' 'NF >= 7 { gsub(/ /, ""); print $1, $3, $4, $7 }'
}

check_symbols() {
    local object=$work/mptrain.o list=$work/symbols
    # shellcheck disable=SC2086
    if ! $CC -O2 -DMPTRAIN_ZLIB -I. -c tests/compile/implementation.c -o "$object" 2>"$work/said"
    then
        verdict "symbols" "does not compile: $(grep -m 1 error "$work/said")"
        return
    fi
    symbols "$object" >"$list"

    verdict "exported names begin with mpt_ or mptk_" "$(awk '
        $2 ~ /^[A-TV-Z]$/ && $1 !~ /^mptk?_/ { print $1 }' "$list")"

    # Tables of pointers are read-only once loaded (.data.rel.ro). stb_image keeps some settings;
    # one thread-local pointer of ours tells its hooks which allocator to use.
    verdict "no writable data" "$(awk '
        $4 !~ /^\.t?(data|bss)/ || $4 ~ /^\.data\.rel\.ro/ || $1 ~ /^stbi_/ { next }
        $3 == "TLS" && $1 ~ /^mpti_/ && !seen++ { next }
        { print $1 " in " $4 }' "$list")"

    verdict "never exits, aborts or prints" "$(awk '
        BEGIN { split("exit _exit _Exit quick_exit abort __assert_fail perror puts putchar putc" \
                      " fputs fputc stdout stderr", names); for (i in names) banned[names[i]] = 1 }
        $2 == "U" && ($1 in banned || $1 ~ /^(__)?[vf]?f?printf(_chk)?$/) { print $1 }' "$list")"
}

# Layout by clang-format, of the version that wrote it: others lay out a little differently. The
# header is laid out by hand, for its tables and drawings.
check_layout() {
    local version
    version=$(clang-format --version 2>/dev/null | sed 's/.*version \([0-9]*\).*/\1/')
    if [ "$version" != 14 ]; then
        echo "SKIP style: layout by clang-format: needs version 14, here is ${version:-none}"
        return
    fi
    verdict "layout (mend with: clang-format-14 -i FILE)" "$(
        find examples tests -name '*.[ch]' -print0 | xargs -0 -r clang-format --dry-run 2>&1 |
            sed -n 's/^\([^:]*:[0-9]*\):.*clang-formatted.*/\1/p' | sort -u -t: -k1,1)"
}

check_text() { python3 tests/style.py; }

run_checks check_text check_symbols check_layout
