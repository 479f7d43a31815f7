"""NCCL with one rank: reductions, gathers and a broadcast."""
import os
import tempfile

from job import deterministic, digest, say, steps

torch = deterministic()
import torch.distributed as dist

file = tempfile.NamedTemporaryFile()
dist.init_process_group("nccl", init_method=f"file://{file.name}.store", rank=0, world_size=1,
                        device_id=torch.device("cuda", 0))
x = torch.randn(1 << 20, device="cuda")
for step in steps(30):
    dist.all_reduce(x)
    out = [torch.empty_like(x)]
    dist.all_gather(out, x)
    dist.broadcast(out[0], 0)
    x = torch.tanh(out[0]) + 0.1
    if step % 10 == 0:
        say(step, digest(x))
dist.destroy_process_group()
os.unlink(file.name + ".store") if os.path.exists(file.name + ".store") else None
