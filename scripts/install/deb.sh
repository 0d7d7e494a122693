#!/bin/sh
# Makes a package of Debian of a build: scripts/install/deb.sh BUILD FOLDER writes
# FOLDER/train-gpt_VERSION-1_ARCHITECTURE.deb.
# `make deb` calls this. Needs dpkg-deb and dpkg-shlibdeps (Debian: dpkg, dpkg-dev) and binutils. DEBFULLNAME and
# DEBEMAIL name the package's maintainer, as for Debian's own tools.
set -eu
build=$1 folder=$2
for tool in dpkg-deb dpkg-shlibdeps strip; do
    command -v "$tool" >/dev/null || { echo "deb.sh: $tool is missing; install dpkg-dev and binutils" >&2 && exit 2; }
done
version=$(sed -n 's/^#define TRAIN_GPT_VERSION "\(.*\)".*/\1/p' config/config.h)-1
architecture=$(dpkg --print-architecture)
stage=$(pwd)/$build/package
package=$folder/train-gpt_${version}_$architecture.deb
level=$("$build/train_gpt" --version | sed -n 's/^cpu .*, for \([^:]*\):.*/\1/p' | head -n 1)
case $level in
native) cpus="CPUs like the one that it was built on" ;;
*) cpus="CPUs from $level on" ;;
esac
maintainer="${DEBFULLNAME:-Unknown} <${DEBEMAIL:-root@localhost}>"
if [ -z "${SOURCE_DATE_EPOCH-}" ] && [ -e .git ]; then
    SOURCE_DATE_EPOCH=$(git -c safe.directory='*' log -1 --format=%ct 2>/dev/null || date +%s)
fi
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH-$(date +%s)}"

rm -rf "$stage"
umask 022
QUIET=1 DOCDIR=share/doc/train-gpt ZSHDIR=share/zsh/vendor-completions scripts/install/install.sh install "$build" "$stage" /usr
helpers=$(find "$stage/usr/libexec" -type f 2>/dev/null || true)
# shellcheck disable=SC2086 # names without blanks
strip --strip-unneeded --remove-section=.comment --remove-section=.note "$stage/usr/bin/train_gpt" $helpers
gzip -9n "$stage"/usr/share/man/man1/*
doc=$stage/usr/share/doc/train-gpt
gzip -9nc CHANGELOG.md >"$doc/changelog.gz"
rm "$doc/CHANGELOG.md"
printf 'train-gpt (%s) unstable; urgency=medium\n\n  * Built of the source; changelog.gz has its changes.\n\n -- %s  %s\n' \
    "$version" "$maintainer" "$(LC_ALL=C date -u -R -d "@$SOURCE_DATE_EPOCH")" | gzip -9n >"$doc/changelog.Debian.gz"
echo "train_gpt. No license has been chosen yet: that is its owner's to decide." >"$doc/copyright"

# What the program is linked with, in the versions that it needs. dpkg-shlibdeps wants to stand beside a debian/control.
mkdir -p "$stage/DEBIAN" "$build/shlibdeps/debian"
echo "Source: train-gpt" >"$build/shlibdeps/debian/control"
# shellcheck disable=SC2086
needs=$(cd "$build/shlibdeps" && dpkg-shlibdeps -O "$stage/usr/bin/train_gpt" $helpers 2>/dev/null | sed -n 's/^shlibs:Depends=//p')
[ -n "$needs" ] || { echo "deb.sh: dpkg-shlibdeps finds no packages of the program's libraries" >&2 && exit 2; }

cat >"$stage/DEBIAN/control" <<EOF
Package: train-gpt
Version: $version
Architecture: $architecture
Maintainer: $maintainer
Installed-Size: $(du -sk --exclude=DEBIAN "$stage" | cut -f 1)
Depends: $needs, python3
Recommends: openmpi-bin
Suggests: python3-jinja2, gnuplot-nox | librsvg2-bin
Section: science
Priority: optional
Description: training of GPT-style transformers, on CPUs
 Trains, finetunes, scores and samples GPT-2, Llama, Qwen, Mistral, Gemma, OLMo
 and other models on shards of tokens. All memory is planned before the first
 step, and a run goes on from its checkpoints bit for bit.
 .
 This build is for $cpus, and has no part for GPUs.
 It takes the highest instruction set that a CPU has and that it knows.
EOF
(cd "$stage" && find usr -type f | LC_ALL=C sort | xargs -d '\n' md5sum) >"$stage/DEBIAN/md5sums"
dpkg-deb --root-owner-group --build "$stage" "$package" >/dev/null
echo "$package: $(($(stat -c %s "$package") >> 10)) KiB, for $cpus"
