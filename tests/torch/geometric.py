"""PyTorch Geometric: convolutions and attention on a random graph, pooled by parts, trained."""
from job import deterministic, digest, say, steps

torch = deterministic()
from torch_geometric.nn import GATConv, GCNConv, SAGEConv, global_mean_pool

nodes, parts = 2048, 32


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = GCNConv(64, 128), SAGEConv(128, 128), GATConv(128, 32, heads=4)
        self.out = torch.nn.Linear(128, 8)

    def forward(self, x, edges, part):
        x = torch.relu(self.one(x, edges))
        x = torch.relu(self.two(x, edges))
        return self.out(global_mean_pool(torch.nn.functional.elu(self.three(x, edges)), part, parts))


model = Network().cuda()
best = torch.optim.Adam(model.parameters(), lr=2e-3)
x = torch.randn(nodes, 64, device="cuda")
edges = torch.randint(0, nodes, (2, 16384), device="cuda")
part = torch.arange(nodes, device="cuda") // (nodes // parts)
for step in steps(40):
    loss = torch.nn.functional.cross_entropy(model(x, edges, part), torch.arange(parts, device="cuda") % 8)
    loss.backward()
    best.step()
    best.zero_grad()
    if step % 8 == 0:
        edges[:, ::7] = torch.randint(0, nodes, edges[:, ::7].shape, device="cuda")
    if step % 10 == 0:
        say(step, loss.item(), digest(*model.parameters()))
