"""The benchmark `attach`: how long a new process takes until it has a worker that waits in the pool, and natively until it has a context.

Each process loads the driver, and times `cuInit`, the retaining of the first GPU's primary context, and a first wait for it. Under Rekindle
`cuInit` attaches. The daemon has a worker ready when a process begins.
"""

import ctypes
import json
import os
import sys
import tempfile
import time

from bench_common import Daemon, about, native_folder, parser, run, spread, write_json

PROCESSES = 20
CALLS = ("init_ms", "context_ms", "synchronize_ms")


def measured():
    """The times of this process, in milliseconds."""
    cuda, context, times = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), [time.monotonic_ns()]
    for call in (lambda: cuda.cuInit(0), lambda: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
                 lambda: cuda.cuCtxSetCurrent(context) or cuda.cuCtxSynchronize()):
        code = call()
        times.append(time.monotonic_ns())
        if code != 0:
            raise SystemExit(f"the driver answers {code}")
    return {name: (b - a) / 1e6 for name, a, b in zip(CALLS, times, times[1:])}


def processes(o, library, socket=None, before=lambda: None):
    """The figures of all processes."""
    samples = []
    for _ in range(o.rounds * PROCESSES):
        before()
        samples.append(json.loads(run([sys.executable, os.path.abspath(__file__), "--one"], library, socket)))
    return {name: spread([it[name] for it in samples]) for name in CALLS}


def main():
    o = parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        daemon = Daemon(o.stage, o.driver, folder)
        try:
            ours = processes(o, f"{o.stage}/lib/rekindle", daemon.socket, daemon.wait_ready)
        finally:
            daemon.stop()
        native = processes(o, native_folder(o.stage, o.driver))
    for name, figures in (("under Rekindle", ours), ("native", native)):
        print(f"{name}: " + ", ".join(f"{call[:-3]} {it['median']:.2f} ms ({it['low']:.2f} to {it['high']:.2f})" for call, it in figures.items()))
    write_json(o.out, {**about(o, "attach"), "rounds": o.rounds, "processes": PROCESSES, "rekindle": ours, "native": native})


if sys.argv[1:] == ["--one"]:
    print(json.dumps(measured()))
else:
    main()
