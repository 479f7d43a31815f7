"""The list of experiments of the benchmark `facts`: which program, with which arguments, for how long at most."""

import dataclasses
import subprocess

STATES = ("reserved", "mapped", "readonly", "ready")
LATE = ("ready", "mapped", "reserved", "neighbour", "upgraded", "graph", "never", "readonly", "revoked", "unmapped")
READONLY = ("write", "imported", "upgrade", "lowered", "beside", "bandwidth", "bandwidth-imported")

DISPLACING = ("nothing", "local", "deep", "wide", "streams", "events", "copies", "graph", "print", "assert", "heap", "cooperative",
              "pinned", "stack")


@dataclasses.dataclass
class Experiment:
    name: str
    program: str
    arguments: list
    limit: float = 30  # seconds
    repeated: bool = True  # in every round
    parallel: bool = False  # beside others, since it times nothing
    environment: dict = dataclasses.field(default_factory=dict)
    # Where its file is: in a file system in memory with huge pages ("huge") or ordinary ones ("tmpfs"), or on a disk ("disk").
    place: str = ""


def mapping():
    for case in ("each", "early", "sweep", "access"):
        for spin in (1, 0):
            yield Experiment(f"B1 {case} {'spin' if spin else 'idle'}", "mapping", ["--case", case, "--spin", spin])
    for spin in (1, 0):
        few = ["--case", "register", "--pieces", 48, "--mib", 1]
        yield Experiment(f"B1 register {'spin' if spin else 'idle'}", "mapping", [*few, "--spin", spin])
    for pieces, mib in ((256, 64), (16, 1024)):
        for threads in (1, 8):
            several = ["--case", "threads", "--pieces", pieces, "--mib", mib, "--threads", threads]
            yield Experiment(f"B1 threads {threads} {mib} MiB", "mapping", several)


def states(programs):
    """Every call in every state."""
    listed = subprocess.run([f"{programs}/states"], capture_output=True, text=True, check=True).stdout.split()
    for case in listed:
        for state in STATES:
            yield Experiment(f"B3 {state} {case}", "states", ["--state", state, "--case", case], limit=15, repeated=False, parallel=True)


def exchange(programs, small):
    listed = subprocess.run([f"{programs}/exchange"], capture_output=True, text=True, check=True).stdout.split()
    for case in listed:
        yield Experiment(f"B9 {case}", "exchange", ["--case", case], limit=15, repeated=False, parallel=True)
    pieces, mib = (4, 2) if small else (400, 64)
    yield Experiment("B9 cost", "exchange", ["--case", "cost", "--pieces", pieces, "--mib", mib])


def loading():
    for mode, environment in (("lazy", {"CUDA_MODULE_LOADING": "LAZY"}), ("eager", {"CUDA_MODULE_LOADING": "EAGER"})):
        for how in ("module", "library"):
            for copies in (0, 1):
                name = f"B4 {how} {mode} {'copies' if copies else 'idle'}"
                yield Experiment(name, "loading", ["--how", how, "--copies", copies], environment=environment)
        yield Experiment(f"B4 library {mode} ahead", "loading", ["--how", "library", "--copies", 1, "--ahead", 8], environment=environment)


def displaced():
    for what in DISPLACING:
        yield Experiment(f"B10 {what}", "displaced", ["--what", what], parallel=True)
    for what in DISPLACING:
        yield Experiment(f"B10 {what} reserved", "displaced", ["--what", what, "--reserve", 64], parallel=True)


def sharing(small):
    for mib, pieces in ((2, 4),) if small else ((64, 16), (512, 4), (2048, 2)):
        yield Experiment(f"B5 {mib} MiB", "sharing", ["--mib", mib, "--pieces", pieces], limit=40)
    mib = 2 if small else 64
    yield Experiment(f"B5 {mib} MiB killed", "sharing", ["--mib", mib, "--pieces", 4, "--killed", 1], limit=40)


def standby(small):
    # Little of it is registered: the first touch of pinned memory is slow on some machines.
    registered, kept = (2, 8) if small else (1024, 4096)
    for name, arguments in (
        ("control", ["--rounds", 0, "--registered-mib", registered]), ("stripped", []),
        ("registered", ["--registered-mib", registered]), ("kept", ["--kept-mib", kept]),
    ):
        yield Experiment(f"B7 {name}", "standby", arguments, limit=60, repeated=False)


def feeding(small):
    few = ["--mib", 16] if small else ["--mib", 2048]
    yield Experiment("B8 link", "feeding", ["--link", 1])
    every = ["--threads", "1,2,4,8,16", "--buffers", "1,2", "--hash", "none,device,host"]
    yield Experiment("B8 huge", "feeding", every, limit=90, repeated=False, place="huge")
    lanes = ["--mib", 16 if small else 16384, "--threads", "2" if small else "16,24", "--buffers", "2,4"]
    sizes = ["--kib", "64" if small else "512,1024,2048,4096", "--read", "call,map"]
    yield Experiment("B8 huge, smaller pieces", "feeding", [*lanes, *sizes], limit=90, repeated=False, place="huge")
    yield Experiment("B8 tmpfs", "feeding", every, limit=90, repeated=False, place="tmpfs")
    disk = [*few, "--threads", "1,4,16", "--hash", "none"]
    yield Experiment("B8 disk cached", "feeding", disk, limit=60, repeated=False, place="disk")
    yield Experiment("B8 disk direct", "feeding", [*disk, "--direct", 1, "--repeats", 1], limit=60, repeated=False, place="disk")


def draining(small):
    some = ["--mib", 16] if small else ["--mib", 16384]
    threads = "1,2" if small else "8,16,24,32"
    yield Experiment("B11 huge", "draining", [*some, "--threads", threads, "--wait", "sleep,block"], limit=120, repeated=False, place="huge")
    smaller = [*some, "--threads", "2" if small else "16,24", "--kib", "1024,2048"]
    yield Experiment("B11 huge, smaller pieces", "draining", smaller, limit=60, repeated=False, place="huge")


def small_copies(small):
    rounds = ["--rounds", 20 if small else 2000]
    for stream in ("legacy", "own"):
        for size in (4, 64, 4096, 65536):
            yield Experiment(f"B12 {size} bytes, {stream}", "small", ["--bytes", size, "--stream", stream, *rounds], limit=40)


def heap(small):
    for what in ("describe", "when", "places") if small else ("describe", "when", "places", "same"):
        yield Experiment(f"B13 {what}", "heap", ["--what", what], limit=40, repeated=False)


def experiments(programs, small):
    """What matters most comes first."""
    yield from mapping()
    for case in LATE:
        yield Experiment(f"B2 {case}", "late", ["--case", case])
    yield from states(programs)
    yield from exchange(programs, small)
    yield from sharing(small)
    for case in READONLY:
        yield Experiment(f"B6 {case}", "readonly", ["--case", case])
    yield from loading()
    yield from standby(small)
    yield from displaced()
    yield from feeding(small)
    yield from draining(small)
    yield from small_copies(small)
    yield from heap(small)
