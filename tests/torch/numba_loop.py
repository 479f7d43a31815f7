"""Numba CUDA: a small regression trained by gradient descent."""
import numpy
from numba import cuda

from job import digest, say, steps


@cuda.jit
def residual(x, y, guess, out):
    i = cuda.grid(1)
    if i < x.shape[0]:
        sum = 0.0
        for j in range(x.shape[1]):
            sum += x[i, j] * guess[j]
        out[i] = sum - y[i]


@cuda.jit
def descend(x, out, guess, rate):
    j = cuda.grid(1)
    if j < guess.shape[0]:
        sum = 0.0
        for i in range(x.shape[0]):
            sum += x[i, j] * out[i]
        guess[j] -= rate * sum / x.shape[0]


random = numpy.random.RandomState(7)
host = random.standard_normal((1024, 64))
wanted = random.standard_normal(64)
x, y, guess, out = (cuda.to_device(a) for a in (host, host @ wanted, numpy.zeros(64), numpy.zeros(1024)))
for step in steps(60):
    residual[8, 128](x, y, guess, out)
    descend[1, 64](x, out, guess, 0.1)
    if step % 20 == 0:
        now = guess.copy_to_host()
        say(step, abs(now - wanted).max(), digest(now))
