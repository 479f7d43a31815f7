"""The hash benchmark: how fast the kernels that hash device memory, or copy and hash it in one pass, are beside what the
memory itself does, in one run.

Each round starts `rekindled bench-hash`, which first compares the device's hashes with the host's. Reported are the
medians over all measurements, their lowest and highest, and each kernel's share of the memory's rate: of the faster of
a memset and of twice a copy's rate, since a copy reads and writes.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess

from bench_common import driver_version, native_folder, run, spread

KINDS = ("memset", "copy", "hash", "copy_and_hash")


def device_name(real):
    if not real:
        return "software GPU"
    done = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
    return done.stdout.split("\n")[0]


def main():
    parser = argparse.ArgumentParser()
    for option in ("stage", "driver", "out", "rounds", "commit", "version"):
        parser.add_argument(f"--{option}", required=True)
    o = parser.parse_args()
    real = "simgpu" not in o.driver
    sizes = ["65536", "4194304"] if real else ["64", "300"]
    command = [f"{o.stage}/bin/rekindled", "bench-hash", "--cuda-driver", o.driver]
    for size in sizes:
        command += ["--kib", size]
    command += ["--repeats", "21"] if real else ["--repeats", "2", "--piece-kib", "128"]
    samples, pieces = {}, {}
    for _ in range(int(o.rounds)):
        result = json.loads(run(command, native_folder(o.stage, o.driver)))
        for figures in result["figures"]:
            pieces[figures["bytes"]] = figures["pieces"]
            for kind in KINDS:
                # The first of a process finds caches and clocks cold.
                samples.setdefault((figures["bytes"], kind), []).extend(figures[kind][1:])
    figures = []
    for size in pieces:
        rates = {kind: spread(samples[size, kind]) for kind in KINDS}
        memory = max(rates["memset"]["median"], 2 * rates["copy"]["median"])
        figures.append({
            "bytes": size, "pieces": pieces[size], "unit": "GB/s of content", **rates, "memory": memory,
            "hash_of_memory": rates["hash"]["median"] / memory,
            "copy_and_hash_of_copy": rates["copy_and_hash"]["median"] / rates["copy"]["median"],
        })
    document = {
        "benchmark": "hash", "date": datetime.date.today().isoformat(), "commit": o.commit, "version": o.version,
        "device": device_name(real), "processors": result["processors"], "driver": driver_version(real),
        "kernel": platform.release(), "cores": os.cpu_count(), "rounds": int(o.rounds), "figures": figures,
    }
    with open(o.out, "w") as out:
        json.dump(document, out, indent=1)
    print(f"{document['device']}, {document['driver']}; GB/s of content, median [lowest, highest]")
    for it in figures:
        print(f"{it['bytes'] / 2**20:g} MiB in {it['pieces']} pieces of a launch")
        for kind in KINDS:
            rate = it[kind]
            print(f"  {kind:14} {rate['median']:10.1f}  [{rate['low']:.1f}, {rate['high']:.1f}]")
        print(f"  hash: {100 * it['hash_of_memory']:.1f} % of what memory moves ({it['memory']:.1f} GB/s); "
              f"copy and hash: {100 * it['copy_and_hash_of_copy']:.1f} % of the copy")


main()
