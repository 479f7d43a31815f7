"""CUDA graphs by hand: a training step captured once and replayed, with its random numbers."""
from job import deterministic, digest, say, steps

torch = deterministic()
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Dropout(0.2),
                            torch.nn.Linear(1024, 256)).cuda()
best = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
x, y = torch.randn(64, 256, device="cuda"), torch.randn(64, 256, device="cuda")


def train():
    best.zero_grad(set_to_none=True)
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    best.step()
    return loss


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        train()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = train()
for step in steps(60):
    x.normal_()
    graph.replay()
    if step % 10 == 0:
        say(step, loss.item(), digest(*model.parameters()))
