"""Several threads, each with streams of its own, events between them, and pinned copies out and in."""
import threading

from job import deterministic, digest, say, steps

torch = deterministic()
threads, rounds = 4, 30
state = [torch.full((256, 256), 0.01 * (i + 1), device="cuda") for i in range(threads)]
host = [torch.empty(256, 256).pin_memory() for _ in range(threads)]
gate = threading.Barrier(threads + 1)


def work(i):
    one, two = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    for _ in range(rounds):
        gate.wait()
        with torch.cuda.stream(one):
            y = torch.tanh(state[i] @ state[i] + 0.1)
            done = one.record_event()
        with torch.cuda.stream(two):
            two.wait_event(done)
            host[i].copy_(y, non_blocking=True)
            y.record_stream(two)
        two.synchronize()
        host[i] *= 0.999
        with torch.cuda.stream(one):
            state[i].copy_(host[i], non_blocking=True)
        one.synchronize()
        gate.wait()


each = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(threads)]
for thread in each:
    thread.start()
for step in steps(rounds):
    gate.wait()
    gate.wait()
    if step % 10 == 0:
        say(step, digest(*state))
