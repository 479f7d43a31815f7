"""One measured checkpoint: a program whose steps are timed, and what CRIU, or the driver itself, does to it."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import criu_files
import process_memory
import sinks
import step_times
from bench_common import is_real, native_folder

HERE = os.path.dirname(os.path.abspath(__file__))
CRIU_OPTIONS = ["--tcp-established", "--network-lock", "skip", "--file-locks", "--link-remap", "--ghost-limit", "1G"]
MS = 1e6  # nanoseconds


class Failed(Exception):
    """What went wrong, in one line."""


def read(path):
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


class Place:
    """What all measurements of a run share."""

    def __init__(self, stage, driver, criu, folder, images, seed=1):
        self.stage, self.driver, self.criu, self.folder, self.images = stage, driver, criu, folder, images
        self.socket = None  # of the daemon that there is now
        self.images_are = sinks.describe(images)
        self.random = random.Random(seed)
        self.real = is_real(driver)

    def image(self):
        return tempfile.mkdtemp(dir=self.images)

    def rekindle(self, *words):
        done = subprocess.run([f"{self.stage}/bin/rekindle", *words], capture_output=True, text=True,
                              env=dict(os.environ, REKINDLE_SOCKET=self.socket))
        if done.returncode != 0:
            raise Failed(f"rekindle {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout


class Work:
    """A workload's process, natively or under Rekindle, when it is in its steps."""

    def __init__(self, place, command, native, limit):
        folder = tempfile.mkdtemp(dir=place.folder)
        self.place = place
        self.times = step_times.Times(f"{folder}/times", make=True)
        env = dict(os.environ, PYTHONDONTWRITEBYTECODE="1")
        before = [env["LD_LIBRARY_PATH"]] if "LD_LIBRARY_PATH" in env else []
        library = native_folder(place.stage, place.driver) if native else f"{place.stage}/lib/rekindle"
        if not native:
            env["REKINDLE_SOCKET"] = place.socket
        if not native or not place.real:
            env["LD_LIBRARY_PATH"] = ":".join([library, *before])
        self.errors = f"{folder}/err"
        with open(f"{folder}/out", "w") as out, open(self.errors, "w") as err:
            self.process = subprocess.Popen([word.replace("TIMES", f"{folder}/times") for word in command], env=env, cwd=folder,
                                            stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)
        self.pid = self.process.pid
        try:
            self.wait_for("its first steps", lambda: self.times.count() >= 1, limit)
        except Failed:
            self.stop()
            raise

    def wait_for(self, what, condition, limit):
        deadline = time.monotonic() + limit
        while not condition():
            if self.process.poll() is not None:
                raise Failed(f"it ends with {self.process.returncode}: {read(self.errors)[-400:].strip()}")
            if time.monotonic() > deadline:
                raise Failed(f"{what} does not come within {limit:.0f} s")
            time.sleep(0.002)

    def alive(self):
        return self.process.poll() is None

    def stuck(self):
        """Whether it does no more steps. That is waited for."""
        try:
            count = self.times.count()
            self.wait_for("a step", lambda: self.times.count() > count, 10)
            return False
        except Failed:
            return True

    def memory(self):
        """Bytes that CRIU would write of it now, by whose they are."""
        return process_memory.would_be_written(self.pid)

    def stop(self):
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def undisturbed(self, idle, least=0.7):
        """Lets it do steps without disturbance until a random moment; the first of these steps."""
        if idle:
            time.sleep(0.2 + self.place.random.random() * 0.2)
            return 0
        first, begin = self.times.count(), time.monotonic()
        self.wait_for("its steps", lambda: self.times.count() >= first + 20 and time.monotonic() >= begin + least, 60)
        ends = self.times.ends(first)
        time.sleep(self.place.random.random() * max(0.05, (ends[-1] - ends[0]) / (len(ends) - 1) / 1e9))
        return first

    def measured(self, first, begin, end, stopped, resumed):
        """What its steps say of what was done to it between two moments, in milliseconds; the rest in parts of one."""
        after = self.times.count() + 3
        self.wait_for("its steps after that", lambda: self.times.count() >= after, 60)
        ends = self.times.ends(first)
        median, usual = step_times.undisturbed([it for it in ends if it < begin])
        longest, total = step_times.gaps(ends, begin, end, median, usual)
        found = {"step_ms": median / MS, "step_usual_ms": usual / MS, "gap_ms": longest / MS, "gaps_ms": total / MS}
        if resumed and end - resumed > max(2 * median, 20 * MS):
            found["throughput"] = step_times.share(ends, stopped, resumed, end, median)
        return found


class Watch(threading.Thread):
    """When a process is stopped, looked at from outside every millisecond."""

    def __init__(self, pid):
        super().__init__(daemon=True)
        self.path, self.first, self.last, self.over = f"/proc/{pid}/stat", None, None, False
        self.start()

    def run(self):
        with open(self.path) as file:
            while not self.over:
                file.seek(0)
                try:
                    state = file.read().rpartition(")")[2].split()[0]
                except (OSError, IndexError):
                    return
                now = time.monotonic_ns()
                if state in "tT":
                    self.first = self.first or now
                    self.last = now
                time.sleep(0.001)

    def end(self):
        """Nanoseconds of the clock when it was stopped and when it went on; None where it never was."""
        self.over = True
        self.join()
        return self.first, self.last


def sizes(image):
    """Bytes of an image: the GPU's part, the CPU's, and what of that is memory."""
    found = {"gpu_bytes": 0, "cpu_bytes": 0, "pages_bytes": 0}
    for name in os.listdir(image):
        path = os.path.join(image, name)
        if os.path.islink(path) or not os.path.isfile(path) or name.endswith(".log"):
            continue
        part = "gpu_bytes" if name.startswith("rekindle") else "cpu_bytes"
        found[part] += os.stat(path).st_size
        if name.startswith("pages-"):
            found["pages_bytes"] += os.stat(path).st_size
    return found


def run_criu(place, image, pid, limit, plugins):
    """Nanoseconds that a dump by CRIU alone took."""
    command = [place.criu, "dump", "-t", str(pid), "-D", image, "-o", "dump.log", "-v3", "--leave-running", "--libdir", plugins]
    return run_dump(place, command, image, limit)


def run_at_moment(place, image, pid, limit, plugins):
    """Nanoseconds that a checkpoint took that begins where the program says."""
    command = [f"{place.stage}/bin/rekindle", "checkpoint", "--at-moment", "--criu", place.criu, str(pid), image, "--"]
    return run_dump(place, [*command, "-v3", "--libdir", plugins], image, limit)


def run_dump(place, command, image, limit):
    begin = time.monotonic_ns()
    try:
        done = subprocess.run([*command, *CRIU_OPTIONS], capture_output=True, text=True, timeout=limit, start_new_session=True,
                              env=dict(os.environ, REKINDLE_SOCKET=place.socket))
    except subprocess.TimeoutExpired:
        raise Failed(f"a dump takes more than {limit:.0f} s")
    end = time.monotonic_ns()
    if done.returncode != 0:
        lines = [line for line in read(f"{image}/dump.log").splitlines() if "Error" in line or "rekindle: " in line]
        raise Failed("criu dump: " + " / ".join(lines[-3:] or [done.stderr.strip()]))
    return end - begin


def dump(work, image, how, limit, parent=None):
    """Checkpoints a program under Rekindle while it runs; what that took. `how` has a protocol, and says whether the program
    is idle, or is checkpointed at its moments."""
    place = work.place
    place.rekindle("protocol", str(work.pid), how.protocol)
    first = work.undisturbed(how.idle)
    if parent:
        os.symlink(os.path.relpath(parent, image), f"{image}/rekindle-parent")
    watch, begin = Watch(work.pid), time.monotonic_ns()
    try:
        took = (run_at_moment if how.moments else run_criu)(place, image, work.pid, limit, f"{place.stage}/lib/rekindle/criu")
    finally:
        stopped, resumed = watch.end()
    found = {"durable_ms": took / MS, **sizes(image), **criu_files.of_dump(image),
             **phases(json.loads(place.rekindle("inspect", "--json", image)))}
    if stopped:
        found["freeze_ms"] = (resumed - stopped) / MS
    if not how.idle:
        found.update(work.measured(first, begin, begin + took, stopped or begin, resumed))
    return found


def phases(about):
    """What the manifest says: of each phase milliseconds and bytes, and how fast copies were."""
    found = {"protocol": about["protocol"], "reason": about["protocol_reason"], "parent": about["parent"] is not None,
             "bytes": about["bytes"]}
    for phase in about["phases"]:
        name = phase["name"].replace("-", "_")
        found[f"{name}_ms"] = phase["duration_ns"] / MS
        if phase["bytes"]:
            found[f"{name}_bytes"] = phase["bytes"]
    cpu = about.get("cpu") or {}
    found.update({f"cpu_{part}_bytes": size for part, size in cpu.items()})
    if cpu:
        found["cpu_ours_bytes"] = sum(cpu[part] for part in process_memory.OURS)
    # Hashing and cloning come first, and are counted in the copying. What is copied beforehand is copied in one go.
    before = found.get("hash_ms", 0) + found.get("clone_ms", 0)
    if found.get("pre_copy_ms"):
        found["copy_gb_s"] = found.get("pre_copy_bytes", 0) / found["pre_copy_ms"] / MS
    elif found.get("copy_bytes") and found["copy_ms"] > before:
        found["copy_gb_s"] = found["copy_bytes"] / (found["copy_ms"] - before) / MS
        found["image_gb_s"] = found["copy_bytes"] / (found["copy_ms"] - before + found.get("write_ms", 0)) / MS
    return found


class Driver:
    """The driver's own checkpoints, asked for by a process of its own."""

    def __init__(self, place):
        self.place = place
        self.process = subprocess.Popen([sys.executable, f"{HERE}/driver_calls.py", place.driver, "checkpoint"], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if self.process.stdout.readline() != "ready\n":
            raise Failed("the driver cannot be asked for checkpoints")

    def ask(self, verb, pid):
        self.process.stdin.write(f"{verb} {pid}\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline() or '{"code": -2, "ns": 0}')
        if answer["code"] != 0:
            raise Failed(f"the driver's {verb} returns {answer['code']}")
        return answer["ns"] / MS

    def checkpoint(self, work, image, idle, limit):
        """What a checkpoint takes as CRIU's own plugin makes it: the driver takes the memory into the process, CRIU dumps
        the process, and the driver puts it back."""
        first = work.undisturbed(idle)
        none = tempfile.mkdtemp(dir=self.place.folder)  # no plugins
        found, why = {}, None
        begin = time.monotonic_ns()
        found["driver_lock_ms"] = self.ask("lock", work.pid)
        try:
            found["driver_checkpoint_ms"] = self.ask("checkpoint", work.pid)
            try:
                found["driver_criu_ms"] = run_criu(self.place, image, work.pid, limit, none) / MS
                found["durable_ms"] = (time.monotonic_ns() - begin) / MS
            except Failed as error:
                why = str(error)
            found["driver_restore_ms"] = self.ask("restore", work.pid)
        finally:
            found["driver_unlock_ms"] = self.ask("unlock", work.pid)
        end = time.monotonic_ns()
        found.update(sizes(image), **({"criu_failed": why} if why else {}))
        if not idle:
            found.update(work.measured(first, begin, end, begin, None))
        return found

    def stop(self):
        self.process.stdin.close()
        self.process.kill()
        self.process.wait()


def forget(image):
    shutil.rmtree(image, ignore_errors=True)
