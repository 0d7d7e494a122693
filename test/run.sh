#!/bin/sh
# Runs tests, two at a time, and counts: test/run.sh PROGRAM[:TEST]|FILE.py[:CLASS] ...   The last line is 'N passed, N
# failed'.
# A program is a cmocka test; one that ends before its last test counts as one failure more than it reported.
# TEST_RUNNER is a command that runs a program for another CPU, as "qemu-aarch64 -L /usr/aarch64-linux-gnu".
# All run in one environment, that of test/environment.py, whatever this script was started from.
if [ "${1-}" != --prepared ] && [ "${1-}" != --one ]; then
    exec python3 "${0%/*}/environment.py" "$0" --prepared "$@"
fi

# One test: its line, with what it said where it failed, in one piece, and its counts into $1.
run_one() {
    counts=$1 test=$2
    begin=$(date +%s)
    scratch=$(mktemp -d) || return
    log=$scratch/log
    # Of one user's mpiruns, the first to end may take a folder away that the next has just found there.
    export OMPI_MCA_orte_tmpdir_base="$scratch" PRTE_MCA_prte_tmpdir_base="$scratch"
    case "$test" in
    # A program that ends by a user's mistake leaves its memory to the system: not a leak to report in place of status 2.
    *.py | *.py:*)
        file=${test%:*} class=${test#"${test%:*}"}
        ASAN_OPTIONS=detect_leaks=0 TRAIN_GPT="${TRAIN_GPT:-build/train_gpt}" \
            python3 "$file" -v ${class:+"${class#:}"} >"$log" 2>&1
        ;;
    *)
        of_several=${test#"${test%:*}"}
        # TEST_RUNNER: a command of several words
        CMOCKA_MESSAGE_OUTPUT=TAP ${TEST_RUNNER-} "${test%:*}" ${of_several:+"${of_several#:}"} >"$log" 2>&1
        ;;
    esac
    status=$?
    case "$test" in
    *.py | *.py:*)
        ok=$(grep -c '\.\.\. ok$' "$log")
        bad=$(grep -cE '\.\.\. (FAIL|ERROR)$' "$log")
        skip=$(grep -c '\.\.\. skipped' "$log")
        ;;
    *)
        ok=$(grep -c '^ok ' "$log")
        skip=$(grep -c '^not ok .*# SKIP' "$log") # cmocka's way to say it
        bad=$(($(grep -c '^not ok ' "$log") - skip))
        ;;
    esac
    # a crash, or a program that ran no test
    if [ "$bad" -eq 0 ] && { [ "$status" -ne 0 ] || [ $((ok + skip)) -eq 0 ]; }; then
        bad=1
    fi
    name=${test##*/}
    case "$name" in *:*) precision=${name%:*} name=${name#*:}_${precision##*_} ;; esac
    case "$test" in */emu/*) name=emu_${name#op_} ;; esac # the same tests as on the cpu target
    {
        printf '%-32s %4d passed %3d failed  %4d s\n' "$name" "$ok" "$bad" $(($(date +%s) - begin))
        if [ "$bad" -gt 0 ]; then
            sed 's/^/    /' "$log"
        fi
    } >"$scratch/all"
    cat "$scratch/all"
    echo "$ok $bad $skip" >>"$counts"
    rm -rf "$scratch"
}

if [ "${1-}" = --one ]; then
    run_one "$2" "$3"
    exit 0
fi
shift # --prepared
counts=$(mktemp) || exit 1
trap 'rm -f "$counts"' EXIT
printf '%s\0' "$@" | xargs -0 -P 2 -n 1 "$0" --one "$counts"
passed=0 failed=0 skipped=0 ran=0
while read -r ok bad skip; do
    passed=$((passed + ok)) failed=$((failed + bad)) skipped=$((skipped + skip)) ran=$((ran + 1))
done <"$counts"
if [ "$ran" -ne $# ]; then
    echo "$ran of $# tests ran"
    failed=$((failed + $# - ran))
fi
if [ "$skipped" -gt 0 ]; then
    echo "$skipped skipped"
fi
echo "$passed passed, $failed failed" || exit 1 # nobody can read it
[ "$failed" -eq 0 ]
