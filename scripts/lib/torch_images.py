"""Programs of tests/torch dumped many times while they go on, by one protocol, and restored from every image."""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time

from torch_program import Failed, Program, read, reaped, session

# CRIU's names of files that it links anew are unique in one dump, and in the folder where all programs' semaphores are.
ONE_TREE = threading.Lock()
AT_A_TIME = 7  # images of a program that there are at most, since they may be in memory


class LeftRunning(Program):
    """A program under one protocol. It has a folder of its own, so that several run at a time: images of one process need
    its process ids free, so those are restored one after another."""

    def __init__(self, of, protocol, place, images, keep):
        super().__init__(of.name, place, of.opts, of.criu, of.socket, f"{of.name}.{protocol}", of.steps)
        self.of, self.protocol, self.images, self.keep = of, protocol, images, keep
        self.native = of.native
        self.line = {"images": 0, "mispredicted_writes": 0, "failed": [], "used": {}, "steps": [], "stall_ms": [], "dump_s": [],
                     "restore_s": [], "mib": [], "not_tried": images}
        of.line["left_running"][protocol] = self.line

    def run(self):
        """Its line: how many images were restored and ended alike, and what went wrong with others."""
        started = time.monotonic()
        try:
            while self.line["not_tried"] and len(self.line["failed"]) < 3 and time.monotonic() < self.opts.deadline:
                self.some(min(self.line["not_tried"], AT_A_TIME))
        except Failed as what:
            self.fail(str(what))
        except subprocess.TimeoutExpired:
            self.fail("it hangs")
        self.line["seconds"] = round(time.monotonic() - started, 1)
        return self.line

    def fail(self, what):
        self.line["failed"].append(what[-600:])
        self.line["stderr"] = read(self.path("run.err"))[-800:]

    def hold_at(self, step):
        with open(self.path("hold"), "w") as file:
            file.write(f"{step:08}")  # always as long, for CRIU insists on the size of a file that was open

    def some(self, count):
        """Starts it and dumps it so often at moments of chance. After each it has steps to do while the image is copied,
        and stands there only if the dump takes longer."""
        last = self.of.line["steps"]
        unit = max(1, (last - 1) // (2 * count + 1))
        steps = [s for s in (2 * k * unit + self.random.randint(1, unit) for k in range(count)) if s < last]
        process = self.start("run", True, min(steps[0] + unit, last - 1), REKINDLE_PROTOCOL=self.protocol)
        images, tree = [], set()
        try:
            for step in steps:
                self.hold_at(min(step + unit, last - 1))
                self.wait_for(f"step {step}", lambda: self.progress() >= step, process)
                time.sleep(self.random.random() * 0.05)  # not always at a step's end
                tree.update(session(process.pid))
                image = self.dump_alive(process.pid, tree)
                if image:
                    images.append((step, image))
                else:
                    self.line["not_tried"] -= 1
            os.unlink(self.path("hold"))
            if process.wait(timeout=self.opts.limit) != 0:
                raise Failed(f"left running it ends with {process.returncode}")
            self.compare(self.native, read(self.path("run.out")), "left running")
            while images:
                step, image = images.pop(0)
                self.line["not_tried"] -= 1
                try:
                    self.restore_one(process, image, tree)
                    self.line["images"] += 1
                    self.line["steps"].append(step)
                except Failed as what:
                    self.fail(f"restored at step {step}: {what}")
                    self.let_go(process)
                shutil.rmtree(image)
                self.keep()
        finally:
            self.let_go(process)
            for _, image in images:
                shutil.rmtree(image)

    def dump_alive(self, pid, tree):
        """A dump's folder; None where the dump has failed by a mispredicted write."""
        image = tempfile.mkdtemp(dir=self.opts.image_folder or self.folder)
        # What CRIU finds of files when it restores must be as it was: how long what is printed is; temporary files and their
        # folders, which are gone when the program has ended, with sockets that CRIU binds there again; semaphores.
        script = os.path.join(image, "script")
        kept = " ".join(self.path(name) for name in ("progress", "progress.new", "hold"))
        with open(script, "w") as file:
            file.write(f"#!/bin/sh\n[ \"$CRTOOLS_SCRIPT_ACTION\" = post-dump ] || exit 0\n"
                       f"stat -c %s {self.path('run.out')} {self.path('run.err')} > {image}/sizes\n"
                       f"find {self.path('tmp')} -type d > {image}/folders\n"
                       f"mkdir {image}/kept {image}/shm {image}/tmp && cp -p {kept} {image}/kept 2>/dev/null\n"
                       f"(cd {self.path('tmp')} && find . -type f -exec cp -a --parents {{}} {image}/tmp \\;)\n"
                       f"for each in /dev/shm/link_remap.*; do\n"
                       f"[ ! -e $each ] || cp -a $(find /dev/shm -samefile $each) {image}/shm || exit 1; done\n")
        os.chmod(script, 0o755)
        with ONE_TREE if tree else contextlib.nullcontext():
            return self.dump_by(image, pid, script)

    def dump_by(self, image, pid, script):
        try:
            seconds = self.run_criu("dump", image, ["-t", str(pid), "-R", "--action-script", script])
        except Failed as what:
            shutil.rmtree(image)
            if what.kind != "mispredicted":
                raise
            self.line["mispredicted_writes"] += 1
            self.line.setdefault("wrong", str(what)[-400:])
            return None
        self.line["dump_s"].append(seconds)
        self.line["mib"].append(sum(os.stat(f"{image}/{name}").st_blocks for name in os.listdir(image)) // 2048)
        done = subprocess.run([f"{self.opts.stage}/bin/rekindle", "inspect", "--json", image], capture_output=True, text=True)
        about = json.loads(done.stdout or "{}")
        used = about.get("protocol", "unknown")
        self.line["used"][used] = self.line["used"].get(used, 0) + 1
        # What it cost on the GPU beyond CRIU's freeze.
        self.line["stall_ms"] += [round(p["duration_ns"] / 1e6, 2) for p in about.get("phases", []) if p["name"] == "stall"]
        return image

    def restore_one(self, process, image, tree):
        for pid in tree:  # other children end after the program, and what they leave is ours to take
            self.wait_for("the end of its other processes", lambda: reaped(pid))
        for name, size in zip((".out", ".err"), read(f"{image}/sizes").split()):
            os.truncate(self.path("run" + name), int(size))
        for folder in read(f"{image}/folders").split():
            os.makedirs(folder, exist_ok=True)
        subprocess.run(["cp", "-a", f"{image}/tmp/.", self.path("tmp")], check=True)
        for name in os.listdir(f"{image}/kept"):
            shutil.copy2(f"{image}/kept/{name}", self.path(name))
        with ONE_TREE if tree else contextlib.nullcontext():
            subprocess.run(["cp", "-a", "--remove-destination", f"{image}/shm/.", "/dev/shm"], check=True)
            self.line["restore_s"].append(self.run_criu("restore", image, ["-d"]))
        if os.path.exists(self.path("hold")):
            os.unlink(self.path("hold"))
        self.wait_for("its end", lambda: reaped(process.pid))
        self.compare(self.native, read(self.path("run.out")), "restored")


def show(name, protocol, line):
    def middle(key):
        values = sorted(line[key])
        return values[len(values) // 2] if values else None

    used = ", ".join(f"{count} {used}" for used, count in line["used"].items())
    print(f"torch: {name:12} {protocol:6} {line['images']} images alike ({used}; {line['mispredicted_writes']} mispredicted writes) in "
          f"{line['seconds']} s: stall {middle('stall_ms')} ms, dump {middle('dump_s')} s, {middle('mib')} MiB, restore "
          f"{middle('restore_s')} s; {len(line['failed'])} failed, {line['not_tried']} not tried", flush=True)
    for what in line["failed"] + [line["wrong"]] if "wrong" in line else line["failed"]:
        print("        " + what.replace("\n", " ")[:500])


def of_one(program, protocol, place, keep):
    line = LeftRunning(program, protocol, place, program.images or program.opts.images, keep).run()
    if line["failed"]:
        program.line["restored"] = "see left_running"
    show(program.name, protocol, line)
    keep()


def of_all(programs, pool, place, keep):
    """Every program by every protocol, in the order of programs; `keep` is called after each image."""
    natives = [pool.submit(program.all) for program in programs]
    lock, lanes = threading.Lock(), []

    def kept():
        with lock:
            keep()

    for native, program in zip(natives, programs):
        native.result()
        if not program.failed() and program.line.get("steps", 0) > 2:
            program.line["left_running"] = {}
            lanes += [pool.submit(of_one, program, protocol, place, kept) for protocol in program.opts.protocols.split(",")]
    for lane in lanes:
        lane.result()
