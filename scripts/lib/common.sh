# shellcheck shell=bash
# Helpers that every script here sources. Sourcing has no effect but these names.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
target=${CARGO_TARGET_DIR:-$root/target}
toolchain=$root/.toolchain
tree=$root/.trixie/root      # a Debian trixie root directory with CRIU 4.1 and podman
criu_next=$root/.trixie/criu-4.2 # files of CRIU 4.2, a layer over the tree
mpi_layer=$root/.trixie/openmpi  # files of Open MPI, a layer over the tree
systemd_layer=$root/.trixie/systemd # files of systemd, a layer over the tree
docker_layer=$root/.trixie/docker   # files of Docker, a layer over the tree
incus_layer=$root/.trixie/incus     # files of LXC, Incus and a registry of images, a layer over the tree
nccl=$root/.trixie/nccl          # NCCL's library
bookworm=$root/.trixie/bookworm  # a Debian bookworm root directory, which has no CRIU that does
machine=$root/.trixie/machine    # the disk of a virtual machine, with its kernel
: "$target" "$toolchain" "$tree" "$criu_next" "$mpi_layer" "$systemd_layer" "$docker_layer" "$incus_layer" "$nccl" "$bookworm" "$machine"

# Name of the running script, for messages.
me=${0##*/}

say() { printf '%s: %s\n' "$me" "$*"; }
warn() { printf '%s: %s\n' "$me" "$*" >&2; }
die() {
    warn "$@"
    exit 1
}

have() { command -v "$1" >/dev/null 2>&1; }

need_root() { [ "$(id -u)" -eq 0 ] || die "must run as root"; }

# The workspace's version, as in the top Cargo.toml.
version() { sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' "$root/Cargo.toml"; }

# Folder of one profile's build: `target_dir release`; of a target triple: `target_dir release TRIPLE`.
target_dir() { printf '%s\n' "$target${2:+/$2}/${1:-debug}"; }

# Build packages for glibc 2.28 by zig's linker, whatever glibc this machine has: `build_portable PROFILE PACKAGE...`. The same sources
# make the same files wherever they lie, and each has a build id, by which debuggers find its symbols.
build_portable() {
    local profile=$1 flags
    shift
    flags=(
        -Clink-arg=-Wl,--build-id=sha1
        "--remap-path-prefix=$root=/usr/src/rekindle" "--remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=/usr/src/cargo"
    )
    # Divided by a byte that no path has.
    (
        cd "$root"
        CARGO_ENCODED_RUSTFLAGS=$(IFS=$'\x1f' && printf '%s' "${flags[*]}")
        export CARGO_ENCODED_RUSTFLAGS PATH=$toolchain/bin:$PATH
        cargo zigbuild --quiet --profile "$profile" --target x86_64-unknown-linux-gnu.2.28 "${@/#/--package=}"
    )
}

# Build the tests that these options of `cargo test` select, and print the path of one of the test programs:
# `test_program NAME OPTION...`.
test_program() {
    local artefacts found
    # One line of JSON for each artefact.
    artefacts=$(cd "$root" && cargo test "${@:2}" --no-run --message-format=json-render-diagnostics)
    found=$(sed -n "s/.*\"kind\":\[\"test\"\].*\"name\":\"$1\".*\"executable\":\"\([^\"]*\)\".*/\1/p" <<<"$artefacts")
    [ -x "$found" ] || die "cargo names no test program $1"
    printf '%s\n' "$found"
}

# ID and VERSION_CODENAME of this machine's distribution, e.g. "debian bookworm".
distribution() { (. /etc/os-release && printf '%s %s\n' "${ID:-unknown}" "${VERSION_CODENAME:-unknown}"); }

# Run a command quietly; show its output only when it fails. $1 says what it does.
quietly() {
    local what=$1 log rc=0
    shift
    log=$(mktemp)
    "$@" >"$log" 2>&1 || rc=$?
    if [ "$rc" -ne 0 ]; then
        tail -n 30 "$log" >&2
        rm -f "$log"
        die "$what failed (exit $rc)"
    fi
    rm -f "$log"
}

# The steps that `timed` has completed, each "SECONDS WHAT", and the running one: its name and its start.
steps=() step='' step_start=''
script_start=$EPOCHREALTIME

# Run a step and say how long it took. Never in a condition (`timed ... ||`): there bash goes on after a failure in it.
timed() {
    local what=$1 start=$EPOCHREALTIME
    shift
    step=$what step_start=$start
    "$@"
    steps+=("$(seconds_since "$start") $what")
    say "$what: ${steps[-1]%% *} s"
    step=''
}

# Seconds since $1, a value of EPOCHREALTIME.
seconds_since() { awk -v a="$1" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }'; }

# Print the total time and the $1 longest steps; a step that still runs has failed. For an EXIT trap.
say_longest_steps() {
    [ -z "$step" ] || steps+=("$(seconds_since "$step_start") $step, which failed")
    say "$(seconds_since "$script_start") s in all, the longest parts:"
    printf '%s\n' "${steps[@]}" | sort -rn | awk -v n="$1" 'NR <= n { printf "    %8.1f s  %s\n", $1, substr($0, index($0, " ") + 1) }'
}
