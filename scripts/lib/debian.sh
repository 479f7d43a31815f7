# shellcheck shell=bash
# Getting Debian's packages of any release without touching this machine's apt. Source common.sh before this.

# shellcheck disable=SC2034 # for those who source this
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

# The mirror that apt uses here already; whatever reaches this machine's packages reaches trixie's.
mirror() {
    local uri=${REKINDLE_DEBIAN_MIRROR:-}
    if [ -z "$uri" ] && [[ $(distribution) == debian\ * ]]; then
        uri=$(cat /etc/apt/sources.list.d/*.sources 2>/dev/null | awk '$1 == "URIs:" && $2 ~ /\/debian\/?$/ { print $2; exit }')
        [ -n "$uri" ] || uri=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null |
            awk '$1 == "deb" { for (i = 2; i <= NF; i++) if ($i ~ /\/debian\/?$/) { print $i; exit } }')
    fi
    [ -n "$uri" ] || die "no Debian mirror in apt's sources: set REKINDLE_DEBIAN_MIRROR to one"
    printf '%s\n' "$uri"
}

# Packages of a suite of Debian's, unpacked into DIR/files: fetch SUITE DIR PACKAGE...
fetch() {
    local suite=$1 new=$2 apt deb
    shift 2
    rm -rf "$new"
    mkdir -p "$new/apt/lists/partial" "$new/apt/cache/archives/partial" "$new/apt/etc/preferences.d" "$new/files"
    echo "deb [signed-by=$keyring] $(mirror) $suite main" >"$new/apt/etc/sources.list"
    : >"$new/apt/status" # nothing is installed: versions of this machine's are no candidates
    # A private apt: this machine's lists, sources and pins stay as they are.
    apt=(
        -o "Dir::State::Lists=$new/apt/lists" -o "Dir::State::Status=$new/apt/status" -o "Dir::Cache=$new/apt/cache"
        -o "Dir::Etc::SourceList=$new/apt/etc/sources.list" -o Dir::Etc::SourceParts=/dev/null
        -o Dir::Etc::Preferences=/dev/null -o "Dir::Etc::PreferencesParts=$new/apt/etc/preferences.d"
        -o APT::Architecture=amd64 -o APT::Architectures=amd64 -o APT::Sandbox::User=root
        -o Acquire::Languages=none -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false
    )
    quietly "reading $suite's package list" apt-get "${apt[@]}" update
    (cd "$new/apt" && quietly "download from $suite" apt-get "${apt[@]}" download "$@")
    for deb in "$new"/apt/*.deb; do dpkg-deb -x "$deb" "$new/files"; done
    rm -rf "$new"/files/usr/share/{doc,man,lintian}
    printf '%s' "$*" >"$new/files/.packages"
}
