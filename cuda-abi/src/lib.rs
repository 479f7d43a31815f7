//! What libcuda.so.1 is to programs: its symbols, versions, private tables and code images.
