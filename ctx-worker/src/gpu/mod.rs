//! The driver: its library loaded, its calls checked.

pub(crate) mod driver;
