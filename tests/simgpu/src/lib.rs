//! A software GPU: a libcuda.so.1 that runs on the CPU, for tests.
