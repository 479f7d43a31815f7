"""cuStateVec of cuQuantum, by its C interface: gates, Pauli rotations and measurements on twenty qubits."""
import ctypes
import importlib.util
import os

import cupy
import numpy

from job import digest, libraries, say, steps

QUBITS, COMPLEX, ROWS, DOUBLE = 20, 5, 1, 16  # CUDA_C_64F, CUSTATEVEC_MATRIX_LAYOUT_ROW, CUSTATEVEC_COMPUTE_64F

libraries("cublasLt", "cublas")
package = importlib.util.find_spec("cuquantum").submodule_search_locations
library = next(path for path in (os.path.join(f, "lib/libcustatevec.so.1") for f in package) if os.path.exists(path))
custatevec = ctypes.CDLL(library)


def call(name, *arguments):
    """Calls a function; arrays are passed by their addresses."""
    passed = [a.ctypes.data_as(ctypes.c_void_p) if isinstance(a, numpy.ndarray) else a for a in arguments]
    status = getattr(custatevec, name)(*passed)
    if status != 0:
        raise SystemExit(f"{name}: status {status}")


def numbers(*values):
    return numpy.array(values, dtype=numpy.int32)


handle = ctypes.c_void_p()
call("custatevecCreate", ctypes.byref(handle))
state = cupy.zeros(1 << QUBITS, dtype=cupy.complex128)
vector = ctypes.c_void_p(state.data.ptr)
call("custatevecInitializeStateVector", handle, vector, COMPLEX, QUBITS, 0)
random = numpy.random.RandomState(11)
for step in steps(60):
    for _ in range(8):
        one, two, three = random.choice(QUBITS, 3, replace=False)
        angles = random.uniform(0, 2 * numpy.pi, 4)
        gate = numpy.diag(numpy.exp(1j * angles))[[1, 0, 3, 2]] @ numpy.kron(*[
            numpy.array([[numpy.cos(a), -numpy.sin(a)], [numpy.sin(a), numpy.cos(a)]]) for a in angles[:2]])
        gate = numpy.ascontiguousarray(gate, dtype=numpy.complex128)
        size = ctypes.c_size_t()
        call("custatevecApplyMatrixGetWorkspaceSize", handle, COMPLEX, QUBITS, gate, COMPLEX, ROWS, 0, 2, 1, DOUBLE, ctypes.byref(size))
        room = cupy.empty(max(size.value, 1), dtype=cupy.uint8)
        call("custatevecApplyMatrix", handle, vector, COMPLEX, QUBITS, gate, COMPLEX, ROWS, 0, numbers(one, two), 2, numbers(three),
             None, 1, DOUBLE, ctypes.c_void_p(room.data.ptr), size)
    call("custatevecApplyPauliRotation", handle, vector, COMPLEX, QUBITS, ctypes.c_double(angles[0]), numbers(1, 2, 3),
         numbers(one, two, three), 3, None, None, 0)
    if step % 10 == 0:
        found, order = numbers(0, 0, 0, 0), numbers(*range(4))
        call("custatevecBatchMeasure", handle, vector, COMPLEX, QUBITS, found, order, 4, ctypes.c_double(random.uniform()), 0)
        say(step, *found, digest(cupy.asnumpy(state)))
