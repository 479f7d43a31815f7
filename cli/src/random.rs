//! Random numbers.

use std::io;

use anyhow::Context;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::failure::Failure;

/// A number that nobody can guess, and that nobody else gets.
pub(crate) fn number() -> Result<u128, Failure> {
    let mut bytes = [0; 16];
    getrandom(&mut bytes, GetRandomFlags::empty()).map_err(io::Error::from).context("cannot get random numbers")?;
    Ok(u128::from_ne_bytes(bytes))
}

/// A name of that kind.
pub(crate) fn name() -> Result<String, Failure> {
    Ok(format!("{:032x}", number()?))
}
