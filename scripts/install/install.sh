#!/bin/sh
# Installs what was built, or removes it: `make install` and `make uninstall` call this.
#
#   scripts/install/install.sh install|remove BUILD DESTDIR PREFIX
#
# BUILD is the folder of the build. Files go below DESTDIR, for packages, as if DESTDIR were the root. The scripts lie in
# share/train_gpt; bin has a command for each script that users call, which finds its script from where itself lies.
# DOCDIR and ZSHDIR in the environment name other folders below PREFIX for the pages and for zsh's completion.
set -eu
action=$1 build=$2
root=$3$4
doc=$root/${DOCDIR:-share/doc/train_gpt}
share=$root/share/train_gpt
cd "$(dirname "$0")/../.."

# The scripts that users call, and programs of the build that scripts start, where they were built.
commands="prepare_data train_tokenizer plot_loss report follow chat_format convert_tasks get to_gguf"
helpers="tokenize_text"

# Prints the modules of scripts/ that the commands import, and those that these modules import.
modules() {
    seen=" $commands "
    new=$commands
    while [ -n "$new" ]; do
        imported=$(for name in $new; do sed -n 's/^ *\(import\|from\) \([a-z_]*\).*/\2/p' "scripts/$name.py"; done | sort -u)
        new=
        for name in $imported; do
            case $seen in *" $name "*) continue ;; esac
            [ ! -e "scripts/$name.py" ] || { new="$new $name" && seen="$seen$name " && echo "$name"; }
        done
    done
}

command_of() { echo "$root/bin/train_gpt-$(echo "$1" | tr _ -)"; }
page_of() { echo "$root/share/man/man1/train_gpt-$(echo "$1" | tr _ -).1"; }

# Prints FROM and TO of what is copied as it is and belongs to no folder of ours, a line each.
single_files() {
    echo "$build/reference/train_gpt.1 $root/share/man/man1/train_gpt.1"
    echo "$build/reference/train_gpt.bash $root/share/bash-completion/completions/train_gpt"
    echo "$build/reference/train_gpt.zsh $root/${ZSHDIR:-share/zsh/site-functions}/_train_gpt"
}

remove() {
    rm -f "$root/bin/train_gpt"
    for name in $commands; do rm -f "$(command_of "$name")" "$(page_of "$name")"; done
    single_files | while read -r _ to; do rm -f "$to"; done
    rm -rf "$share" "$doc" "$root/libexec/train_gpt"
}

# Ends the script where the nearest folder above $root that exists can't be written.
check_root() {
    above=$root
    while [ ! -e "$above" ]; do above=$(dirname "$above"); done
    [ -d "$above" ] && [ -w "$above" ] && return
    echo "install.sh: $root can't be written; sudo make install, or another folder by PREFIX=" >&2
    exit 2
}

# Ends the script where the program starts in the build's folder and does not start from where it was installed.
check_program() {
    "$build/train_gpt" --version >/dev/null 2>&1 || return 0 # of another machine
    why=$("$root/bin/train_gpt" --version 2>&1 >/dev/null) && return
    echo "install.sh: the program does not start from $root/bin: $why; it was built with libraries of .deps, which stay" \
        "where they are: install them (scripts/setup.sh build) and build by make DEPS=" >&2
    exit 2
}

install_all() {
    check_root
    remove # an older version may have other files
    install -D -m 755 "$build/train_gpt" "$root/bin/train_gpt"
    for name in $commands; do
        install -D -m 755 "scripts/$name.py" "$share/$name.py"
        cat >"$(command_of "$name")" <<EOF
#!/bin/sh
prefix=\$(dirname "\$(dirname "\$(readlink -f "\$0")")")
PATH="\$prefix/libexec/train_gpt:\$PATH" exec python3 -B "\$prefix/share/train_gpt/$name.py" "\$@"
EOF
        chmod 755 "$(command_of "$name")"
    done
    for name in $helpers; do
        [ ! -e "$build/$name" ] || install -D -m 755 "$build/$name" "$root/libexec/train_gpt/$name"
    done
    install -m 644 scripts/report_page.html "$share/report_page.html"
    for name in $(modules); do install -m 644 "scripts/$name.py" "$share/$name.py"; done
    single_files | while read -r from to; do install -D -m 644 "$from" "$to"; done
    for name in $commands; do echo ".so man1/train_gpt.1" >"$(page_of "$name")" && chmod 644 "$(page_of "$name")"; done
    find README.md CHANGELOG.md docs -name '*.md' -o -name '*.svg' | while read -r page; do
        install -D -m 644 "$page" "$doc/$page"
    done
    check_program
    [ -n "$quiet" ] || say_what
}

# Prints what was installed, and for which CPUs.
say_what() {
    echo "installed into $root: $("$build/train_gpt" --version 2>/dev/null | head -n 1)"
    "$build/train_gpt" --version 2>/dev/null | sed -n 's/^cpu .*, for \([^:]*\):.*/\1/p' | head -n 1 | while read -r level; do
        case $level in
        native) echo "for CPUs like this one; make ARCH=x86-64-v3 (or armv8-a) builds one program for all CPUs from that on" ;;
        *) echo "for CPUs from $level on" ;;
        esac
    done
}

quiet=${QUIET-}
case $action in
install) install_all ;;
remove) remove ;;
esac
