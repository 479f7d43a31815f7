"""NumPyro: a logistic regression is sampled by NUTS, one compiled transition a step."""
import os

os.environ.setdefault("XLA_FLAGS", "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy
import numpyro
import numpyro.distributions as dist
from numpyro.infer import NUTS

from job import digest, say, steps


def model(x, y):
    w = numpyro.sample("w", dist.Normal(jnp.zeros(16), 1.0).to_event(1))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Bernoulli(logits=x @ w + b), obs=y)


if jax.default_backend() != "gpu":
    raise SystemExit("JAX has found no GPU, for which it looks by the names of its devices")
one, two, three = jax.random.split(jax.random.PRNGKey(5), 3)
x = jax.random.normal(one, (512, 16))
y = (x @ jax.random.normal(two, (16,)) > 0).astype(jnp.int32)
kernel = NUTS(model, max_tree_depth=5)
state = kernel.init(three, 30, None, (x, y), {})
move = jax.jit(lambda state: kernel.sample(state, (x, y), {}))
for step in steps(60):
    state = move(state)
    if step % 20 == 0:
        say(step, float(state.potential_energy), digest(*(numpy.asarray(state.z[name]) for name in ("w", "b"))))
