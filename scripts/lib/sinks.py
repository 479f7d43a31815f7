"""Where images go in a benchmark: a folder in memory or on a disk, and how fast that takes bytes by itself.

A file system in memory with ordinary pages of 4 KiB takes about 2 GB/s on some virtual machines, whatever the threads: each
page is looked for, charged and zeroed alone. With huge pages (`mount -t tmpfs -o huge=always`) one thread was six times as
fast there. So a benchmark that is not told where its images go has such a file system of its own, and measures both.
"""

import contextlib
import ctypes
import mmap
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time

CHUNK = 4 << 20


def available():
    """Bytes of memory that there is room for."""
    with open("/proc/meminfo") as file:
        return int(re.search(r"MemAvailable:\s+(\d+)", file.read()).group(1)) * 1024


def free(folder):
    """Bytes that files there may take; where they are in memory, as many as it has room for."""
    return min(shutil.disk_usage(folder).free, available())


@contextlib.contextmanager
def in_memory(folder, huge):
    """A file system in memory, with huge pages or ordinary ones; None where none can be mounted."""
    place = tempfile.mkdtemp(dir=folder)
    options = f"size=95%,huge={'always' if huge else 'never'}"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True)
    try:
        yield place if done.returncode == 0 else None
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "--lazy", place], check=True)
        os.rmdir(place)


def have_run_in_memory():
    """Sees to it that /run is in memory for this process and those that it starts. Where that cannot be had, it stays as it is."""
    if describe("/run").startswith("on tmpfs") or os.geteuid() != 0:
        return
    before = tempfile.mkdtemp()
    new_mount_namespace = 0x20000
    steps = (["mount", "--make-rprivate", "/"], ["mount", "--bind", "/run", before],
             ["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run"])
    if ctypes.CDLL(None).unshare(new_mount_namespace) != 0 or any(subprocess.run(it, capture_output=True).returncode != 0 for it in steps):
        subprocess.run(["umount", "--lazy", before], capture_output=True)
        os.rmdir(before)
        return
    for name in os.listdir(before):
        if name.startswith("criu."):  # what CRIU could not keep
            continue
        there, here = os.path.join(before, name), os.path.join("/run", name)
        if os.path.islink(there):
            os.symlink(os.readlink(there), here)
            continue
        if os.path.isdir(there):
            os.makedirs(here, exist_ok=True)
        else:
            open(here, "w").close()
        subprocess.run(["mount", "--bind", there, here], check=True)
    # What is bound stays.
    subprocess.run(["umount", "--lazy", before], check=True)
    os.rmdir(before)


@contextlib.contextmanager
def images(asked, folder):
    """Where images go: below a folder that was asked for, in memory with huge pages, or in /dev/shm. All in it is removed."""
    with contextlib.ExitStack() as stack:
        place = asked or stack.enter_context(in_memory(folder, True)) or "/dev/shm"
        yield stack.enter_context(tempfile.TemporaryDirectory(dir=place))


def describe(folder):
    """What a folder is on, as `/proc/mounts` has it."""
    with open("/proc/mounts") as file:
        mounts = [line.split() for line in file]
    best = max((it for it in mounts if (folder + "/").startswith(it[1].rstrip("/") + "/")), key=lambda it: len(it[1]))
    return f"on {best[2]} ({best[3]})"


def in_threads(do, count):
    """Calls it in so many threads, with their numbers, and returns nanoseconds."""
    threads = [threading.Thread(target=do, args=(i,)) for i in range(count)]
    begin = time.monotonic_ns()
    for it in threads:
        it.start()
    for it in threads:
        it.join()
    return time.monotonic_ns() - begin


def chunks(size):
    """Offsets of chunks, for threads that take the next one each."""
    lock, offsets = threading.Lock(), iter(range(0, size, CHUNK))

    def take():
        with lock:
            return next(offsets, None)
    return iter(take, None)


def touch(size, threads, seconds):
    """Has so much memory be there once, as far as that takes no longer: on some machines it is slow the first time. Bytes, and
    GB/s."""
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    view = ctypes.c_char.from_buffer(memory)
    address, offsets, end, done = ctypes.addressof(view), chunks(size), time.monotonic() + seconds, [0] * threads

    def fill(thread):
        for offset in offsets:
            length = min(CHUNK, size - offset)
            ctypes.memset(address + offset, 1, length)
            done[thread] += length
            if time.monotonic() >= end:
                return
    try:
        took = in_threads(fill, threads)
        return sum(done), sum(done) / took
    finally:
        del view
        memory.close()


def write_rate(folder, size, threads, files=1):
    """GB/s at which so many threads write so many new files, of this size together. What they write is in memory before."""
    source, each = memoryview(bytearray(os.urandom(1 << 16) * (CHUNK >> 16))), size // files
    paths = [f"{folder}/sink-{i}" for i in range(files)]
    opened = [(os.open(path, os.O_RDWR | os.O_CREAT), chunks(each)) for path in paths]

    def write(thread):
        file, offsets = opened[thread % files]
        for offset in offsets:
            os.pwrite(file, source[:each - offset], offset)
    try:
        return files * each / in_threads(write, threads)
    finally:
        for path, (file, _) in zip(paths, opened):
            os.close(file)
            os.unlink(path)
