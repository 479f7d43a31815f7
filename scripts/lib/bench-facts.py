"""The facts benchmark: what the driver does in cases that its documentation leaves open and a restore depends on.

The programs of `tests/facts` ask; each question is a process of its own with a time limit, so a crash, a hang or a broken
context is an answer and not the end of the run. B1: does mapping memory wait for kernels or hold up launches? B2: what does
a running kernel see of mappings that change under it? B3: what do calls do with memory that is not there? B4: what does
loading code cost beside copies, and where does it go? B5: does memory outlive its process? B6: what is read-only memory
worth? B7: what does the driver's own checkpoint of a suspended worker cost? B8: how fast do files reach the device?
B9: do objects work after the memory behind their addresses was exchanged?

Reported are medians over rounds, their lowest and highest. A run ends when the budget is spent; what was left out is said.
The software GPU answers a small version of each; its answers show only that the programs work.
"""

import os
import re
import tempfile
import time

from bench_common import about, is_real, parser, write_json
from facts_experiments import experiments
from facts_report import compare_addresses, displaced, figures, report
from facts_runs import Runner


def main():
    o = parser("programs", "only", "budget", "small").parse_args()
    small = bool(o.small) or not is_real(o.driver)
    begin, budget = time.monotonic(), float(o.budget or 220)
    results, left_out = {}, []
    with tempfile.TemporaryDirectory(prefix="facts") as folder:
        programs = os.path.abspath(o.programs)
        chosen = [it for it in experiments(programs, small) if not o.only or re.search(o.only, it.name)]
        runner = Runner(programs, o.driver, small, folder, begin + budget)
        for number in range(o.rounds):
            again = [it for it in chosen if number == 0 or it.repeated]
            for experiment, run in runner.run_all(again):
                if run is None:
                    left_out.append(f"{experiment.name}, round {number + 1}")
                else:
                    results.setdefault(experiment.name, []).append(run)
    document = about(o, "facts") | {
        "small": small, "rounds": o.rounds, "seconds": round(time.monotonic() - begin, 1),
        "same_addresses": compare_addresses(results), "displaced": displaced(results), "left_out": left_out,
        "experiments": [{"name": name, "figures": figures(runs), "runs": runs} for name, runs in results.items()],
    }
    write_json(o.out, document)
    report(document)


main()
