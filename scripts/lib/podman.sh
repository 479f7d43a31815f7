# shellcheck shell=bash
# Podman inside `enter`: what it takes there, proven with podman 5.4, runc 1.1 and CRIU 4.1 and 4.2. Source this, then
#
#   container_image NAME
#   podman_ run -d "${podman_run[@]}" --name C NAME COMMAND...
#   podman_ container checkpoint --leave-running --export FILE C      or without the last two, which stops C
#   podman_ container restore C
#   podman_ container restore --import FILE --name OTHER              only from an image: `--rootfs` has none to name

# REKINDLE_RUNTIME=crun takes crun 1.21 instead of runc. All of this works with it too. With the hybrid layout its restore
# fails ("Restoring cpuset.cpus special property failed") for who is in the root of a v1 hierarchy, which `enter` is not.
#
# cgroupfs: there is no systemd inside. overlay: podman's storage is a tmpfs, on which its default is vfs.
podman_() {
    podman --cgroup-manager cgroupfs --runtime "${REKINDLE_RUNTIME:-runc}" --storage-driver overlay --log-level error "$@"
}

# Options of `podman run` that this machine needs. With the hybrid layout cgroup v2 lacks the pids controller, and podman's
# default limit makes runc fail.
podman_limits=()
grep -qw pids /sys/fs/cgroup/cgroup.controllers || podman_limits=(--pids-limit 0)
# And those of most containers. Network none: no bridge can be made everywhere, and CRIU need not lock one; a container
# has its own loopback all the same.
podman_run=(--network none "${podman_limits[@]}")

# A small image (4 MB): busybox, its shell, and the C library of the tree, so that built programs run in it from bind
# mounts. Nothing is fetched. $1 is its name.
#
# A container on an overlay of `/` instead would not do: inside `enter` that is an overlay already, and CRIU cannot dump
# what runs from an overlay over an overlay ("Can't lookup mount": the kernel shows its mappings as of an inner mount).
container_image() {
    local name=$1 dir
    dir=$(mktemp -d)
    mkdir -p "$dir"/{bin,dev,etc,lib64,proc,run,sys,tmp,usr/lib/x86_64-linux-gnu}
    ln -s usr/lib "$dir/lib"
    cp "$(command -v busybox)" "$dir/bin/busybox"
    chroot "$dir" /bin/busybox --install -s /bin
    cp -L /lib64/ld-linux-x86-64.so.2 "$dir/lib64/"
    cp -L /usr/lib/x86_64-linux-gnu/lib{c,m,dl,rt,pthread,resolv,gcc_s,stdc++}.so.[0-9] "$dir/usr/lib/x86_64-linux-gnu/"
    echo 'root:x:0:0:root:/:/bin/sh' >"$dir/etc/passwd"
    tar -C "$dir" -c . | podman_ import --quiet - "$name"
    rm -rf "$dir"
}
