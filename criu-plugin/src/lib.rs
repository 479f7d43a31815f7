//! The CRIU plugin.
