"""PyTorch's workloads of the benchmark `checkpoint`: steps without end, each with the GPU idle at its end.

    checkpoint_work.py NAME FILE       FILE: where the steps' ends are written (step_times.py)
"""

import sys
import time

import overhead_work
from overhead_work import torch
from step_times import Times

WORKLOADS = {
    "llama13b": lambda: overhead_work.llama(5120, 40, 40, 13824),
    "gpt": lambda: overhead_work.gpt(2048, 24, 8, 1024),
    "experts": lambda: overhead_work.experts(2048, 5632, 24, 16, 2),
    "gptsmall": lambda: overhead_work.gpt(768, 12, 8, 1024),
}


def main():
    step, times = WORKLOADS[sys.argv[1]](), Times(sys.argv[2])
    for _ in range(3):  # memory, algorithms
        step()
    torch.cuda.synchronize()
    while True:
        step()
        torch.cuda.synchronize()
        times.add(time.monotonic_ns())


if __name__ == "__main__":
    main()
