# Sourced by the test scripts that print one line a check: "ok ...", "FAIL ...", "SKIP ...".
# run_checks FUNCTION...: runs them, then tells the totals. Status 1 if a check failed.
# The lines are kept in $work, a folder of the script's own.
run_checks() {
    local check failed
    for check; do "$check"; done | tee "$work/lines"
    failed=$(grep -c '^FAIL ' "$work/lines")
    echo "# totals $(grep -c '^ok ' "$work/lines") passed, $failed failed," \
        "$(grep -c '^SKIP ' "$work/lines") skipped"
    [ "$failed" = 0 ]
}
