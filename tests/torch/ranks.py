"""What the programs of NCCL with several ranks share: a process for each GPU, all in one tree, that reduce and gather.

NCCL reads its variables once in a process, so each way in which ranks reach each other's memory is a program of its own.

With RANKS_ALONE set, one process computes what the ranks would, without NCCL: what they must print, where one GPU is shown as
several. NCCL itself refuses two ranks on one GPU.
"""
import os
import sys
import tempfile

from job import count, deterministic, digest, hold, say

RANKS = 2


def rank(number, ranks, store, graph):
    """One rank. The first one prints and counts steps."""
    torch = deterministic(number + 1)
    import torch.distributed as dist

    device = torch.device("cuda", number % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=number, world_size=ranks, device_id=device)
    x = torch.randn(1 << 20, device="cuda")
    y = torch.empty(ranks << 20, device="cuda")

    def step():
        dist.all_reduce(x)
        dist.all_gather_into_tensor(y, x)
        x.copy_(torch.tanh(y[: 1 << 20] * 0.3) + 0.1 * (number + 1))

    captured = None
    if graph:
        step()
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            step()
        step = captured.replay
    for i in range(1, count(200) + 1):
        step()
        if number == 0 and i % 50 == 0:
            say(i, digest(x))
        # All wait at the same step: a collective that others have begun without the first rank would not end.
        hold(i, says=number == 0)
    all = [None] * ranks
    dist.all_gather_object(all, digest(x, y))
    # NCCL waits for the end of graphs that use the communicator.
    step = captured = None
    torch.cuda.synchronize()
    if number == 0:
        say("all", *all)
    dist.destroy_process_group()


def alone(graph):
    """What two ranks print. The sum of two numbers is the same in every order."""
    assert RANKS == 2
    xs = []
    for number in range(RANKS):
        torch = deterministic(number + 1)
        xs.append(torch.randn(1 << 20, device="cuda"))

    def step():
        total = xs[0] + xs[1]
        for number, x in enumerate(xs):
            x.copy_(torch.tanh(total * 0.3) + 0.1 * (number + 1))
        return torch.cat([total] * RANKS)

    if graph:
        step()
    for i in range(1, count(200) + 1):
        y = step()
        if i % 50 == 0:
            say(i, digest(xs[0]))
        hold(i)
    say("all", *(digest(x, y) for x in xs))


def main(graph=False, **variables):
    os.environ.update({"NCCL_NVLS_ENABLE": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", **variables})
    if os.environ.get("RANKS_ALONE"):
        return alone(graph)
    import torch.multiprocessing as processes

    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(rank, (RANKS, os.path.join(folder, "store"), graph), RANKS)
    sys.stdout.flush()
