"""DALI: pictures that are turned, scaled, coloured and normalised on the GPU, by threads that work ahead."""
import numpy
from nvidia.dali import fn, pipeline_def, types

from job import digest, say, steps

random = numpy.random.RandomState(6)
pictures = [random.randint(0, 256, (96 + 8 * i, 128, 3)).astype(numpy.uint8) for i in range(8)]


@pipeline_def(batch_size=16, num_threads=3, device_id=0, seed=8)
def pipeline():
    x = fn.external_source(lambda info: pictures[info.idx_in_epoch % 8], batch=False, dtype=types.UINT8, layout="HWC").gpu()
    x = fn.rotate(x, angle=fn.random.uniform(range=(-30.0, 30.0)), fill_value=0)
    x = fn.resize(x, resize_x=112, resize_y=112)
    x = fn.color_twist(x, brightness=fn.random.uniform(range=(0.8, 1.2)), hue=fn.random.uniform(range=(-20.0, 20.0)))
    x = fn.gaussian_blur(x, sigma=fn.random.uniform(range=(0.5, 2.0)))
    return fn.crop_mirror_normalize(
        x, crop=(96, 96), mirror=fn.random.coin_flip(), dtype=types.FLOAT, mean=[120.0, 115.0, 100.0], std=[60.0, 58.0, 57.0])


pipe = pipeline()
pipe.build()
for step in steps(60):
    (found,) = pipe.run()
    if step % 10 == 0:
        say(step, digest(found.as_cpu().as_array()))
