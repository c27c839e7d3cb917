#!/usr/bin/env bash
# `make demo` for one epoch, and what it leaves; with MPT_TEST_FULL also whole runs in FP16 and in
# FP32, which have to end equally well. Part of continuous integration: needs the package
# dataset-fashion-mnist, and half a minute of two cores (full: five). One line a check: "ok ...",
# "FAIL ...".
set -u
cd "$(dirname "$0")/.." || exit 1
. tests/checks.sh

work=$(mktemp -d "${TMPDIR:-/tmp}/mptrain-demo.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
output=$work/output

# holds NAME COMMAND...
holds() {
    local name=$1
    shift
    if "$@" >"$work/said" 2>&1; then
        echo "ok demo: $name"
    else
        echo "FAIL demo: $name: $(tail -n 3 "$work/said" | tr '\n' '|')"
    fi
}

# The members that a report has to have, and what this one has to say.
report_is_right() {
    python3 - "$output/report.json" <<'END'
import json
import sys

report = json.load(open(sys.argv[1], encoding='utf-8'))
wanted = '''version options seed device ranks steps skipped_steps final_loss_scale train_loss
            val_loss val_accuracy val_top5 val_count seconds images_per_second input_wait_fraction
            planned_bytes peak_rss_bytes weights_sha256'''.split()
missing = [name for name in wanted if report.get(name) is None]
assert not missing, f'no {missing}'
assert report['val_count'] == 10000, f"val_count {report['val_count']}"
assert report['val_accuracy'] > 0.80, f"val_accuracy {report['val_accuracy']}"
assert report['steps'] == 938, f"steps {report['steps']}"
digest = report['weights_sha256']
assert len(digest) == 64 and set(digest) <= set('0123456789abcdef'), f'weights_sha256 {digest}'
END
}

weights_predict() {
    local line
    line=$(build/predict --weights "$output/model.safetensors" \
        --data "$output/data/test-*-of-*" | tail -n 1)
    echo "$line"
    grep -Eq '^10000 records: [89][0-9]\.[0-9]+ % right' <<<"$line"
}

check_demo() {
    holds "one epoch" env DEMO_EPOCHS=1 DEMO_OUTPUT="$output" make --no-print-directory demo
    cp "$work/said" "$work/demo.log"
    holds "it says what it planned" grep -q 'memory: .* planned' "$work/demo.log"
    holds "it draws pictures beside their classes" grep -q 'record 3, ' "$work/demo.log"
    holds "the report" report_is_right
    holds "a checkpoint" ls "$output"/checkpoints/checkpoint-000000938.safetensors
    holds "the weights predict test pictures" weights_predict
}

# run_in PRECISION: a whole run; its report lands in PRECISION.json
run_in() {
    DEMO_PRECISION=$1 DEMO_OUTPUT=$output make --no-print-directory demo &&
        cp "$output/report.json" "$work/$1.json"
}

end_equally_well() {
    python3 - "$work/fp16.json" "$work/fp32.json" <<'END'
import json
import sys

half, single = (json.load(open(name, encoding='utf-8')) for name in sys.argv[1:])
print(f"fp16 {half['val_accuracy']:.4f}, fp32 {single['val_accuracy']:.4f}, "
      f"{half['skipped_steps']} steps skipped")
assert abs(half['val_accuracy'] - single['val_accuracy']) <= 0.005, 'more than half a point apart'
assert min(half['val_accuracy'], single['val_accuracy']) >= 0.91, 'below 91 %'
END
}

check_precisions() {
    [ -n "${MPT_TEST_FULL:-}" ] || return
    holds "four epochs in fp16" run_in fp16
    holds "four epochs in fp32" run_in fp32
    holds "fp16 and fp32 end within half a point, at 91 % or more" end_equally_well
}

run_checks check_demo check_precisions
