"""Taichi: a fluid of particles on a grid (MPM) by kernels that Taichi compiles."""
import taichi as ti

from job import digest, say, steps

ti.init(arch=ti.cuda, random_seed=1, offline_cache=False, device_memory_GB=0.5, log_level=ti.ERROR)
if ti.lang.impl.current_cfg().arch != ti.cuda:
    raise SystemExit("Taichi has found no GPU")
count, cells = 8192, 64
x, v = ti.Vector.field(2, ti.f32, count), ti.Vector.field(2, ti.f32, count)
# Whole numbers: what is added in any order has the same sum.
mass, push = ti.field(ti.i32, (cells, cells)), ti.Vector.field(2, ti.i32, (cells, cells))


@ti.kernel
def start():
    for i in x:
        x[i] = ti.Vector([0.2 + 0.6 * (i % 128) / 128.0, 0.2 + 0.6 * (i // 128) / 64.0])
        v[i] = ti.Vector([ti.sin(i * 0.1), ti.cos(i * 0.07)])


@ti.kernel
def to_grid():
    for i, j in mass:
        mass[i, j] = 0
        push[i, j] = ti.Vector([0, 0])
    for p in x:
        cell = ti.cast(x[p] * cells, ti.i32)
        mass[cell] += 1
        push[cell] += ti.cast(ti.round(v[p] * 4096.0), ti.i32)


@ti.kernel
def from_grid(t: ti.f32):
    for p in x:
        cell = ti.cast(x[p] * cells, ti.i32)
        mean = ti.cast(push[cell], ti.f32) / (4096.0 * mass[cell])
        v[p] = 0.9 * mean + 0.1 * v[p] + ti.Vector([0.0, -9.8 * t])
        x[p] += v[p] * t
        for k in ti.static(range(2)):
            if x[p][k] < 0.05 or x[p][k] > 0.95:
                v[p][k] *= -0.5
                x[p][k] = ti.min(ti.max(x[p][k], 0.05), 0.95)


start()
for step in steps(60):
    for _ in range(10):
        to_grid()
        from_grid(1e-3)
    if step % 10 == 0:
        say(step, digest(x.to_numpy(), v.to_numpy(), mass.to_numpy()))
