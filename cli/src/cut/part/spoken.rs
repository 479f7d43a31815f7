//! The connection to the coordinator: this process's input and output.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use anyhow::{Context, anyhow};

use super::super::talk::FromPart;
use crate::failure::Failure;
use crate::migrate::talk;

/// The connection's input. Nothing of it is read ahead, since others wait until it is readable.
pub(super) fn input() -> Result<File, Failure> {
    Ok(io::stdin().as_fd().try_clone_to_owned().context("cannot read standard input")?.into())
}

/// Answers the coordinator.
pub(super) fn answer(message: &FromPart) -> Result<(), Failure> {
    Ok(talk::send(&mut io::stdout().lock(), message).map_err(|error| anyhow!(error))?)
}
