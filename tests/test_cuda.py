"""Copies of strided boxes on the double of the driver, beside NumPy."""

from gpu_doubles import need, run_over_doubles

BOXES = """
import random
import numpy as np
from shardroute.executors.gpus.cuda import CudaDevice
from shardroute.executors.gpus.devices import Box

device, rng = CudaDevice(0), random.Random(1)
stream, event = device.stream(), device.event()
src, dst = np.random.default_rng(1).integers(0, 256, 60000).astype(np.uint8), np.zeros(60000, np.uint8)
a, b = device.allocate(src.size), device.allocate(src.size)
def order(run, count, backwards):
    strides, at = [0] * len(count), run * rng.choice([1, 1, 2]) + rng.choice([0, 0, 3])
    for dim in rng.sample(range(len(count)), len(count)):
        strides[dim] = -at if backwards and rng.random() < 0.3 else at
        at *= count[dim] + rng.choice([0, 0, 1])
    return tuple(strides), sum((n - 1) * -s for n, s in zip(count, strides) if s < 0)
for _ in range(300):
    run, count = rng.choice([1, 2, 6, 64]), tuple(rng.randint(2, 4) for _ in range(rng.randint(0, 4)))
    (i, first_i), (j, first_j) = order(run, count, True), order(run, count, True)
    expected = np.zeros_like(dst)
    into = np.ndarray((*count, run), "u1", expected.data, first_j, (*j, 1))
    into[...] = np.ndarray((*count, run), "u1", src.data, first_i, (*i, 1))
    dst[:] = 0
    device.upload(a, src, stream)
    device.upload(b, dst, stream)
    device.copy_box(b + first_j, a + first_i, Box(run, count, i, j), stream)
    device.download(dst, b, stream)
    device.record(event, stream)
    while not device.is_done(event):
        pass
    assert (dst == expected).all(), (run, count, i, j)
print("all alike")
"""


def test_strided_boxes_arrive_as_numpy_copies_them() -> None:
    need("cuda")

    done = run_over_doubles("-c", BOXES)

    assert done.stdout.strip() == "all alike", done.stderr[-2000:]
