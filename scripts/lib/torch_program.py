"""One program of tests/torch, run in the ways that `tests/torch/run` compares."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time

PROGRAMS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tests/torch")
# A port on which a connection has ended is in use for a minute otherwise, and CRIU cannot make it again then.
FORGETFUL = "/proc/sys/net/ipv4/tcp_max_tw_buckets"
CRIU_OPTIONS = ["--tcp-established", "--network-lock", "skip", "--file-locks", "--link-remap", "--ghost-limit", "1G"]


def read(path):
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def session(leader):
    """The processes of a session but its leader."""
    pids = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        fields = read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        if int(pid) != leader and len(fields) > 3 and int(fields[3]) == leader:
            pids.append(int(pid))
    return pids


def reaped(pid):
    """Whether a process is gone, its exit status taken if it has come to us."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass
    return not os.path.exists(f"/proc/{pid}")


def forget_connections():
    """Connections that have ended leave nothing behind from now on, where this may be set."""
    try:
        with open(FORGETFUL, "w") as file:
            file.write("0")
    except OSError as error:
        print(f"torch: ended connections stay for a minute ({error}): restores of ranks may fail", file=sys.stderr)


class Failed(Exception):
    """What went wrong, in one line, and the kind of failure if the daemon has said one."""

    def __init__(self, text, kind=None):
        super().__init__(text)
        self.kind = kind


class Program:
    """One program of this folder, run in the ways that are compared."""

    def __init__(self, name, place, opts, criu, socket, folder=None, steps=None):
        self.name, self.opts, self.criu, self.socket = name, opts, criu, socket
        self.line = {"name": name, "native": "ok", "rekindle": "-", "restored": "-"}
        self.native, self.dumped = None, None
        self.steps = steps or opts.steps  # none: its own number
        self.folder = os.path.join(place, folder or name)
        os.makedirs(self.folder)
        self.random = random.Random(f"{opts.seed} {folder or name}")

    def path(self, name):
        return os.path.join(self.folder, name)

    def start(self, way, rekindle, hold=None, **more):
        os.makedirs(self.path("tmp"), exist_ok=True)
        env = dict(os.environ, **more, TMPDIR=self.path("tmp"), PYTHONDONTWRITEBYTECODE="1", TORCHINDUCTOR_CACHE_DIR=self.path("inductor"),
                   TRITON_CACHE_DIR=self.path("triton"), CUPY_CACHE_DIR=self.path("cupy"))
        env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        if rekindle:
            before = os.environ.get("LD_LIBRARY_PATH")
            env["LD_LIBRARY_PATH"] = f"{self.opts.stage}/lib/rekindle" + (f":{before}" if before else "")
            env.update(REKINDLE_SOCKET=self.socket, TRITON_LIBCUDA_PATH=f"{self.opts.stage}/lib/rekindle")
        elif self.opts.virtual > 1:
            env["RANKS_ALONE"] = "1"
        elif self.opts.driver:
            env["LD_LIBRARY_PATH"] = os.path.dirname(os.path.abspath(self.opts.driver))
            if self.opts.native:  # the software GPU's place for the driver's devices
                env["SIMGPU_DEVICE_FILE"] = os.path.join(self.opts.devices, "nvidia0")
        for old in ("progress", way + ".out", way + ".err"):
            if os.path.exists(self.path(old)):
                os.unlink(self.path(old))
        if hold is not None:
            with open(self.path("hold"), "w") as file:
                file.write(str(hold))
            env["APP_HOLD"] = self.path("hold")
        with open(self.path(way + ".out"), "a") as out, open(self.path(way + ".err"), "a") as err:
            steps = ["--steps", str(self.steps)] if self.steps else []
            return subprocess.Popen([sys.executable, f"{PROGRAMS}/{self.name}.py", "--progress", self.path("progress"), *steps],
                                    env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=PROGRAMS,
                                    start_new_session=True)

    def progress(self):
        return int(read(self.path("progress")) or 0)

    def wait_for(self, what, condition, process=None):
        deadline = time.monotonic() + self.opts.limit
        while not condition():
            if process and process.poll() is not None:
                raise Failed(f"it ends with {process.returncode} before {what}")
            if time.monotonic() > deadline:
                raise Failed(f"{what} does not come within {self.opts.limit} s")
            time.sleep(0.01)

    def kill(self, process):
        """All of its session, so that nothing of a run that failed uses the GPU on."""
        subprocess.run(["pkill", "-KILL", "-s", str(process.pid)])
        process.wait()

    def whole(self, way, rekindle, hold=None):
        """Runs it to its end; what it printed and how long it took. With a hold, refused calls are asked for there."""
        started, refused = time.monotonic(), []
        process = self.start(way, rekindle, hold)
        try:
            if hold is not None:
                self.wait_for("its last step", lambda: self.progress() >= hold, process)
                refused = self.refused(process.pid)
                os.unlink(self.path("hold"))
            if process.wait(timeout=self.opts.limit) != 0:
                raise Failed(f"it ends with {process.returncode}")
        except subprocess.TimeoutExpired:
            raise Failed("it hangs")
        finally:
            self.kill(process)
        return read(self.path(way + ".out")), time.monotonic() - started, refused

    def refused(self, pid):
        done = self.rekindle("ps", "--calls", str(pid))
        rows = [line.split() for line in done.stdout.splitlines()]
        return sorted(row[3] for row in rows if len(row) == 4 and row[1].isdigit() and int(row[1]) > 0)

    def workers(self, leader):
        """The process numbers of the workers of a session's processes."""
        pids = [leader, *session(leader)]
        done = self.rekindle("ps", "--json")
        return sorted(client["worker"] for client in json.loads(done.stdout or "[]") if client["pid"] in pids)

    def dump(self, last):
        """Dumps it in its middle and kills it."""
        at = self.random.randint(max(1, last // 4), max(1, last * 2 // 3))
        process = self.start("restored", not self.opts.native, max(at, last * 3 // 4))
        try:
            self.wait_for(f"step {at}", lambda: self.progress() >= at, process)
            time.sleep(self.random.random() * 0.05)  # not always at a step's end
            image, tree = tempfile.mkdtemp(dir=self.folder), session(process.pid)
            workers = self.workers(process.pid)
            if bool(workers) == self.opts.native:
                raise Failed("it runs under Rekindle" if workers else "it has no worker")
            running = self.left_running(process) if self.opts.native else {}
            seconds = self.run_criu("dump", image, ["-t", str(process.pid)])
            process.wait()
            for pid in tree:
                self.wait_for("the end of what was killed", lambda: reaped(pid))
        except BaseException:
            self.let_go(process)
            raise
        if self.opts.native:
            running["natives"] = self.natives(image)
        self.dumped = process, image, {"step": at, "dump_s": seconds, "workers": workers, **running}

    def natives(self, image):
        """How many processes of an image the driver has checkpointed."""
        command = [f"{self.opts.stage}/bin/rekindle", "inspect", "--json", image]
        done = subprocess.run(command, capture_output=True, text=True)
        count = len(json.loads(done.stdout or "{}").get("natives", []))
        if not count:
            raise Failed("the driver has checkpointed no process of it")
        return count

    def left_running(self, process):
        """Dumps it and lets it go on, which it must. The image is not used."""
        image = tempfile.mkdtemp(dir=self.folder)
        seconds = self.run_criu("dump", image, ["-t", str(process.pid), "--leave-running"])
        if process.poll() is not None:
            raise Failed(f"it ends with {process.returncode} after a dump that left it running")
        shutil.rmtree(image)
        return {"running_dump_s": seconds}

    def restore(self):
        """Restores it; what it printed then, and how long CRIU took."""
        (process, image, about), self.dumped = self.dumped, None
        try:
            if self.opts.warm:
                about["warm"] = self.keep_warm(image)
            if self.opts.warm == "shared":
                self.teach(process, image)
                about["warm"] = self.keep_warm(image)
            about["restore_s"] = self.restore_lazily(image) if self.opts.lazy else self.run_criu("restore", image, ["-d"])
            about["restored_workers"] = self.workers(process.pid)
            os.unlink(self.path("hold"))  # only now: it may have been open when the process was dumped
            self.wait_for("its end", lambda: reaped(process.pid))
        finally:
            self.let_go(process)
            if self.opts.warm:
                self.rekindle("warm", "--forget", image)
        shutil.rmtree(image)
        if len(about["workers"]) != len(about["restored_workers"]) or set(about["workers"]) & set(about["restored_workers"]):
            raise Failed(f"it had the workers {about['workers']}, and has {about['restored_workers']} now")
        return read(self.path("restored.out")), about

    def teach(self, process, image):
        """Another process of the image comes first: it teaches what is written, and ends. It prints the same."""
        files = {name: open(self.path(name), "rb").read() for name in ("restored.out", "restored.err", "hold", "progress")
                 if os.path.exists(self.path(name))}
        self.run_criu("restore", image, ["-d"])
        os.unlink(self.path("hold"))
        self.wait_for("the end of the one that teaches", lambda: reaped(process.pid))
        self.compare(self.native, read(self.path("restored.out")), "restored")
        for name, content in files.items():  # CRIU wants them as they were
            with open(self.path(name), "r+b" if os.path.exists(self.path(name)) else "wb") as file:
                file.truncate(0)
                file.write(content)

    def keep_warm(self, image):
        """Has the daemon keep the image ready for the restore; why no worker waits for it, if none does."""
        done = self.rekindle("warm", image, "--json", *([] if self.opts.warm == "warm" else [f"--resident={self.opts.warm.replace('resident', 'each')}"]))
        if done.returncode != 0:
            raise Failed(f"warm: {done.stderr.strip()}")
        return json.loads(done.stdout)[0]["problem"] or "ready"

    def rekindle(self, verb, *words):
        command = [f"{self.opts.stage}/bin/rekindle", verb, "--socket", self.socket, *words]
        return subprocess.run(command, capture_output=True, text=True)

    def restore_lazily(self, image):
        """By `rekindle restore --lazy`, which has CRIU bring the process's own pages while it runs."""
        started = time.monotonic()
        done = self.rekindle("restore", "--lazy", "-d", image, "--criu", self.criu, "--", "-v4", *CRIU_OPTIONS)
        if done.returncode != 0:
            raise Failed(f"rekindle restore --lazy: {done.stderr.strip()}")
        return round(time.monotonic() - started, 3)

    def let_go(self, process):
        """Nothing of a program that is to go on, or that failed, is left."""
        if os.path.exists(self.path("hold")):
            os.unlink(self.path("hold"))
        self.kill(process)

    def run_criu(self, verb, image, more):
        started = time.monotonic()
        try:
            done = subprocess.run(
                [self.criu, verb, "-D", image, "-o", f"{verb}.log", "-v4", "--libdir", f"{self.opts.stage}/lib/rekindle/criu",
                 *CRIU_OPTIONS, *more], env=dict(os.environ, REKINDLE_SOCKET=self.socket), capture_output=True, text=True,
                timeout=self.opts.limit, start_new_session=True)
        except subprocess.TimeoutExpired:
            raise Failed(f"criu {verb} hangs")
        if done.returncode != 0:
            lines = [l for l in read(f"{image}/{verb}.log").splitlines() if "Error" in l or "rekindle: " in l]
            if os.path.exists(f"{image}/{verb}.log"):  # it may not even have started
                shutil.copy(f"{image}/{verb}.log", self.path(f"{verb}.log"))
            kinds = re.findall(r"rekindle: failure kind: (\w+)", "\n".join(lines))
            lines = [l for l in lines if "rekindle: failure kind: " not in l]
            raise Failed(f"criu {verb}: " + " / ".join(lines[-3:] or [done.stderr.strip()]), kinds[-1] if kinds else None)
        return round(time.monotonic() - started, 3)

    def step(self, way, do):
        """Does one part of its runs, unless one before has failed, and notes in its line what went wrong."""
        if self.failed():
            return
        try:
            do()
        except Failed as what:
            self.line[way] = str(what)
            if self.progress() or way != "native":
                self.line["stderr"] = read(self.path(way + ".err"))[-1500:]

    def failed(self):
        return any(self.line[way] not in ("ok", "-") for way in ("native", "rekindle", "restored"))

    def natively(self):
        self.native, seconds, _ = self.whole("native", False)
        self.line.update(native_s=round(seconds, 2), steps=self.progress())

    def under_rekindle(self):
        under, seconds, refused = self.whole("rekindle", True, self.line["steps"])
        self.line.update(rekindle_s=round(seconds, 2), refused=refused)
        self.compare(self.native, under, "rekindle")
        self.line["rekindle"] = "ok"

    def finished(self):
        """What it prints when restored."""
        out, about = self.restore()
        self.line.setdefault("dumps", []).append(about)
        self.compare(self.native, out, "restored")
        self.line["restored"] = "ok"

    def before(self):
        """All of it before it is restored for the first time."""
        self.step("native", self.natively)
        if (self.opts.dumps or not self.opts.protocols) and not self.opts.native:
            self.step("rekindle", self.under_rekindle)
        if self.opts.dumps:
            self.again()
        return self

    def again(self):
        """Dumps it, where it can be."""
        if self.line.get("steps", 0) > 2:
            self.step("restored", lambda: self.dump(self.line["steps"]))
        return self

    def after(self):
        """Restores it, if it was dumped."""
        if self.dumped:
            self.step("restored", self.finished)
        return self

    def all(self):
        """Its line of the result."""
        self.before().after()
        for _ in range(1, self.opts.dumps):
            self.again().after()
        return self.line

    def compare(self, native, other, way):
        if native != other:
            pairs = zip(native.splitlines(), other.splitlines() + [""] * 1000)
            raise Failed("it prints something else: " + next((f"{b!r}, not {a!r}" for a, b in pairs if a != b), "more lines"))
