//! Images whose managed variables have become ordinary ones.
//!
//! A driver allocates managed memory for a managed variable, by itself and where it likes. Whoever wants to move the variable's
//! content between the host and the device by other means has the driver load such an image: the variable then lies in the memory
//! of the module, as `__device__` ones do, and begins with the same value. Code finds either kind by its symbol, so it stays as it
//! is (driver 580, with cubins of sm_90 and PTX).

use super::fatbin::{entries_with_bytes, entry_with_payload, fatbin_size};
use super::{CodeError, ELF_MAGIC, EntryKind, FATBIN_MAGIC, MAX_IMAGE, MAX_UNPACKED, cubin, ptx};

/// The same image without managed variables, or `None` if it has none. All entries that can be read are changed, since it is the
/// driver that chooses one; a changed entry is plain.
///
/// # Errors
///
/// Those of [`parse`](super::parse), of an entry that was unpacked and is malformed, and [`CodeError::TooLarge`] for what would
/// be larger than [`MAX_IMAGE`].
pub fn unmanaged(image: &[u8]) -> Result<Option<Vec<u8>>, CodeError> {
    unmanaged_within(image, MAX_UNPACKED)
}

/// The same where all entries that are read unpack to no more than `limit` bytes. Those beyond it stay as they are.
///
/// # Errors
///
/// As for [`unmanaged`].
pub fn unmanaged_within(image: &[u8], limit: usize) -> Result<Option<Vec<u8>>, CodeError> {
    if !image.starts_with(&FATBIN_MAGIC.to_le_bytes()) {
        let mut changed = image.to_vec();
        let kind = if image.starts_with(&ELF_MAGIC) { EntryKind::Elf } else { EntryKind::Ptx };
        return Ok(make_unmanaged(kind, &mut changed)?.then_some(changed));
    }
    let (start, _) = fatbin_size(image)?;
    let mut changed = image.get(..start).ok_or(CodeError::Truncated("fatbin header"))?.to_vec();
    let (mut any, mut unpacked) = (false, 0_usize);
    for entry in entries_with_bytes(image) {
        let (entry, all) = entry?;
        // What nobody can read has no variables of which anybody could know.
        let payload = entry.payload_within(limit - unpacked).ok().map(std::borrow::Cow::into_owned);
        unpacked += payload.as_ref().map_or(0, Vec::len);
        let payload = payload.map(|mut payload| Ok(make_unmanaged(entry.kind, &mut payload)?.then_some(payload)));
        match payload.transpose()?.flatten() {
            Some(payload) => {
                any = true;
                changed.extend(entry_with_payload(all, &payload)?);
            }
            None => changed.extend_from_slice(all),
        }
        if changed.len() > MAX_IMAGE {
            let (size, limit) = (changed.len() as u64, MAX_IMAGE as u64);
            return Err(CodeError::TooLarge { what: "image without managed variables", size, limit });
        }
    }
    let size = (changed.len() - start) as u64;
    if let Some(place) = changed.get_mut(8..16) {
        place.copy_from_slice(&size.to_le_bytes());
    }
    Ok(any.then_some(changed))
}

fn make_unmanaged(kind: EntryKind, bytes: &mut Vec<u8>) -> Result<bool, CodeError> {
    match kind {
        EntryKind::Elf => cubin::make_unmanaged(bytes),
        EntryKind::Ptx => {
            let changed = ptx::make_unmanaged(bytes)?;
            if changed && bytes.last() != Some(&0) {
                bytes.push(0);
            }
            Ok(changed)
        }
        EntryKind::LtoIr | EntryKind::Other(_) => Ok(false),
    }
}
