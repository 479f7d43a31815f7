"""The micro benchmark: what a call costs under Rekindle beside what it costs natively, in one run.

Each round runs the program `micro` natively and under Rekindle, and starts `firstkernel` several times each, in turn.
Reported are the medians over rounds of each figure's median, their lowest and highest, and the ratio to native.
"""

import json
import tempfile
import time

from bench_common import Daemon, about, is_real, native_folder, parser, run, spread, write_json

STARTS = 5


def start_ms(command, library, socket=None):
    """From the program's start to its first kernel's result, as the program says, and to its end."""
    begin = time.monotonic()
    out = run(command, library, socket)
    assert "ok" in out, out
    return (time.monotonic() - begin) * 1e3


def flatten(result):
    """The figures of one run of `micro` by name; times in ns, bandwidths in GB/s."""
    figures = {k: v["median"] for k, v in result.items() if isinstance(v, dict) and "median" in v}
    figures["init_to_first_kernel"] = result["first_kernel_ns"]
    for copy in result["copies"]:
        name = f"{copy['memory']}_{copy['direction']}_{copy['bytes']}"
        figures[name] = copy["gb_per_s"]["median"]
    return figures


def main():
    o = parser().parse_args()
    real = is_real(o.driver)
    native = native_folder(o.stage, o.driver)
    ours = f"{o.stage}/lib/rekindle"
    apps = f"{o.stage}/share/rekindle/apps"
    micro = [f"{apps}/micro"]
    if not real:
        micro += ["--max-mib", "8", "--repeats", "5", "--burst", "50"]
    samples = {"native": [], "rekindle": []}
    starts = {"native": [], "rekindle": []}
    with tempfile.TemporaryDirectory() as folder:
        daemon = Daemon(o.stage, o.driver, folder)
        try:
            for _ in range(o.rounds):
                samples["native"].append(flatten(json.loads(run(micro, native))))
                daemon.wait_ready()
                samples["rekindle"].append(flatten(json.loads(run(micro, ours, daemon.socket))))
                for _ in range(STARTS):
                    starts["native"].append(start_ms([f"{apps}/firstkernel"], native))
                    daemon.wait_ready()
                    starts["rekindle"].append(start_ms([f"{apps}/firstkernel"], ours, daemon.socket))
        finally:
            daemon.stop()
        device = json.loads(run(micro[:1] + ["--max-mib", "1", "--repeats", "3", "--burst", "10"], native))["device"]
    figures = {}
    for name in samples["native"][0]:
        n = spread([s[name] for s in samples["native"]])
        r = spread([s[name] for s in samples["rekindle"]])
        figures[name] = {"native": n, "rekindle": r, "ratio": r["median"] / n["median"],
                         "unit": "GB/s" if name[-1].isdigit() else "ns"}
    n, r = spread(starts["native"]), spread(starts["rekindle"])
    figures["process"] = {"native": n, "rekindle": r, "ratio": r["median"] / n["median"], "unit": "ms"}
    document = {**about(o, "micro", device), "rounds": o.rounds, "worker_spin_us": 200, "worker_wait_spin_us": 20000,
                "caller_spin_us": 2000, "figures": figures}
    write_json(o.out, document)
    print(f"{device}, driver {document['driver']}, {o.rounds} rounds")
    print(f"{'':28} {'native':>28} {'rekindle':>28}   ratio")
    for name, f in figures.items():
        row = [f"{s['median']:.4g} ({s['low']:.4g}..{s['high']:.4g})" for s in (f["native"], f["rekindle"])]
        print(f"{name:28} {row[0]:>28} {row[1]:>28} {f['ratio']:7.3f}  {f['unit']}")


main()
