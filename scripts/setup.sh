#!/bin/sh
# Checks that what a goal needs is here, and installs through apt what is missing.
#
#   scripts/setup.sh [build|test|demo]
#
# Each thing is looked for itself (a header that compiles, a command that is there), not its package, so that any
# distribution will do. Where nothing is missing, nothing is touched. The compiler and make must be here, Python for the
# demo, cmocka (and g++, which compiles the headers as C++) for the tests; without oneDNN and OpenBLAS the engine builds
# on its own loops, more slowly.
set -u

goal=${1-build}
case $goal in
build | test | demo) ;;
*)
    echo "setup.sh: '$goal' is no goal; expected build, test or demo" >&2
    exit 2
    ;;
esac

CC=${CC:-gcc}
CXX=${CXX:-g++}

have_command() { command -v "$1" >/dev/null 2>&1; }
# CC may be a command with options, so it is split on purpose. The four come before cmocka.h, which needs them.
# shellcheck disable=SC2086
have_header() {
    printf '#include <%s>\n' stdarg.h stddef.h stdint.h setjmp.h "$1" | $CC -E -x c - >/dev/null 2>&1
}
# Debian keeps OpenBLAS's header in a folder of its architecture, one for each kind of threads.
have_openblas() {
    multiarch=$($CC -print-multiarch 2>/dev/null)
    [ -e "/usr/include/$multiarch/openblas-openmp/cblas.h" ] || [ -e /usr/include/openblas/cblas.h ]
}
# gcc alone is not enough: stdio.h comes with the C library's own package.
have_compiler() { have_command "${CC%% *}" && have_header stdio.h; }

# Fills `required` and `optional` with the packages of what is missing.
find_missing() {
    required='' optional=''
    have_compiler || required="$required gcc libc6-dev"
    have_command make || required="$required make"
    if [ "$goal" = demo ]; then
        have_command python3 || required="$required python3"
    fi
    if [ "$goal" = test ]; then
        have_command "${CXX%% *}" || required="$required g++"
        have_command python3 || required="$required python3"
        have_header cmocka.h || required="$required libcmocka-dev"
    fi
    have_header oneapi/dnnl/dnnl.h || optional="$optional libdnnl-dev"
    have_openblas || optional="$optional libopenblas-openmp-dev"
}

# How to become root: nothing to add, sudo that asks no password, or not at all.
root_prefix() {
    if [ "$(id -u)" = 0 ]; then
        echo env
    elif have_command sudo && sudo -n true 2>/dev/null; then
        echo "sudo -n env"
    else
        return 1
    fi
}

# shellcheck disable=SC2086
apt_get() {
    $as_root DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::http::Timeout=20 -o DPkg::Lock::Timeout=120 "$@"
}
# The lists of packages are fetched only when apt can't do with those it has; and a package that the system does not
# offer must not keep the others away.
# shellcheck disable=SC2086
install_missing() {
    echo "setup.sh: installing$required$optional" >&2
    apt_get install -y --no-install-recommends $required $optional >/dev/null 2>&1 && return
    apt_get update >/dev/null
    apt_get install -y --no-install-recommends $required $optional >/dev/null 2>&1 && return
    for package in $required $optional; do
        apt_get install -y --no-install-recommends "$package" >/dev/null
    done
}

find_missing
if [ -z "$required$optional" ]; then
    echo "setup.sh: everything for '$goal' is here"
    exit 0
fi

if have_command apt-get && as_root=$(root_prefix); then
    install_missing
    find_missing
fi

command="sudo apt-get update && sudo apt-get install -y"
if have_command apt-get; then
    hint="run: $command"
else
    hint="install what Debian calls"
fi
if [ -n "$optional" ]; then
    echo "setup.sh: going on without faster matmuls ($hint$optional)" >&2
fi
if [ -n "$required" ]; then
    echo "setup.sh: '$goal' needs more than is here; $hint$required$optional" >&2
    exit 2
fi
echo "setup.sh: everything that '$goal' needs is here"
