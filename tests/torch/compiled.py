"""torch.compile in its default mode: Inductor's Triton kernels, forward and backward."""
import os

from job import deterministic, digest, say, steps

torch = deterministic()
mode = os.environ.get("JOB_MODE", "default")


def main():
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.LayerNorm(512),
                                torch.nn.Linear(512, 256)).cuda()
    best = torch.optim.Adam(model.parameters(), lr=1e-3)
    fast = torch.compile(model, mode=mode)
    x = torch.randn(128, 256, device="cuda")
    for step in steps(40):
        loss = (fast(x) - x.roll(1, 0)).square().mean()
        loss.backward()
        best.step()
        best.zero_grad()
        x = torch.roll(x, 1, 1)
        if step % 10 == 0:
            say(step, loss.item(), digest(*model.parameters()))


if __name__ == "__main__":
    main()
