//! The libcuda.so.1 that applications load: it forwards driver calls to a worker.
