//! Checks that the parts of a manifest agree with each other and with the files.
//!
//! The writer checks before it commits, and the reader before it hands out anything. So neither a
//! defect of ours nor a hostile image reaches code that relies on this agreement.

use std::collections::BTreeSet;

use crate::hash::CodeHash;
use crate::limits::{BLOCK, MAX_CODE, MAX_PIECE_LENGTH};
use crate::manifest::{Client, Compression, Extent, Manifest, Piece, Storage};
use crate::record::FileSizes;
use crate::region::{Region, RegionKind};

/// Fails with a description of the first disagreement, if there is any.
///
/// `files` has this image's files first, then the files of its ancestors, the nearest first.
pub(crate) fn check(manifest: &Manifest, files: &[&FileSizes]) -> Result<(), String> {
    if manifest.parent.is_none() && files.len() != 1 {
        return Err("it has ancestors and no parent".to_owned());
    }
    let code = check_code(manifest, files)?;
    for library in manifest.builds.iter().flat_map(|it| &it.libraries) {
        if !code.contains(&library.code) {
            return Err(format!("library {:?} has no code image {}", library.name, library.code));
        }
    }
    let mut natives = BTreeSet::new();
    for native in &manifest.natives {
        if native.namespace_pid == 0 || native.restore_thread == 0 || !natives.insert(native.namespace_pid) {
            return Err(format!("native process {} is no process, or is listed twice", native.namespace_pid));
        }
    }
    let mut indexes = BTreeSet::new();
    for client in &manifest.clients {
        if !indexes.insert(client.index) {
            return Err(format!("two clients have index {}", client.index));
        }
        check_client(client, manifest, files, &code).map_err(|what| format!("client {}: {what}", client.index))?;
    }
    Ok(())
}

fn check_code(manifest: &Manifest, files: &[&FileSizes]) -> Result<BTreeSet<CodeHash>, String> {
    let mut known = BTreeSet::new();
    for code in &manifest.code {
        if !known.insert(code.hash) {
            return Err(format!("code image {} is listed twice", code.hash));
        }
        if code.size > MAX_CODE {
            return Err(format!("code image {} is too large", code.hash));
        }
        if layer(files, code.parent_depth)?.code.get(&code.hash) != Some(&code.size) {
            return Err(format!("code image {} has no file of {} bytes", code.hash, code.size));
        }
    }
    let own = files.first().into_iter().flat_map(|files| files.code.keys());
    match own.into_iter().find(|hash| !known.contains(hash)) {
        Some(hash) => Err(format!("code file {hash} is not in the manifest")),
        None => Ok(known),
    }
}

fn check_client(
    client: &Client,
    manifest: &Manifest,
    files: &[&FileSizes],
    code: &BTreeSet<CodeHash>,
) -> Result<(), String> {
    let mut ordinals = BTreeSet::new();
    for gpu in &client.gpus {
        if !ordinals.insert(gpu.ordinal) {
            return Err(format!("gpu {} is listed twice", gpu.ordinal));
        }
        if !manifest.host.gpus.iter().any(|it| it.uuid == gpu.uuid) {
            return Err(format!("gpu {} is not among the host's", gpu.ordinal));
        }
    }
    for window in &client.windows {
        check_range(window.address, window.size).map_err(|what| format!("window {:#x}: {what}", window.address))?;
    }

    let mut last = None;
    for object in &client.objects {
        if last >= Some(object.sequence) {
            return Err(format!("object {} is out of order", object.sequence));
        }
        last = Some(object.sequence);
        for hash in &object.code {
            if !code.contains(hash) {
                return Err(format!("object {} needs code {hash}, which is not in the image", object.sequence));
            }
        }
    }

    for region in client.regions() {
        check_region(&region, files).map_err(|what| format!("{region}: {what}"))?;
    }
    Ok(())
}

fn check_region(region: &Region<'_>, files: &[&FileSizes]) -> Result<(), String> {
    if let Some(address) = region.what.address() {
        check_range(address, region.size)?;
    }
    // The CPU image holds it.
    if matches!(region.what, RegionKind::Pinned { .. }) && region.pieces.is_empty() {
        return Ok(());
    }
    let mut end = 0;
    for piece in region.pieces {
        if piece.offset != end {
            return Err(format!("content is missing or double at byte {end}"));
        }
        check_piece(piece, files).map_err(|what| format!("piece at byte {end}: {what}"))?;
        // Lengths are bounded, and the sum stays below the size or is refused below.
        end = end.checked_add(piece.length).ok_or("content overflows")?;
    }
    if end != region.size {
        return Err(format!("content covers {end} bytes of {}", region.size));
    }
    Ok(())
}

fn check_piece(piece: &Piece, files: &[&FileSizes]) -> Result<(), String> {
    if piece.length == 0 || piece.length > MAX_PIECE_LENGTH {
        return Err(format!("its length is {}", piece.length));
    }
    let (depth, extent) = match piece.storage {
        Storage::Zero => return Ok(()),
        Storage::Stored(extent) => (0, extent),
        Storage::Parent { depth: 0, .. } => return Err("it refers to a parent without saying which".to_owned()),
        Storage::Parent { depth, extent } => (depth, extent),
    };
    check_extent(piece, &extent)?;
    let size = layer(files, depth)?.data.get(&extent.file);
    let size = size.ok_or_else(|| format!("there is no data file {}", extent.file))?;
    match extent.offset.checked_add(extent.length) {
        Some(end) if end <= *size => Ok(()),
        _ => Err(format!("it is beyond the end of data file {}", extent.file)),
    }
}

/// The files of the image at this depth.
fn layer<'a>(files: &[&'a FileSizes], depth: u32) -> Result<&'a FileSizes, String> {
    let found = usize::try_from(depth).ok().and_then(|depth| files.get(depth).copied());
    found.ok_or_else(|| "it refers to a parent that the image does not have".to_owned())
}

fn check_extent(piece: &Piece, extent: &Extent) -> Result<(), String> {
    if !extent.offset.is_multiple_of(BLOCK) {
        return Err(format!("its file offset {} is not aligned", extent.offset));
    }
    let fits = match extent.compression {
        Compression::None => extent.length == piece.length,
        // A piece that does not shrink is stored as it is.
        Compression::Lz4 | Compression::Zstd => (1..piece.length).contains(&extent.length),
    };
    if !fits {
        return Err(format!("{} bytes are stored for {}", extent.length, piece.length));
    }
    Ok(())
}

fn check_range(address: u64, size: u64) -> Result<(), String> {
    match address.checked_add(size) {
        Some(_) => Ok(()),
        None => Err("its addresses overflow".to_owned()),
    }
}
