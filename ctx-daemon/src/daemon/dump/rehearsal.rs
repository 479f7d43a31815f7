//! The rehearsal before an image is committed ([`super::super::rehearsal`]). An image whose rehearsal fails is removed.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;

use rekindle_images::{Client as Record, CodeHash, ImageError, ImageWriter};

use super::super::clients::Client;
use super::super::pool::Pool;
pub(super) use super::super::rehearsal::is_needed;
use super::super::rehearsal::{self, RehearsalError};
use super::error::SaveError;
use crate::limit::Limit;

/// Proves that the code of the client can be placed again. The worker may not be idle for longer than the limit.
pub(super) fn rehearse(
    pool: &Pool,
    writer: &ImageWriter,
    client: &Client,
    record: &Record,
    limit: Limit,
) -> Result<(), SaveError> {
    let blob = record.to_bytes()?;
    let code = code_files(writer, record)?;
    rehearsal::rehearse(pool, client, writer.key().into(), (&blob, &code), limit).map_err(|error| match error {
        RehearsalError::NoWorker(error) => SaveError::no_rehearsal(client, &error),
        RehearsalError::Failed(error) if is_needed(record) => SaveError::not_rehearsed(client, &error),
        RehearsalError::Failed(error) => SaveError::not_restorable(client, &error),
    })
}

fn code_files(writer: &ImageWriter, record: &Record) -> Result<Vec<(String, OwnedFd)>, ImageError> {
    let hashes: BTreeSet<CodeHash> = record.objects.iter().flat_map(|it| it.code.iter().copied()).collect();
    hashes.into_iter().map(|hash| Ok((hash.to_string(), writer.open_code(hash)?.into()))).collect()
}
