# shellcheck shell=bash
# What tests of packages share. Source scripts/lib/common.sh before this.

# shellcheck disable=SC2034 # for those who source this
apps=/usr/share/rekindle/apps
cd /root 2>/dev/null || cd /
export HOME=/root TERM=dumb LANG=C.UTF-8 LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive
work=$(mktemp -d)
# /run/rekindle is the machine's that runs the tests, unless systemd has booted here.
[ -d /run/systemd/system ] || mount -t tmpfs -o mode=755 tmpfs /run

fail() {
    warn "$@"
    [ ! -e "$work/apt.log" ] || tail -n 60 "$work/apt.log" >&2
    ! have journalctl || journalctl -u rekindled --no-pager -n 40 >&2 || true
    exit 1
}
# For $patience tenths of a second at most.
patience=600
until_ok() {
    local i
    for ((i = 0; i < patience; i++)); do
        "$@" >/dev/null 2>&1 && return 0
        sleep 0.1
    done
    fail "never came true: $*"
}
install() { apt-get -y --allow-downgrades --no-install-recommends install "$@" >>"$work/apt.log" 2>&1 || { cat "$work/apt.log" && fail "apt-get install"; }; }
# All files but those of package managers, and others that a test names.
files() {
    local prune=(-path /var/lib/dpkg -o -path /var/lib/apt -o -path /var/lib/rpm) each
    for each; do prune+=(-o -path "$each"); done
    find /usr /etc /opt /var/lib /run -xdev \( "${prune[@]}" \) -prune -o -print | sort
}
build() { basename "$(dirname "$(readlink -f /usr/lib/rekindle/libcuda.so.1)")"; }

# run NAME: starts a program that compares every step with the processor until NAME.end exists; its output is in NAME.out, its
# progress in NAME.progress, and $pid is its process.
run() {
    setsid rekindle run -- $apps/steady --until "$work/$1.end" --sleep-us 4000 --progress "$work/$1.progress" >"$work/$1.out" 2>"$work/$1.err" </dev/null &
    pid=$!
    advances "$1"
}
progress() { cat "$work/$1.progress" 2>/dev/null || echo 0; }
further() { [ "$(progress "$1")" -ge "$2" ]; }
advances() { until_ok further "$1" $(($(progress "$1") + 50)); }
# A worker comes to the next daemon within a second or so.
is_known() { [ "$(rekindle ps --json | grep -c "\"pid\": $1,")" = 1 ]; }
ended() { ! kill -0 "$1"; }
is_well() { [ "$(cat "$work/$1.out")" = "steady ok" ] || fail "$1 printed $(cat "$work/$1.out" "$work/$1.err")"; }
ends_well() {
    touch "$work/$1.end"
    until_ok ended "$2"
    is_well "$1"
}
