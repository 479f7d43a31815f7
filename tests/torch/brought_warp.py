"""Warp: particles on a hash grid, a captured graph, and the gradient of a simulation by Warp's tape."""
import tempfile

import warp as wp

wp.config.log_level = wp.LOG_WARNING
wp.config.kernel_cache_dir = tempfile.mkdtemp()

import numpy

from job import digest, say, steps

wp.init()


@wp.kernel
def push(grid: wp.uint64, x: wp.array(dtype=wp.vec3), v: wp.array(dtype=wp.vec3), force: wp.array(dtype=wp.vec3)):
    i = wp.hash_grid_point_id(grid, wp.tid())
    total = wp.vec3(0.0, 0.0, 0.0)
    # The neighbours come in an order that may vary, so what is summed is whole.
    for j in wp.hash_grid_query(grid, x[i], 0.2):
        away = x[i] - x[j]
        if wp.length(away) < 0.2:
            total += wp.vec3(wp.round(away[0] * 64.0), wp.round(away[1] * 64.0), wp.round(away[2] * 64.0))
    force[i] = total


@wp.kernel
def move(x: wp.array(dtype=wp.vec3), v: wp.array(dtype=wp.vec3), force: wp.array(dtype=wp.vec3)):
    i = wp.tid()
    v[i] = v[i] * 0.97 + force[i] * 1.0e-4 - x[i] * 0.01
    x[i] = x[i] + v[i] * 0.05


@wp.kernel
def distance(x: wp.array(dtype=wp.vec3), v: wp.array(dtype=wp.vec3), far: wp.array(dtype=float)):
    i = wp.tid()
    far[i] = wp.length(x[i] + v[i] * 0.5)


with wp.ScopedDevice("cuda:0"):
    random = numpy.random.RandomState(3)
    count = 4096
    x = wp.array(random.uniform(-1, 1, (count, 3)), dtype=wp.vec3, requires_grad=True)
    v = wp.array(random.normal(0, 0.1, (count, 3)), dtype=wp.vec3, requires_grad=True)
    force, far = wp.zeros(count, dtype=wp.vec3), wp.zeros(count, dtype=float, requires_grad=True)
    grid = wp.HashGrid(32, 32, 32)
    with wp.ScopedCapture() as captured:
        for _ in range(4):
            wp.launch(move, dim=count, inputs=[x, v, force])
    for step in steps(60):
        grid.build(points=x, radius=0.2)
        wp.launch(push, dim=count, inputs=[grid.id, x, v, force])
        wp.capture_launch(captured.graph)
        if step % 10 == 0:
            with wp.Tape() as tape:
                wp.launch(distance, dim=count, inputs=[x, v], outputs=[far])
            tape.backward(grads={far: wp.full(count, 1.0, dtype=float)})
            say(step, digest(x.numpy(), v.numpy(), force.numpy(), x.grad.numpy()))
            tape.zero()
