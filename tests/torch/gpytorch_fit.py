"""GPyTorch: an exact Gaussian process is fitted, by Cholesky factors, and predicts."""
from job import deterministic, digest, say, steps

torch = deterministic()
import gpytorch


class Process(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5, ard_num_dims=4))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


x = torch.rand(600, 4, device="cuda", dtype=torch.float64)
y = torch.sin(x.sum(1) * 3) + 0.05 * torch.randn(600, device="cuda", dtype=torch.float64)
likelihood = gpytorch.likelihoods.GaussianLikelihood().to("cuda", torch.float64)
model = Process(x, y, likelihood).to("cuda", torch.float64)
model.train()
likelihood.train()
marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
best = torch.optim.Adam(model.parameters(), lr=0.05)
for step in steps(40):
    loss = -marginal(model(x), y)
    loss.backward()
    best.step()
    best.zero_grad()
    if step % 10 == 0:
        say(step, loss.item(), digest(*model.parameters()))
model.eval()
likelihood.eval()
with torch.no_grad():
    said = likelihood(model(torch.rand(200, 4, device="cuda", dtype=torch.float64)))
    say("predicted", digest(said.mean, said.variance))
