"""The write benchmark: how fast a file takes what is written to it by several threads, 4 MiB at a time, and what our writer
reaches on the same file system, in one run. What counts is when fsync returns.

Each round starts `rekindle-bench write` once for each folder: `buffered` writes; `buffered_files` into as many files as there
are threads; `early` sends each piece to the disk as
soon as it is written (sync_file_range); `direct` is O_DIRECT, `direct_reserved` with the file's blocks reserved before;
`ours` is what images are written by, with the hashing of each piece, and `ours_files` the same into as many files as there
are threads, as images of much memory are. Reported are medians, their lowest and highest, and ours (the better of the two)
as a share of the best of the others with any number of threads.
"""

import json
import os

from bench_common import about, parser, run, spread, write_json

KINDS = ("buffered", "buffered_files", "early", "direct", "direct_reserved", "ours", "ours_files")


def file_system(folder):
    """The mount that a folder is on: what kind it is, and of what."""
    best = ("", "unknown")
    with open("/proc/self/mounts") as mounts:
        for line in mounts:
            source, at, kind = line.split()[:3]
            inside = os.path.realpath(folder) + "/"
            if inside.startswith(at.rstrip("/") + "/") and len(at) >= len(best[0]):
                best = (at, f"{kind} on {source}")
    return best[1]


def main():
    o = parser("dirs", "mib", "threads").parse_args()
    folders, mib = (o.dirs or "/dev/shm,/var/tmp").split(","), int(o.mib or 1024)
    threads = [int(it) for it in o.threads.split(",")] if o.threads else sorted({1, 2, 4, 8} & set(range(1, os.cpu_count() + 1)))
    samples = {}
    for _ in range(o.rounds):
        for folder in folders:
            command = [f"{o.stage}/bin/rekindle-bench", "write", "--dir", folder, "--mib", str(mib), "--repeats", "1"]
            for count in threads:
                command += ["--threads", str(count)]
            for figures in json.loads(run(command, "")):
                for kind in KINDS:
                    samples.setdefault((folder, figures["threads"], kind), []).extend(figures[kind])
    figures, best = [], {}
    for folder in folders:
        for count in threads:
            rates = {kind: spread(samples[folder, count, kind]) for kind in KINDS if samples[folder, count, kind]}
            figures.append({"folder": folder, "file_system": file_system(folder), "threads": count, "unit": "GB/s", **rates})
            for kind, rate in rates.items():
                who = "ours" if kind.startswith("ours") else "sink"
                best[folder, who] = max(best.get((folder, who), 0), rate["median"])
    document = about(o, "write", device="") | {
        "mib": mib, "rounds": o.rounds, "figures": figures,
        "ours_of_sink": {folder: best[folder, "ours"] / best[folder, "sink"] for folder in folders},
    }
    write_json(o.out, document)
    print(f"{mib} MiB until fsync returns; GB/s, median [lowest, highest]")
    for it in figures:
        print(f"{it['folder']} ({it['file_system']}), {it['threads']} threads")
        for kind in KINDS:
            if kind in it:
                rate = it[kind]
                print(f"  {kind:15} {rate['median']:8.3f}  [{rate['low']:.3f}, {rate['high']:.3f}]")
    for folder, share in document["ours_of_sink"].items():
        print(f"{folder}: ours is {100 * share:.1f} % of what the sink alone takes")


main()
