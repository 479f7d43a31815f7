"""JAX: a small network trained under jit."""
import os

os.environ.setdefault("XLA_FLAGS", "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy

from job import digest, say, steps


def loss(p, x, y):
    return jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"] - y) ** 2)


@jax.jit
def train(p, x, y):
    value, slope = jax.value_and_grad(loss)(p, x, y)
    return jax.tree.map(lambda v, g: v - 0.1 * g, p, slope), value


if jax.default_backend() != "gpu":
    raise SystemExit("JAX has found no GPU, for which it looks by the names of its devices")
one, two, three = jax.random.split(jax.random.PRNGKey(1), 3)
p = {"a": jax.random.normal(one, (64, 128)) / 8, "b": jax.random.normal(two, (128, 4)) / 8}
x = jax.random.normal(three, (256, 64))
y = jnp.sin(x[:, :4])
for step in steps(60):
    p, value = train(p, x, y)
    if step % 20 == 0:
        say(step, float(value), digest(numpy.asarray(p["a"]), numpy.asarray(p["b"])))
