"""A CUDA tensor shared with another process by torch.multiprocessing: both write it in turn."""
from job import deterministic, digest, say, steps


def child(asked, done):
    import torch
    while True:
        work = asked.get()
        if work is None:
            return
        tensor, factor = work
        tensor.mul_(factor).add_(1)
        torch.cuda.synchronize()
        del tensor, work
        done.put(factor)


def main():
    torch = deterministic()
    context = torch.multiprocessing.get_context("spawn")
    asked, done = context.Queue(), context.Queue()
    process = context.Process(target=child, args=(asked, done))
    process.start()
    x = torch.arange(1 << 16, device="cuda", dtype=torch.float32)
    for step in steps(20):
        x = x + 0.5
        torch.cuda.synchronize()
        asked.put((x, 1 - step / 100))
        done.get()
        if step % 5 == 0:
            say(step, digest(x))
    asked.put(None)
    process.join()
    say("child ends with", process.exitcode)


if __name__ == "__main__":
    main()
