"""The link benchmark: how fast the copy engine brings device memory to the host, beside what the link does, in one run.

Each round starts `rekindle-bench link`. `link` is one stream that copies into one pinned buffer of 256 MiB, again and
again; `link_by_pieces` the same 4 MiB at a time; `staged` the engine until all is off the device, with a stage that has
room for all of it; `staged_to_end` until all is hashed too and written to /dev/null; `unstaged` the engine without a stage,
where each lane hashes and writes before it copies on. `register` is how fast the driver registers that memory, which the
engine does not have it do, and `link_to_registered` one stream that copies to all of it then. Reported are medians over all measurements, their lowest and
highest, and the engine's share of the link's rate. Needs as much host memory as it copies.
"""

import json

from bench_common import about, is_real, native_folder, parser, run, spread, write_json

KINDS = ("link", "link_by_pieces", "staged", "staged_to_end", "unstaged", "register", "link_to_registered")


def main():
    o = parser("sizes").parse_args()
    real = is_real(o.driver)
    sizes = [int(float(gib) * 1024) for gib in o.sizes.split(",")] if o.sizes else [1024, 4096, 16384] if real else [64]
    command = [f"{o.stage}/bin/rekindle-bench", "link", "--cuda-driver", o.driver, "--repeats", "4" if real else "2"]
    for size in sizes:
        command += ["--mib", str(size)]
    samples = {}
    for _ in range(o.rounds):
        result = json.loads(run(command, native_folder(o.stage, o.driver)))
        for figures in result["figures"]:
            for kind in KINDS:
                # The first of a process finds caches and clocks cold.
                samples.setdefault((figures["bytes"], kind), []).extend(figures[kind][1:])
    figures = []
    for size in sorted({size for size, _ in samples}):
        rates = {kind: spread(samples[size, kind]) for kind in KINDS}
        link = rates["link"]["median"]
        figures.append({
            "bytes": size, "unit": "GB/s", **rates,
            "staged_of_link": rates["staged"]["median"] / link, "unstaged_of_link": rates["unstaged"]["median"] / link,
        })
    document = about(o, "link") | {"lanes": result["lanes"], "rounds": o.rounds, "figures": figures}
    write_json(o.out, document)
    print(f"{document['device']}, {document['lanes']} lanes; GB/s, median [lowest, highest]")
    for it in figures:
        print(f"{it['bytes'] / 2**30:g} GiB")
        for kind in KINDS:
            rate = it[kind]
            print(f"  {kind:18} {rate['median']:8.2f}  [{rate['low']:.2f}, {rate['high']:.2f}]")
        print(f"  to host memory: {100 * it['staged_of_link']:.1f} % of the link, "
              f"{100 * it['unstaged_of_link']:.1f} % without a stage")


main()
