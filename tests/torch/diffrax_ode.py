"""Diffrax and Equinox: an ordinary differential equation with a network as its right side, fitted through an adaptive solver."""
import os

os.environ.setdefault("XLA_FLAGS", "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import diffrax
import equinox
import jax
import jax.numpy as jnp
import numpy
import optax

from job import digest, say, steps

times = jnp.linspace(0.0, 2.0, 20)


def path(model, start):
    return diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, args: model(y)), diffrax.Tsit5(), t0=times[0], t1=times[-1], dt0=0.1, y0=start,
        stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6), saveat=diffrax.SaveAt(ts=times)).ys


@equinox.filter_jit
def train(model, state, starts, wanted):
    value, slope = equinox.filter_value_and_grad(
        lambda model: jnp.mean((jax.vmap(lambda start: path(model, start))(starts) - wanted) ** 2))(model)
    change, state = best.update(slope, state, equinox.filter(model, equinox.is_inexact_array))
    return equinox.apply_updates(model, change), state, value


if jax.default_backend() != "gpu":
    raise SystemExit("JAX has found no GPU, for which it looks by the names of its devices")
one, two = jax.random.split(jax.random.PRNGKey(2))
model = equinox.nn.MLP(2, 2, 64, 2, activation=jax.nn.softplus, key=one)
best = optax.adam(3e-3)
state = best.init(equinox.filter(model, equinox.is_inexact_array))
starts = jax.random.uniform(two, (32, 2), minval=-1.0, maxval=1.0)
turn = jax.vmap(lambda t: jnp.array([[jnp.cos(t), -jnp.sin(t)], [jnp.sin(t), jnp.cos(t)]]))(times)
wanted = jnp.einsum("tij,bj->bti", turn, starts)
for step in steps(40):
    model, state, value = train(model, state, starts, wanted)
    if step % 10 == 0:
        say(step, float(value), digest(*map(numpy.asarray, jax.tree.leaves(equinox.filter(model, equinox.is_inexact_array)))))
