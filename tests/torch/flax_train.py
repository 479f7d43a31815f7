"""Flax: a network of convolutions with batch norms and dropout, trained with Optax's AdamW and a schedule."""
import os

os.environ.setdefault("XLA_FLAGS", "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy
import optax
from flax import nnx

from job import digest, say, steps


class Network(nnx.Module):
    def __init__(self, rngs):
        self.one, self.two = nnx.Conv(3, 32, (3, 3), rngs=rngs), nnx.Conv(32, 64, (3, 3), strides=2, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(64, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(64 * 16 * 16, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.two(nnx.relu(self.one(x)))))
        return self.out(self.drop(x.reshape(x.shape[0], -1)))


@nnx.jit
def train(model, best, x, y):
    def loss(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    value, slope = nnx.value_and_grad(loss)(model)
    best.update(model, slope)
    return value


if jax.default_backend() != "gpu":
    raise SystemExit("JAX has found no GPU, for which it looks by the names of its devices")
model = Network(nnx.Rngs(1))
best = nnx.Optimizer(model, optax.adamw(optax.cosine_decay_schedule(1e-3, 60)), wrt=nnx.Param)
for step in steps(40):
    one, two = jax.random.split(jax.random.PRNGKey(step))
    value = train(model, best, jax.random.normal(one, (32, 32, 32, 3)), jax.random.randint(two, (32,), 0, 10))
    if step % 10 == 0:
        say(step, float(value), digest(*map(numpy.asarray, jax.tree.leaves(nnx.state(model, nnx.Param)))))
