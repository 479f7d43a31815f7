"""The CUDA driver, called by ctypes from a process of its own.

    driver_calls.py LIBRARY rates MIB     prints how fast pinned memory is copied from and to the device, in GB/s, as JSON
    driver_calls.py LIBRARY checkpoint    the driver's own checkpoints: reads lines "lock PID", "checkpoint PID", "restore PID",
                                          "unlock PID", and answers each with a line of JSON: what came back, and how long it took
"""

import ctypes
import json
import sys
import time

VERBS = {"lock": "Lock", "checkpoint": "Checkpoint", "restore": "Restore", "unlock": "Unlock"}


class Driver:
    def __init__(self, library):
        self.library = ctypes.CDLL(library)

    def call(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            raise SystemExit(f"bench: {name} returns {code}")


def rates(driver, mib):
    size, device, context, host, memory = mib << 20, ctypes.c_int(), *(ctypes.c_void_p() for _ in range(3))
    driver.call("cuInit", 0)
    driver.call("cuDeviceGet", ctypes.byref(device), 0)
    driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    driver.call("cuCtxSetCurrent", context)
    driver.call("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(size), 0)
    driver.call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(size))
    ctypes.memset(host, 1, size)
    found = {}
    for way, copy, target, source in (("to_device", "cuMemcpyHtoDAsync_v2", memory, host),
                                      ("to_host", "cuMemcpyDtoHAsync_v2", host, memory)):
        found[way] = []
        for _ in range(6):
            begin = time.monotonic_ns()
            driver.call(copy, target, source, ctypes.c_size_t(size), None)
            driver.call("cuCtxSynchronize")
            found[way].append(size / (time.monotonic_ns() - begin))
        found[way] = found[way][1:]
    print(json.dumps(found))


def checkpoint(driver):
    for line in sys.stdin:
        verb, pid = line.split()
        call = getattr(driver.library, "cuCheckpointProcess" + VERBS[verb], None)
        begin = time.monotonic_ns()
        code = call(int(pid), None) if call else -1
        print(json.dumps({"code": code, "ns": time.monotonic_ns() - begin}), flush=True)


def main():
    driver = Driver(sys.argv[1])
    if sys.argv[2] == "rates":
        rates(driver, int(sys.argv[3]))
    else:
        driver.call("cuInit", 0)
        print("ready", flush=True)
        checkpoint(driver)


if __name__ == "__main__":
    main()
