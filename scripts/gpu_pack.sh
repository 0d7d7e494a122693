#!/bin/sh
# Packs what scripts/gpu_check.sh needs on a machine that has a GPU and no network: this working tree without what git
# ignores, and the libraries of `setup.sh --into .deps --minimal`.
#
#   scripts/gpu_pack.sh [--programs] [--wheels FOLDER] [file, default build/train_gpt.tar.gz]
#
# On that machine:
#   tar xf train_gpt.tar.gz && train_gpt/scripts/gpu_check.sh folder_for_results
#
# --programs packs build/train_gpt and the programs of build/cuda as well, without their debug information, so that
# nothing need be compiled on that machine. docs/gpu/README.md says how to build them. gpu_check.sh runs them where
# --stages does not name build. A program that is older than one of its sources is refused: its figures would be put
# down to a commit that it was not built of. Where the file's name ends in .xz, xz packs, which takes minutes and a
# tenth of gzip's size: only then there is room for all op tests.
#
# --wheels packs the *.whl of a folder, for that machine's Python (`pip download -d FOLDER --only-binary=:all: --no-deps
# --python-version 3.12 --platform manylinux_2_28_x86_64 NAME`); gpu_check.sh installs them only for itself. A packed
# file of more than 60 MiB is refused.
set -eu
export LC_ALL=C # sort and uniq must compare alike: by bytes
wheels=''
programs=''
while :; do
    case "${1-}" in
    --programs)
        programs=yes
        shift
        ;;
    --wheels)
        wheels=$(cd "${2:?--wheels: the folder is missing}" && pwd)
        ls "$wheels"/*.whl >/dev/null
        shift 2
        ;;
    *) break ;;
    esac
done
root=$(cd "$(dirname "$0")/.." && pwd)
file=$(realpath -m "${1-$root/build/train_gpt.tar.gz}")
limit_mib=60
cd "$root"
extra=$(mktemp -d)
trap 'rm -rf "$extra"' EXIT
scripts/setup.sh --into "$extra/.deps" --minimal >/dev/null
if [ -n "$wheels" ]; then
    mkdir "$extra/.deps/wheels"
    cp "$wheels"/*.whl "$extra/.deps/wheels/"
fi
# sources_of PROGRAM: prints the sources that the compiler's .d files name; all of the tree's sources where there is no
# .d.
sources_of() {
    if [ ! -e "$1.d" ] && { [ "$1" != build/train_gpt ] || ! ls build/*.d >/dev/null 2>&1; }; then
        git ls-files '*.c' '*.h' '*.cuh' '*.cu'
        return
    fi
    for list in "$1.d" $([ "$1" != build/train_gpt ] || echo build/*.d) $(find build/library -name '*.d' 2>/dev/null); do
        [ ! -e "$list" ] || tr ' ' '\n' <"$list" | grep -E '^[^/].*\.(c|h|cuh|cu)$' || true
    done | sort -u
}
if [ -n "$programs" ]; then
    mkdir -p "$extra/build/cuda"
    for program in build/train_gpt build/cuda/*; do
        if [ ! -f "$program" ] || [ ! -x "$program" ]; then
            [ "$program" != build/train_gpt ] || { echo "gpu_pack.sh: build/train_gpt was not built" >&2 && exit 2; }
            continue
        fi
        newer=$(sources_of "$program" | while read -r source; do find "$source" -newer "$program" 2>/dev/null; done | head -n 1)
        if [ -n "$newer" ]; then
            echo "gpu_pack.sh: $newer is newer than $program: build the programs anew" >&2
            exit 2
        fi
        # MPI, oneDNN and OpenBLAS are not in .deps: a program that needs them does not start on that machine.
        missing=$(readelf -d "$program" | sed -n 's/.*NEEDED.*\[\(lib\(mpi\|dnnl\|openblas\)[^]]*\)\].*/\1/p' | tr '\n' ' ')
        if [ -n "$missing" ]; then
            echo "gpu_pack.sh: $program needs $missing: build it with MPI= ONEDNN= OPENBLAS=" >&2
            exit 2
        fi
        strip --strip-debug -o "$extra/$program" "$program"
    done
    cp build/cuda/ptxas_*.log "$extra/build/cuda/" 2>/dev/null || true # what scripts/ptxas_table.py reads
fi
git describe --always --dirty --abbrev=12 >"$extra/.packed_commit"
git ls-files -z --cached --others --exclude-standard >"$extra/names"
git ls-files -z --deleted >"$extra/deleted"
sort -z "$extra/names" "$extra/deleted" | uniq -zu >"$extra/there"
mkdir -p "$(dirname "$file")"
compress=gzip
case $file in
*.xz) compress="xz --lzma2=preset=5,dict=128MiB" ;; # finds kernels that programs share: a tenth of gzip's size
esac
tar -c --use-compress-program="$compress" -f "$file" --owner=0 --group=0 --transform='s,^,train_gpt/,S' --null --no-recursion -T "$extra/there" --recursion \
    -C "$extra" .deps .packed_commit ${programs:+build}
size=$(stat -c %s "$file")
if [ "$size" -gt $((limit_mib << 20)) ]; then
    echo "gpu_pack.sh: $file has $((size >> 20)) MiB, more than the $limit_mib that are to be carried; leave wheels, programs or data out" >&2
    exit 2
fi
echo "gpu_pack.sh: $file, $((size >> 10)) KiB; there: tar xf $(basename "$file") && train_gpt/scripts/gpu_check.sh folder_for_results"
