"""The benchmark `restore`: how long after `criu restore` has begun a program runs again, by each way.

    ours      the image in memory; the process runs while its memory is loaded
    waiting   the same, with `restore.run_before_loaded = false`: the process runs when its memory is complete
    cold      as ours, the image on a disk (--disk) and out of the page cache
    files     as ours, the image kept in host memory by the daemon (`rekindle warm --copies 0`)
    warm      as files, and a worker has loaded the program but for its GPU memory (`rekindle warm`)
    resident  as warm, and the GPU memory has its content (`rekindle warm --resident`)
    once      as warm, and the content is on the GPU, from where it is copied (`rekindle warm --resident=once`)
    shared    as once, and the process shares the memory there that it only reads (`rekindle warm --resident=shared`); `shared, first` is the
              restore that learns what is written
    lazy, warm-lazy, resident-lazy, shared-lazy    as ours, warm, resident and shared, by `rekindle restore --lazy`: CRIU brings the process's
              own pages when it touches them, and the others meanwhile
    criu      CRIU alone: a program without a GPU that has as much memory of its own, or `sleep` where that is less than 8 MiB
    driver    the driver's own checkpoint: CRIU brings the memory back into the process, the driver puts it on the device
    start     no restore: the program is started afresh, up to its first step
    uses      as ours, and until the third step the daemon records when which memory is used first (`access.reads`); nothing is timed
    suspend   no restore: `rekindle suspend --hold` and `rekindle resume`, to host memory and to a folder beside the images

Each workload runs under Rekindle, is dumped and killed, and restored again and again from that image. `running` is when
`criu restore` has ended and the process runs, `first step` when it has done a step, `loaded` when all its memory was there,
by the daemon's log. `gpu mib` is the GPU's memory that the process takes, beside the daemon's. All others are milliseconds from the start of `criu restore`; of `start`, of the program. `criu init`, `criu
processes` and `criu resume` are the three parts of CRIU's run by its log: until it begins to make processes, until they are whole,
and until they run; the plugin's waits for the daemon are in the first and the last. Figures of the name `..._part_ms` are the daemon's
account of the same time (`rekindle inspect`). CRIU keeps what it learns of the kernel in /run where
that is in memory, as systemd has it; otherwise it looks again each time, and the benchmark mounts such a /run for itself.
"""

import datetime
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time

import checkpoint_rates
import process_memory
import sinks
from bench_common import Daemon, about, asked_device, criu_of, criu_version, is_real, native_folder, parser, run, spread, write_json
from checkpoint_items import DECODE_13B, DRIVER, GIB, TORCH, Item
from checkpoint_runs import CRIU_OPTIONS, MS, Driver, Failed, Place, Work, forget, read, sizes

HERE = os.path.dirname(os.path.abspath(__file__))
WAYS = ("ours", "waiting", "cold", "files", "warm", "resident", "once", "shared", "lazy", "warm-lazy", "resident-lazy", "shared-lazy", DRIVER,
        "criu", "start", "uses", "suspend")
# The ways in which the daemon keeps the image ready, and how it is asked to.
KEPT = {"files": ("--copies", "0"), "warm": (), "resident": ("--resident",), "once": ("--resident=once",), "shared": ("--resident=shared",),
        "warm-lazy": (), "resident-lazy": ("--resident",), "shared-lazy": ("--resident=shared",)}
# Kinds, GiB, and whether the driver's way is measured too.
ORDER = (("decode13b", DECODE_13B, True), ("train", 1, True), ("train", 4, True), ("train", 16, False), ("gptsmall", 2, True),
         ("llama13b", 26, False), ("experts", 25, False), ("train", 40, False), ("train", 100, False))
# So many steps a process makes that is to teach what it writes.
LEARNS = 8
WAITING = "[restore]\nrun_before_loaded = false\n"
WATCHED = "[access]\nreport = true\nreads = true\n"
# So many steps are watched.
WATCHES = 3
LOADED = re.compile(r"^(\S+) +INFO phase load: .* ms=(\d+)", re.MULTILINE)
# The daemon's account of the last restore, in the image.
ACCOUNT = "rekindle-restore.json"
# A program that has as much memory as its argument says, and does nothing.
FILLED = "import sys, time\nmemory = bytearray(b'\\1') * int(sys.argv[1])\ntime.sleep(1e6)"
# Without more, a Python takes so much.
OF_PYTHON = 8 << 20
# Lines of CRIU's log at the ends of its parts.
CRIU_PARTS = (("criu_init_ms", "Running pre-restore scripts"), ("criu_processes_ms", "Running post-restore scripts"),
              ("criu_resume_ms", "Running pre-resume scripts"))
PHASES_OF_SUSPENSION = re.compile(r"INFO phases of suspension: .*?((?: ?\w+=\d+)+)\s*$", re.MULTILINE)
PHASES = re.compile(r"INFO phases of load: .*?((?: ?\w+=\d+)+)\s*$", re.MULTILINE)


def say(text):
    print(f"bench: {text}", flush=True)


def gone(pid, limit=60):
    """Waits until a process is gone that is no child of this one."""
    deadline = time.monotonic() + limit
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            pass
        time.sleep(0.005)


def gone_now(pid):
    return not os.path.exists(f"/proc/{pid}")


def kill(pid):
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    gone(pid)


def clock_offset(pid):
    """By how many nanoseconds a process's CLOCK_MONOTONIC is ahead of this one's: CRIU has the clock go on from the dump."""
    found = re.search(r"^monotonic\s+(-?\d+)\s+(\d+)", read(f"/proc/{pid}/timens_offsets"), re.MULTILINE)
    return int(found[1]) * 10**9 + int(found[2]) if found else 0


def criu(place, verb, image, words, log, limit, socket=None):
    """When a run of CRIU began and ended, in nanoseconds of the clock."""
    command = [place.criu, verb, "-D", image, "-o", log, "-v4", *words, *CRIU_OPTIONS]
    return timed(command, f"criu {verb}", f"{image}/{log}", limit, socket)


def restore_lazily(place, image, limit, socket):
    """The same of a restore whose pages come later."""
    command = [f"{place.stage}/bin/rekindle", "restore", "--lazy", "-d", image, "--criu", place.criu, "--", "-v4", *CRIU_OPTIONS]
    return timed(command, "rekindle restore --lazy", f"{image}/restore.log", limit, socket)


def timed(command, what, log, limit, socket):
    env = dict(os.environ, **({"REKINDLE_SOCKET": socket} if socket else {}))
    begin = time.monotonic_ns()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    # `wait` with a timeout looks only every 50 ms.
    descriptor = os.pidfd_open(process.pid)
    ended = select.select([descriptor], [], [], limit)[0]
    end = time.monotonic_ns()
    os.close(descriptor)
    if not ended:
        process.kill()
    process.wait()
    if not ended:
        raise Failed(f"{what} takes more than {limit:.0f} s")
    if process.returncode != 0:
        errors = [line for line in read(log).splitlines() if "Error" in line or "rekindle: " in line]
        raise Failed(f"{what}: " + " / ".join(errors[-3:]))
    return begin, end


def criu_parts(log):
    """How long CRIU's parts took, by its log."""
    found, before = {}, 0.0
    for name, line in CRIU_PARTS:
        at = re.search(r"^\((\d+\.\d+)\) " + line, log, re.MULTILINE)
        if at:
            found[name], before = (float(at[1]) - before) * 1e3, float(at[1])
    return found


def account(image):
    """How long each part took until the processes could run, by the daemon's account of the last restore."""
    with open(f"{image}/{ACCOUNT}") as file:
        return {f"{it['name']}_part_ms": it["duration_ns"] / MS for it in json.load(file)["restore"]["phases"]}


def evict(image):
    """Drops an image's files out of the page cache."""
    for name in os.listdir(image):
        with open(os.path.join(image, name), "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy(image, folder):
    """A copy of an image in another folder."""
    target = tempfile.mkdtemp(dir=folder)
    subprocess.run(["cp", "-a", f"{image}/.", target], check=True)
    return target


def phases(log, pattern):
    """The numbers in the last line of a daemon's log that matches."""
    found = {}
    for text in pattern.findall(log)[-1:]:
        found.update({name: int(value) for name, value in (it.split("=") for it in text.split()) if name != "worker"})
    return found


def load_phases(log, began):
    """What the daemon's log says of the last load: `began` is the wall clock's time when `criu restore` did."""
    found = {}
    for when, _ in LOADED.findall(log)[-1:]:
        at = datetime.datetime.fromisoformat(when.replace("Z", "+00:00")).timestamp()
        found["loaded_ms"] = (at - began) * 1e3
    found.update(phases(log, PHASES))
    if found.get("content_ms"):
        found["content_gb_s"] = found["bytes"] / found["content_ms"] / 1e6
    return found


class Bench:
    def __init__(self, o, place, end):
        self.o, self.place, self.end = o, place, end
        self.ways = [it for it in o.ways.split(",") if it in WAYS]
        self.found, self.uses, self.notes, self.left_out = {}, [], [], []

    def left(self):
        return self.end - time.monotonic()

    def allows(self, seconds, what):
        if self.left() >= seconds:
            return True
        self.left_out.append(what)
        return False

    def note(self, text):
        self.notes.append(text)
        say(text)

    def keep(self, item, way, sample):
        self.found.setdefault(item.name, {}).setdefault(way, []).append(sample)
        said = ", ".join(f"{name[:-3].replace('_', ' ')} {sample[name]:.0f} ms" for name in
                         ("running_ms", "first_step_ms", "loaded_ms", "suspend_ms", "resume_ms") if name in sample)
        say(f"{item.name}, {way}: {said}")

    def command(self, item):
        return item.command(self.o.stage, HERE, sys.executable, self.place.real)

    def limit(self):
        return max(20.0, min(180.0, self.left() + 20))

    def daemon(self):
        """A daemon whose configuration can be changed."""
        self.config = os.path.join(tempfile.mkdtemp(dir=self.place.folder), "rekindled.toml")
        self.configure("")
        daemon = Daemon(self.o.stage, self.o.driver, self.place.folder, config=self.config)
        self.place.socket = daemon.socket
        try:
            daemon.wait_ready()
        except SystemExit as error:
            daemon.stop()
            raise Failed(str(error))
        return daemon

    def configure(self, more):
        with open(self.config, "w") as file:
            file.write((read(self.o.config) if self.o.config else "") + more)

    def item(self, item, by_driver):
        if not self.allows(item.start_guess() + 5, item.name):
            return
        if any(it in self.ways for it in ("ours", "criu", "waiting", "cold", "lazy", "uses", "suspend", *KEPT)):
            self.by_us(item)
        if by_driver and DRIVER in self.ways and self.place.real:
            for _ in range(self.o.rounds):
                self.by_driver(item)

    def by_us(self, item):
        """Starts the program, dumps it once, and restores it by each way."""
        plugins = f"{self.place.stage}/lib/rekindle/criu"
        daemon, image, work = None, self.place.image(), None
        try:
            daemon = self.daemon()
            began = time.monotonic_ns()
            work = Work(self.place, self.command(item), False, self.limit())
            if "start" in self.ways:
                self.keep(item, "start", {"first_step_ms": (work.times.ends(0)[0] - began) / MS})
            daemon.wait_ready()
            first = work.undisturbed(False)
            steps = work.times.ends(first)
            step_ms = sorted(b - a for a, b in zip(steps, steps[1:]))[(len(steps) - 1) // 2] / MS
            if "suspend" in self.ways:
                self.suspended(item, work, daemon)
            if not any(it in self.ways for it in ("ours", "criu", "waiting", "cold", "lazy", "uses", *KEPT)):
                return
            criu(self.place, "dump", image, ["-t", str(work.pid), "--libdir", plugins], "dump.log", self.limit(), daemon.socket)
            work.process.wait()
            about_image = {"step_ms": step_ms, "steps": work.times.count(), **sizes(image)}
            restore = (item, work, image, daemon, plugins, about_image)
            for _ in range(self.o.rounds):
                if "ours" in self.ways:
                    self.one("ours", *restore)
            if "criu" in self.ways:
                self.by_criu_alone(item, about_image["pages_bytes"])
            for _ in range(self.o.rounds if "lazy" in self.ways else 0):
                self.one("lazy", *restore)
            if "cold" in self.ways and not self.o.disk:
                self.note("cold is left out: --disk names no folder")
            elif "cold" in self.ways:
                on_disk = copy(image, self.o.disk)
                try:
                    for _ in range(self.o.rounds):
                        evict(on_disk)
                        self.one("cold", item, work, on_disk, daemon, plugins, about_image)
                finally:
                    forget(on_disk)
            for way in KEPT:
                for _ in range(self.o.rounds if way in self.ways else 0):
                    self.one(way, *restore)
            if "waiting" in self.ways:
                self.configure(WAITING)
                daemon.restart()
                daemon.wait_ready()
                for _ in range(self.o.rounds):
                    self.one("waiting", item, work, image, daemon, plugins, about_image)
            if "uses" in self.ways:
                self.configure(WATCHED)
                daemon.restart()
                daemon.wait_ready()
                self.first_uses(*restore)
        except (Failed, OSError) as error:
            self.note(f"{item.name}: {error}")
        finally:
            if work:
                kill(work.pid)
            forget(image)
            if daemon:
                daemon.stop()

    def first_uses(self, item, work, image, daemon, plugins, about_image):
        """One restore, and what memory the first steps use."""
        count = about_image["steps"]
        work.times.back_to(count)
        self.wait_until_free(item)
        steps, report = [], {}
        try:
            criu(self.place, "restore", image, ["-d", "--libdir", plugins], "restore.log", self.limit(), daemon.socket)
            for step in range(1, WATCHES + 1):
                self.until(lambda: work.times.count() >= count + step or gone_now(work.pid), "the restored process makes no steps")
                if gone_now(work.pid):
                    self.note(f"{item.name}: the restored process has ended: {daemon.said()[-600:]}")
                    break
                report = self.rekindle(daemon, "ps", "--access", str(work.pid))
                steps.append({name: report["first_uses"][name] for name in ("commands", "used")})
                say(f"{item.name}, uses: {step} steps, {steps[-1]}, {report['watched']} watched of {report['first_uses']['content']} bytes")
            self.uses.append({"name": item.name, "steps": steps, **report})
        except Failed as error:
            self.note(f"{item.name}, uses: {error}")
        finally:
            kill(work.pid)

    def rekindle(self, daemon, *words):
        """What a command of Rekindle's prints."""
        command = [f"{self.place.stage}/bin/rekindle", *words, "--json", "--socket", daemon.socket]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise Failed(f"{words[0]}: {done.stderr.strip()}")
        return json.loads(done.stdout)

    def suspended(self, item, work, daemon):
        """Suspends the program and resumes it, again and again. The first round of each kind touches the host's memory first,
        and is not kept. Each round begins when the memory is free again in which the last one kept the content: a suspension
        that follows at once frees it first."""
        ask = lambda *words: self.rekindle(daemon, *words)[0]
        used = lambda: int(asked_device("memory.used", True).split()[0]) << 20 if self.place.real else 0
        folder = self.place.image()
        room = sinks.available()
        try:
            for to, name in (("memory", "suspend to memory"), (folder, "suspend to a folder")):
                for turn in range(self.o.rounds + 1):
                    if not self.allows(5 + item.size / 2e9, f"{item.name}, {name}"):
                        break
                    self.until(lambda: sinks.available() > room - 2 * GIB, "the memory of a suspension is not given back")
                    before, logged = used(), len(daemon.said())
                    out = ask("suspend", str(work.pid), "--hold", "--to", to)
                    given_back = before - used()
                    count, begin = work.times.count(), time.monotonic_ns()
                    back = ask("resume", str(work.pid))
                    sample = {"suspend_ms": out["ms"], "resume_ms": back["ms"], "bytes": out["bytes"], "given_back_bytes": given_back,
                              "suspend_gb_s": out["bytes"] / out["ms"] / 1e6, "resume_gb_s": back["bytes"] / back["ms"] / 1e6}
                    sample.update(self.first_step(work, count, begin))
                    log = daemon.said()[logged:]
                    sample.update(phases(log, PHASES_OF_SUSPENSION), **{f"resume_{name}": it for name, it in phases(log, PHASES).items()})
                    if turn > 0:
                        self.keep(item, name, sample)
        finally:
            forget(folder)

    def one(self, way, item, work, image, daemon, plugins, about_image):
        """One restore, and the end of what was restored."""
        if not self.allows(5 + item.size / 4e9, f"{item.name}, {way}"):
            return
        work.times.back_to(about_image["steps"])
        self.wait_until_free(item)
        if way in KEPT:
            [kept] = self.rekindle(daemon, "warm", image, *KEPT[way])
            if kept["problem"]:
                self.note(f"{item.name}, {way}: {kept['problem']}")
                return
            self.wait_for_worker(daemon)
        count, before, used = about_image["steps"], len(daemon.said()), self.used_mib()
        if os.path.exists(f"{image}/{ACCOUNT}"):
            os.remove(f"{image}/{ACCOUNT}")
        try:
            wall = time.time()
            if way.endswith("lazy"):
                begin, end = restore_lazily(self.place, image, self.limit(), daemon.socket)
            else:
                words = ["-d", "--libdir", plugins]
                begin, end = criu(self.place, "restore", image, words, "restore.log", self.limit(), daemon.socket)
            sample = {"running_ms": (end - begin) / MS, **self.first_step(work, count, begin), **about_image}
            self.until(lambda: "loaded_ms" in load_phases(daemon.said()[before:], wall), "the load does not end")
            sample.update(load_phases(daemon.said()[before:], wall), **criu_parts(read(f"{image}/restore.log")))
            self.until(lambda: os.path.exists(f"{image}/{ACCOUNT}"), "the daemon writes no account of the restore")
            sample.update(account(image))
            if way.startswith("shared"):
                self.until(lambda: work.times.count() > count + LEARNS, "the restored process makes no steps")
            sample["gpu_mib"] = self.used_mib() - used
            learns = way.startswith("shared") and "shared, first" not in self.found.get(item.name, {})
            self.keep(item, "shared, first" if learns else way, sample)
            self.wait_for_worker(daemon)  # the next restore takes the worker that took the place of this one's in the pool
        except Failed as error:
            self.note(f"{item.name}, {way}: {error}")
        finally:
            kill(work.pid)
            if way in KEPT:
                self.rekindle(daemon, "warm", "--forget", image)

    def by_criu_alone(self, item, size):
        """Restores of a program that CRIU needs no help for."""
        command = ["sleep", "infinity"] if size < OF_PYTHON else [sys.executable, "-c", FILLED, str(size - OF_PYTHON)]
        image, none = self.place.image(), tempfile.mkdtemp(dir=self.place.folder)  # no plugins
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                   start_new_session=True)
        try:
            self.until(lambda: size < OF_PYTHON or sum(process_memory.would_be_written(process.pid).values()) > size - OF_PYTHON, "it does not begin")
            criu(self.place, "dump", image, ["-t", str(process.pid), "--libdir", none], "dump.log", self.limit())
            process.wait()
            for _ in range(self.o.rounds):
                begin, end = criu(self.place, "restore", image, ["-d", "--libdir", none], "restore.log", self.limit())
                log = read(f"{image}/restore.log")
                self.keep(item, "criu", {"running_ms": (end - begin) / MS, **criu_parts(log), **sizes(image)})
                kill(process.pid)
        except (Failed, OSError) as error:
            self.note(f"{item.name}, criu: {error}")
        finally:
            kill(process.pid)
            forget(image)

    def wait_for_worker(self, daemon):
        """Waits until a worker of the usual kind is ready."""
        self.until(lambda: self.rekindle(daemon, "pool")[0]["ready"] > 0, "no worker becomes ready")

    def used_mib(self):
        return int(asked_device("memory.used", True).split()[0]) if self.place.real else 0

    def wait_until_free(self, item):
        """A worker that was killed gives its memory back in the background, which slows down what comes next."""
        if self.place.real:
            self.until(lambda: self.used_mib() < (item.size >> 20) // 2 + 3000, "GPU memory is not given back")

    def first_step(self, work, count, begin):
        self.until(lambda: work.times.count() > count, "no step is done after a restore")
        return {"first_step_ms": (work.times.ends(count)[0] - clock_offset(work.pid) - begin) / MS}

    def until(self, condition, otherwise):
        deadline = time.monotonic() + self.limit()
        while not condition():
            if time.monotonic() > deadline:
                raise Failed(otherwise)
            time.sleep(0.001)

    def by_driver(self, item):
        """As CRIU's own plugin does it, with the driver asked by a process of its own."""
        if not self.allows(item.start_guess() + 15 + 3 * item.size / 1e9, f"{item.name}, {DRIVER}"):
            return
        driver, work, image = None, None, self.place.image()
        none = tempfile.mkdtemp(dir=self.place.folder)  # no plugins
        try:
            began = time.monotonic_ns()
            work = Work(self.place, self.command(item), True, self.limit())
            if "start" in self.ways:
                self.keep(item, "native start", {"first_step_ms": (work.times.ends(0)[0] - began) / MS})
            work.undisturbed(False)
            driver = Driver(self.place)
            driver.ask("lock", work.pid)
            driver.ask("checkpoint", work.pid)
            criu(self.place, "dump", image, ["-t", str(work.pid), "--libdir", none], "dump.log", self.limit())
            work.process.wait()
            count = work.times.count()
            begin, end = criu(self.place, "restore", image, ["-d", "--libdir", none], "restore.log", self.limit())
            restored = driver.ask("restore", work.pid)
            driver.ask("unlock", work.pid)
            sample = {"criu_ms": (end - begin) / MS, "driver_restore_ms": restored, "running_ms": (time.monotonic_ns() - begin) / MS}
            sample.update(self.first_step(work, count, begin), **sizes(image))
            self.keep(item, DRIVER, sample)
        except (Failed, OSError) as error:
            self.note(f"{item.name}, {DRIVER}: {error}")
        finally:
            if driver:
                driver.stop()
            if work:
                kill(work.pid)
            forget(image)


def options():
    more = parser("tree", "config", "sizes", "only", "images", "disk")
    more.add_argument("--ways", default=",".join(WAYS))
    more.add_argument("--budget", type=float, default=0)
    return more.parse_args()


def items(o, real):
    chosen = [float(it) for it in o.sizes.split(",")] if o.sizes else None
    order = ORDER if real else [("train", it, False) for it in chosen or [1 / 64]]
    for kind, gib, by_driver in order:
        if real and chosen and gib not in chosen or kind in TORCH and not real:
            continue
        item = Item(kind, gib, o.rounds, int(by_driver), ())
        if not o.only or re.search(o.only, item.name):
            yield item, by_driver


def figures(samples):
    names = sorted({name for it in samples for name in it})
    return {name: spread([it[name] for it in samples if name in it]) for name in names}


def report(o, place, bench, rates, seconds):
    workloads = [{"name": name, "ways": {way: {"figures": figures(samples), "samples": samples} for way, samples in ways.items()}}
                 for name, ways in bench.found.items()]
    write_json(o.out, {**about(o, "restore"), "criu": criu_version(place.criu), "images": place.images_are, "rates": rates,
                       "workloads": workloads, "first_uses": bench.uses, "notes": bench.notes, "left_out": bench.left_out, "seconds": round(seconds, 1)})
    columns = ("running_ms", "first_step_ms", "loaded_ms", "criu_init_ms", "criu_processes_ms", "criu_resume_ms", "code_ms", "replay_ms", "map_ms", "content_ms", "hash_ms", "content_gb_s",
               "gpu_mib", "suspend_ms", "resume_ms", "suspend_gb_s", "resume_gb_s")
    if "link_to_device" in rates:
        print(f"\nlink to the device: {rates['link_to_device']['median']:.1f} GB/s")
    if "memory_written" in rates:
        print(f"files in memory, written by all processors: {rates['memory_written']['median']:.1f} GB/s")
    print(f"\n{'milliseconds':24}" + "".join(f"{it.replace('_', ' ').replace(' ms', ''):>22}" for it in columns))
    for workload in workloads:
        for way, it in workload["ways"].items():
            cells = [it["figures"].get(name) for name in columns]
            shown = (f"{c['median']:.4g} ({c['low']:.4g}-{c['high']:.4g})" if c else "" for c in cells)
            print(f"{workload['name'] + ', ' + way:24}" + "".join(f"{it:>22}" for it in shown))
        ways = {way: it["figures"]["first_step_ms"]["median"] for way, it in workload["ways"].items() if "first_step_ms" in it["figures"]}
        if DRIVER in ways:
            print(f"{workload['name']}, first step, driver to ours: " + ", ".join(
                f"{way} {ways[DRIVER] / ways[way]:.1f}" for way in ("ours", "waiting", "cold", "lazy", *KEPT) if way in ways))


def main():
    o, start = options(), time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what has been measured is reported all the same
    sinks.have_run_in_memory()
    with tempfile.TemporaryDirectory() as folder, sinks.images(o.images, folder) as images:
        place = Place(o.stage, o.driver, criu_of(o.tree, folder), folder, images)
        bench = Bench(o, place, start + (o.budget or 1e9))
        chosen, rates = list(items(o, place.real)), {}
        try:
            if place.real:
                size = int(min(max((it.size for it, _ in chosen), default=GIB) * 1.2, sinks.available() * 0.8))
                sinks.touch(size, min(16, os.cpu_count()), min(90, bench.left() / 6))
                rates = checkpoint_rates.of_link(o, place, ask(o))
                if "suspend" in bench.ways:
                    rates["memory_written"] = memory_written(place.images)
            for item, by_driver in chosen:
                bench.item(item, by_driver)
        finally:
            report(o, place, bench, rates, time.monotonic() - start)
    return 0 if bench.found or bench.uses else 1


def memory_written(folder):
    """The rate at which all processors write as many new files, as a suspend does; without what comes from the device."""
    count, size = os.cpu_count(), min(16 * GIB, sinks.free(folder) // 2)
    return spread([sinks.write_rate(folder, size, count, count) for _ in range(3)])


def ask(o):
    """Runs a program natively that prints JSON."""
    return lambda command: json.loads(run(command, native_folder(o.stage, o.driver)))


if __name__ == "__main__":
    sys.exit(main())
