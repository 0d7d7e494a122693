#!/bin/sh
# Runs tests in environments in which users have started them: in a script's background, in another locale, as another
# user, without a network.
#
#   test/environments.sh [-v] [ENVIRONMENT]...
#
# In each environment the tests run once that signals, files, locales, processes, ports or threads can disturb. The
# script prints a table with a row for each environment; its last line is 'N passed, N failed' for all of them. -v also
# shows the tests' own output. Where an environment needs more than the tests do (root, a locale, a name space), its row
# says what is missing. Needs what `make test-programs` builds in build/; BUILD=folder names another folder. The exit
# status is 0 if the tests passed in every environment that could be made.
set -u
cd "$(dirname "$0")/.." || exit 2
BUILD=${BUILD:-build}
verbose=
if [ "${1-}" = -v ]; then
    verbose=yes
    shift
fi

# Two kills instead of fifty: what kills find does not depend on these environments.
export CHECKPOINT_KILLS="${CHECKPOINT_KILLS:-2}" TRAIN_GPT="$BUILD/train_gpt"
# What passed in one environment may fail in the next one.
export TEST_STAMPS=0
tests="$(for unit in signals checkpoint control control_start collectives cpu_features dataloader host_collectives launch log options tokenizer \
    vocabulary work_thread memory_limits plan_report; do echo "$BUILD/test/unit_$unit"; done)
    $(printf 'test/test_%s\n' environment.py cli.py checkpoints.py gpu_scripts.py parallel.py:Launchers parallel.py:Faults)"
# Runs the tests by a command that makes the environment, if there is one.
# shellcheck disable=SC2086
run() { "$@" test/run.py $tests; }

scratch=$(mktemp -d) || exit 2
trap 'rm -rf "$scratch"' EXIT
chmod 755 "$scratch"

# ---- the environments: each prints the tests' output, or "missing: what it needs" ----

as_it_is() { run; }
# Like `nohup make test &` in a script.
# shellcheck disable=SC2016
in_the_background() { run sh -c 'trap "" INT QUIT HUP; "$@" <&- & wait $!' sh; }
turkish() { # its lower case of I is another letter, its decimal point is a comma
    if ! locale -a 2>/dev/null | grep -qi '^tr_TR\.utf-\{0,1\}8$'; then
        echo "missing: the locale, which localedef -i tr_TR -f UTF-8 tr_TR.UTF-8 makes"
        return
    fi
    run env LC_ALL=tr_TR.UTF-8 LANG=tr_TR.UTF-8
}
without_locale() { run env -u LANG LC_ALL=C; }
umask_077() { (umask 077 && run); }
one_core() { run taskset -c 0; }
many_threads() { run env OMP_NUM_THREADS=8 OPENBLAS_NUM_THREADS=8; }
# shellcheck disable=SC3045
few_files() { (ulimit -n 256 && run); }
in_a_job_step() { # a shell that srun or mpirun has started, with their variables
    run env SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=1 SLURM_NTASKS=4 OMPI_COMM_WORLD_SIZE=2 \
        OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_RANK=1 PMI_RANK=1 PMI_SIZE=2 RANK=1 WORLD_SIZE=2 LOCAL_RANK=1
}
# Like cron: hardly a variable, and no standard input.
bare() { run env -i TEST_STAMPS=0 PATH="$PATH" CHECKPOINT_KILLS="$CHECKPOINT_KILLS" TRAIN_GPT="$TRAIN_GPT" <&-; }
spaces_in_tmpdir() {
    mkdir -p "$scratch/two  words"
    run env TMPDIR="$scratch/two  words"
}
read_only_tmp() {
    if ! unshare -m true 2>/dev/null; then
        echo "missing: the right to mount, which root has"
        return
    fi
    case $PWD/ in
    /tmp/* | /var/tmp/*)
        echo "missing: a checkout outside of /tmp, which the mount hides"
        return
        ;;
    esac
    # shellcheck disable=SC2016
    run unshare -m sh -c 'mount -t tmpfs -o ro none /tmp && mount -t tmpfs -o ro none /var/tmp && exec "$@"' sh env -u TMPDIR
}
no_network() {
    if ! unshare -n ip link set lo up 2>/dev/null; then
        echo "missing: the right to a network name space, which root has, and ip"
        return
    fi
    # shellcheck disable=SC2016
    run unshare -n sh -c 'ip link set lo up && exec "$@"' sh
}
# Copies the tree with what is built of it, except for one program, which must be built there.
copy_tree() {
    mkdir -p "$1/$BUILD/test" && cp -R Makefile ./*.c ./*.h ./*.cuh docs config formats kernels memory model optimizer run runtime scripts test zero README.md "$1" &&
        cp "$BUILD/train_gpt" "$1/$BUILD" && cp "$BUILD"/test/unit_* "$1/$BUILD/test" && rm "$1/$BUILD/test/unit_launch"
}
make_one() { "$@" make CUDA= "$BUILD/test/unit_launch" >"$scratch/make" 2>&1 || cat "$scratch/make"; }
spaces_in_path() {
    copy_tree "$scratch/a  path" && (cd "$scratch/a  path" && make_one && run)
}
as_nobody() {
    setpriv --reuid 65534 --regid 65534 --clear-groups env HOME="$scratch/nobody/home" PATH="$scratch/nobody/bin:$PATH" "$@"
}
other_user() {
    if [ "$(id -u)" != 0 ] || ! command -v setpriv >/dev/null; then
        echo "missing: root, to become another user, and setpriv"
        return
    fi
    copy_tree "$scratch/nobody" && mkdir "$scratch/nobody/home" "$scratch/nobody/bin"
    python=$(python3 -c 'import sys; print(sys.executable)')
    if ! as_nobody "$python" -c pass 2>/dev/null; then
        python=/usr/bin/python3 # instead of one that lies where only root may enter
    fi
    ln -s "$python" "$scratch/nobody/bin/python3"
    chown -R 65534:65534 "$scratch/nobody"
    (cd "$scratch/nobody" && make_one as_nobody && run as_nobody)
}

all='as_it_is in_the_background turkish without_locale umask_077 one_core many_threads few_files in_a_job_step bare
    spaces_in_tmpdir spaces_in_path read_only_tmp no_network other_user'

failures=0 all_passed=0 all_failed=0
printf '%-20s %8s %8s %8s %8s\n' environment passed failed skipped seconds
# shellcheck disable=SC2086
[ $# -gt 0 ] || set -- $all
for environment in "$@"; do
    begin=$(date +%s)
    "$environment" >"$scratch/output" 2>&1
    if [ -n "$verbose" ]; then
        cat "$scratch/output"
    fi
    skipped=$(sed -n 's/^\([0-9]*\) skipped$/\1/p' "$scratch/output")
    if grep -q '^missing: ' "$scratch/output"; then
        printf '%-20s %s\n' "$environment" "$(cat "$scratch/output")"
    elif counts=$(sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed$/\1 \2/p' "$scratch/output" | tail -n 1) && [ -n "$counts" ]; then
        printf '%-20s %8d %8d %8d %8d\n' "$environment" "${counts% *}" "${counts#* }" "${skipped:-0}" $(($(date +%s) - begin))
        all_passed=$((all_passed + ${counts% *})) all_failed=$((all_failed + ${counts#* }))
        if [ "${counts#* }" -gt 0 ]; then
            failures=$((failures + 1))
            [ -n "$verbose" ] || awk '!/^    /{ shown = /^failed: / } shown' "$scratch/output"
        fi
    else
        failures=$((failures + 1)) all_failed=$((all_failed + 1))
        printf '%-20s did not end: %s\n' "$environment" "$(tail -n 3 "$scratch/output")"
    fi
done
if [ $((all_passed + all_failed)) -gt 0 ]; then # else each of them lacks something, and its row is the last line
    echo "$all_passed passed, $all_failed failed"
fi
[ "$failures" -eq 0 ]
