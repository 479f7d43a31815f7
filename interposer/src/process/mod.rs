//! This process and its threads, without any knowledge of CUDA objects or of the worker.

pub(crate) mod calling_thread;
pub(crate) mod log;
mod maps;
pub(crate) mod memfd;
pub(crate) mod moves;
mod stop;
mod text;
pub(crate) mod threads;
