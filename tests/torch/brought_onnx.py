"""ONNX Runtime: a model of convolutions and products, made here, computes its own next input on the GPU."""
import os

import numpy
from onnx import TensorProto, helper, numpy_helper

from job import digest, libraries, say, steps

libraries("cudart", "cublasLt", "cublas", "curand", "cufft", "nvrtc-builtins", "nvrtc", "cudnn")
import onnxruntime

random = numpy.random.RandomState(5)
settings = {"use_tf32": "0", "cudnn_conv_algo_search": "DEFAULT", "enable_cuda_graph": os.environ.get("JOB_GRAPH", "0")}


def weights(name, *shape):
    scale = numpy.sqrt(2 / numpy.prod(shape[1:]))
    return numpy_helper.from_array((random.standard_normal(shape) * scale).astype(numpy.float32), name)


def model():
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MaxPool", ["b"], ["c"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["c"], ["d"]),
        helper.make_node("MatMul", ["d", "w2"], ["e"]),
        helper.make_node("LayerNormalization", ["e", "scale", "shift"], ["f"]),
        helper.make_node("Gelu", ["f"], ["g"]),
        helper.make_node("MatMul", ["g", "w3"], ["h"]),
        helper.make_node("Tanh", ["h"], ["i"]),
        helper.make_node("Reshape", ["i", "shape"], ["y"]),
    ]
    kept = [weights("w1", 16, 3, 3, 3), weights("w2", 4096, 512), weights("w3", 512, 3072),
            numpy_helper.from_array(numpy.ones(512, numpy.float32), "scale"),
            numpy_helper.from_array(numpy.zeros(512, numpy.float32), "shift"),
            numpy_helper.from_array(numpy.array([8, 3, 32, 32]), "shape")]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [8, 3, 32, 32]) for name in "xy"]
    graph = helper.make_graph(nodes, "loop", ends[:1], ends[1:], kept)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()


def main():
    session = onnxruntime.InferenceSession(model(), providers=[("CUDAExecutionProvider", settings)])
    if session.get_providers()[0] != "CUDAExecutionProvider":
        raise SystemExit("ONNX Runtime has found no GPU")
    values = random.standard_normal((8, 3, 32, 32)).astype(numpy.float32)
    x, y = (onnxruntime.OrtValue.ortvalue_from_numpy(values, "cuda", 0) for _ in range(2))
    bound = session.io_binding()
    bound.bind_ortvalue_input("x", x)
    bound.bind_ortvalue_output("y", y)
    for step in steps(80):
        session.run_with_iobinding(bound)
        now = y.numpy()
        x.update_inplace(now + numpy.float32(0.1) * values)
        if step % 20 == 0:
            say(step, digest(now))


if __name__ == "__main__":
    main()
