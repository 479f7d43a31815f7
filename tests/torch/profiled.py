"""The profiler, which has no GPU to trace under Rekindle: the program goes on, and its CPU side is profiled."""
from job import deterministic, digest, say, steps

torch = deterministic()
from torch.profiler import ProfilerActivity, profile

x = torch.randn(256, 256, device="cuda")
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
    for step in steps(10):
        x = torch.tanh(x @ x)
    torch.cuda.synchronize()
names = {event.key for event in seen.key_averages()}
say("aten::tanh" in names, "aten::mm" in names, digest(x))
