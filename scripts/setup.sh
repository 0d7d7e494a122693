#!/bin/sh
# Checks that what a goal needs is here, and installs through apt what is missing.
#
#   scripts/setup.sh [build|test|demo|fuzz]
#   scripts/setup.sh --packages NAME...
#   scripts/setup.sh --into .deps [--minimal] [--architecture arm64]
#
# The second form installs Debian's packages by name, for a row of the long table (test/long.py).
# The third installs nothing. It downloads the libraries that the engine and its tests are built with (Debian's or
# Ubuntu's packages, for this machine's architecture) and unpacks them into a folder. The Makefile looks into .deps, so
# that this tree with that folder builds where packages can't be installed: no root, no network. --minimal leaves out the
# libraries of matmuls for CPUs: 1 MiB in place of 86, with which both targets build, the cpu target on its own
# loops. --architecture unpacks the packages of another one, by Debian's name, for `make CC=aarch64-linux-gnu-gcc DEPS=...`.
# MPI is not among them: it finds its parts by the paths that it was installed to, and must be the one whose mpirun
# starts the job.
#
# Each thing is looked for itself (a header that compiles, a command that is there), not its package, so that any
# distribution will do. Where nothing is missing, nothing is touched. The compiler, make, jansson, xxHash and PCRE2 must
# be here, Python for the demo, cmocka (and g++, which compiles the headers as C++) for the tests, clang with libFuzzer to
# fuzz; without oneDNN and OpenBLAS the engine builds on its own loops, more slowly. Without MPI it builds too, and several
# processes find each other by srun or --rendezvous; where there is no mpicc Open MPI is installed.
set -u

into=
architecture= # this machine's
unpacked="libjansson-dev libxxhash-dev libpcre2-dev libcmocka-dev"
if [ "${1-}" = --into ]; then
    into=${2-}
    [ $# -lt 2 ] || shift 2
    matmuls="libdnnl-dev libopenblas-openmp-dev"
    while [ $# -gt 0 ]; do
        case $1 in
        --minimal) matmuls= && shift ;;
        --architecture) architecture=${2-} && shift $(($# > 1 ? 2 : 1)) && [ -n "$architecture" ] || into= ;;
        *) into= && break ;;
        esac
    done
    if [ -z "$into" ]; then
        echo "setup.sh: --into needs the folder to unpack into, and may be followed by --minimal and --architecture NAME;" \
            "the Makefile looks into .deps" >&2
        exit 2
    fi
    unpacked="$unpacked $matmuls"
    set --
fi
packages=
if [ "${1-}" = --packages ]; then
    shift
    packages=$*
    set -- build
fi
goal=${1-build}
case $goal in
build | test | demo | fuzz) ;;
*)
    echo "setup.sh: '$goal' is no goal; expected build, test, demo or fuzz" >&2
    exit 2
    ;;
esac

deps=$(dirname "$0")/../.deps/usr # what --into .deps unpacked
CC=${CC:-gcc}
CXX=${CXX:-g++}

have_command() { command -v "$1" >/dev/null 2>&1; }
# CC may be a command with options, so it is split on purpose. The four come before cmocka.h, which needs them.
# shellcheck disable=SC2086
have_header() {
    printf '#include <%s>\n' stdarg.h stddef.h stdint.h setjmp.h "$1" | $CC -DPCRE2_CODE_UNIT_WIDTH=8 -isystem "$deps/include" -E -x c - >/dev/null 2>&1
}
# Debian keeps OpenBLAS's header in a folder of its architecture, one for each kind of threads.
have_openblas() {
    multiarch=$($CC -print-multiarch 2>/dev/null)
    for root in "$deps" /usr; do
        [ -e "$root/include/$multiarch/openblas-openmp/cblas.h" ] && return
        [ -e "$root/include/openblas/cblas.h" ] && return
    done
    return 1
}
# gcc alone is not enough: stdio.h comes with the C library's own package.
have_compiler() { have_command "${CC%% *}" && have_header stdio.h; }
# Debian has the libraries of clang's sanitizers and of libFuzzer in a package of their own, by version.
have_fuzzer() {
    [ -f "$(clang -print-runtime-dir 2>/dev/null)/libclang_rt.fuzzer-$(uname -m).a" ] ||
        [ -f "$(clang -print-runtime-dir 2>/dev/null)/libclang_rt.fuzzer.a" ]
}
fuzzer_package() {
    version=$(clang -dumpversion 2>/dev/null || apt-cache depends clang 2>/dev/null | sed -n 's/.*Depends: clang-//p')
    version=${version:-14} # of Debian 12, where apt has no lists yet
    echo "libclang-rt-${version%%.*}-dev"
}

# The packages named and what they need.
# shellcheck disable=SC2086
closure_of() {
    apt-cache $lists depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances "$@" |
        grep -E '^[a-z0-9]' | sort -u
}
# Less what comes with a compiler and its C library: headers of another C library would be found before the machine's own.
# shellcheck disable=SC2086
packages_to_unpack() {
    of_the_compiler=$(closure_of libc6-dev libgomp1 libstdc++6) && [ -n "$of_the_compiler" ] &&
        closure_of $unpacked | grep -vxF "$of_the_compiler"
}
# shellcheck disable=SC2086
download_packages() {
    packages=$(packages_to_unpack 2>>"$download/log")
    [ -n "$packages" ] && (cd "$download" && apt-get -qq $lists download $packages) >>"$download/log" 2>&1
}
# Headers and shared libraries, of PCRE2 those for bytes, of xxHash the header alone. Links stand where a compiler looks that has no folder for its
# architecture, as outside of Debian.
keep_what_builds_read() {
    rm -rf "${1:?}/share" "${1:?}/bin" "$1"/lib/*/pkgconfig "$1"/lib/*/cmake "$1/include/cmockery"
    find "$1" \( -name '*.a' -o -name 'libxxhash.*' -o -name 'libpcre2-16.*' -o -name 'libpcre2-32.*' -o -name '*pcre2-posix.*' \
        -o -name pcre2posix.h -o -name 'libcmockery.*' \) -delete
    (cd "$1/lib" && for library in */lib*.so*; do ln -s "$library" .; done)
}
# Unpacks them into $into, less what no build reads. Replaces what was unpacked there before, and nothing else.
unpack_into() {
    if ! have_command apt-get || ! have_command dpkg-deb; then
        echo "setup.sh: --into takes Debian's packages apart, which needs apt-get and dpkg-deb; run it on a machine that has" \
            "them and copy the folder" >&2
        exit 2
    fi
    if [ -e "$into/usr" ] && [ ! -e "$into/unpacked-by-setup.sh" ]; then
        echo "setup.sh: $into/usr is there and is none of --into's; name another folder" >&2
        exit 2
    fi
    download=$(mktemp -d) || exit 2
    trap 'rm -rf "$download"' EXIT
    # With the package lists that are here, or with fresh ones, kept apart because the system's are root's.
    lists=${architecture:+-o APT::Architecture=$architecture -o APT::Architectures=$architecture}
    if ! download_packages; then
        mkdir -p "$download/lists/partial" "$download/cache/archives/partial"
        lists="$lists -o Dir::State::Lists=$download/lists -o Dir::Cache=$download/cache"
        # shellcheck disable=SC2086
        apt-get -qq $lists -o Acquire::http::Timeout=20 update >"$download/log" 2>&1
        if ! download_packages; then
            echo "setup.sh: can't download $unpacked and what they need:" >&2
            sed 's/^/    /' "$download/log" >&2
            exit 2
        fi
    fi
    for package in "$download"/*.deb; do
        dpkg-deb -x "$package" "$download/tree" || exit 2
    done
    keep_what_builds_read "$download/tree/usr"
    mkdir -p "$into" && echo "$packages" >"$into/unpacked-by-setup.sh" && rm -rf "${into:?}/usr" &&
        cp -a "$download/tree/usr" "$into/" || exit 2
    echo "setup.sh: unpacked into $into ($(du -sh "$into" | cut -f 1)): $(echo "$packages" | tr '\n' ' ')"
}

# Fills `required` and `optional` with the packages of what is missing.
find_missing() {
    required='' optional=''
    have_compiler || required="$required gcc libc6-dev"
    have_command make || required="$required make"
    have_header jansson.h || required="$required libjansson-dev"
    have_header xxhash.h || required="$required libxxhash-dev"
    have_header pcre2.h || required="$required libpcre2-dev"
    if [ "$goal" = demo ]; then
        have_command python3 || required="$required python3"
    fi
    if [ "$goal" = test ]; then
        have_command "${CXX%% *}" || required="$required g++"
        have_command python3 || required="$required python3"
        have_header cmocka.h || required="$required libcmocka-dev"
    fi
    if [ "$goal" = fuzz ]; then
        have_command clang || required="$required clang"
        have_fuzzer || required="$required $(fuzzer_package)"
        return # the parsers need no matmuls
    fi
    if [ "$goal" = test ] && ! python3 -c 'import jinja2' 2>/dev/null; then # chat templates
        optional="$optional python3-jinja2"
    fi
    # mpirun is how several ranks are started, so every build takes MPI along.
    have_command mpicc || optional="$optional libopenmpi-dev"
    have_command mpirun || optional="$optional openmpi-bin"
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

if [ -n "$into" ]; then
    unpack_into
    exit 0
fi
if [ -n "$packages" ]; then
    if ! have_command apt-get || ! as_root=$(root_prefix); then
        echo "setup.sh: can't install $packages, which needs apt-get and root" >&2
        exit 2
    fi
    required=" $packages" optional=
    install_missing
    exit
fi

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
    echo "setup.sh: going on with slower matmuls, without mpirun or with fewer tests ($hint$optional)" >&2
fi
if [ -n "$required" ]; then
    echo "setup.sh: '$goal' needs more than is here; $hint$required$optional" >&2
    exit 2
fi
echo "setup.sh: everything that '$goal' needs is here"
