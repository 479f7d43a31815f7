//! The network of this host: sockets of processes, rules that keep packets from them, and addresses that move.

pub(crate) mod address;
pub(crate) mod announce;
pub(crate) mod block;
pub(crate) mod connection;
pub(crate) mod firewall;
pub(crate) mod sockets;
pub(crate) mod tools;
