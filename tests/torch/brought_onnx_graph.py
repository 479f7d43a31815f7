"""The same as brought_onnx.py, replayed as a CUDA graph that ONNX Runtime captures."""
import os

os.environ["JOB_GRAPH"] = "1"

import brought_onnx

if __name__ == "__main__":
    brought_onnx.main()
