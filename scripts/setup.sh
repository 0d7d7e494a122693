#!/bin/sh
# Checks that what a goal needs is installed, and installs what is missing by apt.
#
#   scripts/setup.sh [build|test|demo|fuzz]
#   scripts/setup.sh --packages NAME...
#   scripts/setup.sh --into .deps [--minimal] [--architecture arm64]
#
# The second form installs packages by Debian's names, for a row of the long table (test/long.py).
# The third form installs nothing. It downloads the libraries that the engine and its tests are built with (packages of
# Debian or Ubuntu, for this machine's architecture) and unpacks them into a folder. The Makefile looks into .deps: this
# tree with that folder builds without root and without a network. --minimal leaves out oneDNN and OpenBLAS, 1 MiB in
# place of 86: the cpu target then multiplies by its own loops. --architecture unpacks the packages of another
# architecture, by Debian's name of it, for `make CC=aarch64-linux-gnu-gcc DEPS=...`. MPI is not unpacked: it finds its
# parts by the paths that it was installed to, and must be the MPI whose mpirun starts the job.
#
# Each thing itself is looked for (a header that compiles, a command), not its package, so that any distribution will
# do. Where nothing is missing, nothing is touched. Every goal needs the compiler, make, jansson, xxHash and PCRE2; demo
# needs Python, test needs Python, cmocka and g++ (which compiles the headers as C++), and fuzz needs clang with
# libFuzzer. oneDNN and OpenBLAS make matmuls faster than the engine's own loops. Without MPI several processes find
# each other by srun or --rendezvous; Open MPI is installed where there is no mpicc.
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
# have_header NAME: whether the header is there. CC may have options, so it is split on purpose. cmocka.h needs the four
# headers before it.
# shellcheck disable=SC2086
have_header() {
    printf '#include <%s>\n' stdarg.h stddef.h stdint.h setjmp.h "$1" | $CC -DPCRE2_CODE_UNIT_WIDTH=8 -isystem "$deps/include" -E -x c - >/dev/null 2>&1
}
# Whether OpenBLAS's header is there. Debian has a folder for each architecture and kind of threads.
have_openblas() {
    multiarch=$($CC -print-multiarch 2>/dev/null)
    for root in "$deps" /usr; do
        [ -e "$root/include/$multiarch/openblas-openmp/cblas.h" ] && return
        [ -e "$root/include/openblas/cblas.h" ] && return
    done
    return 1
}
# Whether CC compiles, which takes the C library's package, too: stdio.h is in it.
have_compiler() { have_command "${CC%% *}" && have_header stdio.h; }
# Whether clang has libFuzzer. Debian has it, and the sanitizers' libraries, in a package for each version of clang.
have_fuzzer() {
    [ -f "$(clang -print-runtime-dir 2>/dev/null)/libclang_rt.fuzzer-$(uname -m).a" ] ||
        [ -f "$(clang -print-runtime-dir 2>/dev/null)/libclang_rt.fuzzer.a" ]
}
fuzzer_package() {
    version=$(clang -dumpversion 2>/dev/null || apt-cache depends clang 2>/dev/null | sed -n 's/.*Depends: clang-//p')
    version=${version:-14} # Debian 12's version, where apt has no lists yet
    echo "libclang-rt-${version%%.*}-dev"
}

# closure_of PACKAGE...: prints these packages and, recursively, what they need.
# shellcheck disable=SC2086
closure_of() {
    apt-cache $lists depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances "$@" |
        grep -E '^[a-z0-9]' | sort -u
}
# Prints what is to be unpacked. A compiler and its C library are left out: the headers of another C library would be
# found before the machine's own.
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
# keep_what_builds_read FOLDER: removes all but headers and shared libraries; PCRE2's only for bytes, of xxHash only the
# header. Links the libraries into lib, where a compiler looks that has no folder for its architecture, as outside of
# Debian.
keep_what_builds_read() {
    rm -rf "${1:?}/share" "${1:?}/bin" "$1"/lib/*/pkgconfig "$1"/lib/*/cmake "$1/include/cmockery"
    find "$1" \( -name '*.a' -o -name 'libxxhash.*' -o -name 'libpcre2-16.*' -o -name 'libpcre2-32.*' -o -name '*pcre2-posix.*' \
        -o -name pcre2posix.h -o -name 'libcmockery.*' \) -delete
    (cd "$1/lib" && for library in */lib*.so*; do ln -s "$library" .; done)
}
# Downloads the packages and unpacks into $into what builds read. Replaces only what was unpacked there before.
unpack_into() {
    if ! have_command apt-get || ! have_command dpkg-deb; then
        echo "setup.sh: --into takes Debian's packages apart, which needs apt-get and dpkg-deb; run it on a machine that has" \
            "them and copy the folder" >&2
        exit 2
    fi
    if [ -e "$into/usr" ] && [ ! -e "$into/unpacked-by-setup.sh" ]; then
        echo "setup.sh: $into/usr was not made by --into; name another folder" >&2
        exit 2
    fi
    download=$(mktemp -d) || exit 2
    trap 'rm -rf "$download"' EXIT
    # The package lists that are here may not do. Fresh lists go into a folder of their own: the system's are root's.
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

# Sets `required` and `optional` to the packages of what is missing.
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
    # mpirun starts several ranks, so every build takes MPI along.
    have_command mpicc || optional="$optional libopenmpi-dev"
    have_command mpirun || optional="$optional openmpi-bin"
    have_header oneapi/dnnl/dnnl.h || optional="$optional libdnnl-dev"
    have_openblas || optional="$optional libopenblas-openmp-dev"
}

# Prints what runs a command as root: `env` for root, or sudo where it asks no password. Fails where neither does.
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
# Installs what is missing. The lists of packages are fetched only where apt fails with the lists that it has. Then
# packages are installed one by one: a package that the system does not offer must not keep the others away.
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
