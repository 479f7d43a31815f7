"""The driver alone, by ctypes: a program that needs no package, and runs on the software GPU too."""
import ctypes
import time

from job import digest, say, steps

cuda = ctypes.CDLL("libcuda.so.1")


def call(name, *arguments):
    result = getattr(cuda, name)(*arguments)
    if result != 0:
        raise SystemExit(f"{name}: error {result}")


WORDS = 1 << 18
context, memory = ctypes.c_void_p(), ctypes.c_uint64()
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(4 * WORDS))
call("cuMemsetD32_v2", memory, 0, ctypes.c_size_t(WORDS))
host = (ctypes.c_uint32 * WORDS)()
for step in steps(60):
    # Some of it anew, and some of it moved.
    at = step * 4099 % (WORDS // 2)
    call("cuMemsetD32_v2", ctypes.c_uint64(memory.value + 4 * at), step * 2654435761 % 2**32, ctypes.c_size_t(WORDS // 8))
    call("cuMemcpyDtoD_v2", ctypes.c_uint64(memory.value + 4 * (WORDS // 2 + at // 2)), ctypes.c_uint64(memory.value + 2 * at // 4 * 4),
         ctypes.c_size_t(4 * (WORDS // 16)))
    time.sleep(0.005)
    if step % 10 == 0:
        call("cuMemcpyDtoH_v2", host, memory, ctypes.c_size_t(4 * WORDS))
        say(step, digest(bytes(host)))
