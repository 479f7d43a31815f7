"""The hash benchmark: how fast the kernels that hash device memory, or copy and hash it in one pass, are beside what the
memory itself does, in one run.

Each round starts `rekindle-bench hash`, which first compares the device's hashes with the host's. Reported are the
medians over all measurements, their lowest and highest, and each kernel's share of the memory's rate: of the faster of
a memset and of twice a copy's rate, since a copy reads and writes.
"""

import json

from bench_common import about, is_real, native_folder, parser, run, spread, write_json

KINDS = ("memset", "copy", "hash", "copy_and_hash")


def main():
    o = parser().parse_args()
    real = is_real(o.driver)
    sizes = ["65536", "4194304"] if real else ["64", "300"]
    command = [f"{o.stage}/bin/rekindle-bench", "hash", "--cuda-driver", o.driver]
    for size in sizes:
        command += ["--kib", size]
    command += ["--repeats", "21"] if real else ["--repeats", "2", "--piece-kib", "128"]
    samples, pieces = {}, {}
    for _ in range(o.rounds):
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
    document = {**about(o, "hash"), "processors": result["processors"], "rounds": o.rounds, "figures": figures}
    write_json(o.out, document)
    print(f"{document['device']}, {document['driver']}; GB/s of content, median [lowest, highest]")
    for it in figures:
        print(f"{it['bytes'] / 2**20:g} MiB in {it['pieces']} pieces of a launch")
        for kind in KINDS:
            rate = it[kind]
            print(f"  {kind:14} {rate['median']:10.1f}  [{rate['low']:.1f}, {rate['high']:.1f}]")
        print(f"  hash: {100 * it['hash_of_memory']:.1f} % of what memory moves ({it['memory']:.1f} GB/s); "
              f"copy and hash: {100 * it['copy_and_hash_of_copy']:.1f} % of the copy")


main()
