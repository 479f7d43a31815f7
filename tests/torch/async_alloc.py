"""The same as segments.py with the allocator of cudaMallocAsync."""
import os

os.environ["JOB_ALLOC"] = "backend:cudaMallocAsync"

import segments

segments.main()
