//! Images that are kept in the tree (`tests/e2e/kept`), each made by the release that it represents: this release
//! promises to restore it. CRIU takes no part. Of the process only the memory that it shared with its worker is kept,
//! and a process of the test maps that memory again (`src/bin/revenant.rs`). The commands in the ring are those that
//! the older interposer sent.
//!
//! ```text
//!   kept/NAME/   rekindle.img, rekindle.commit, ...      the image
//!                ring.pages, staging.pages, pinned-SERIAL-ADDRESS.pages
//!                after.json                              the original's memory content once the ring is empty
//! ```

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::num::NonZeroUsize;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use rekindle_images::{BlobKind, Image, RegionKind};
use rekindle_wire::command::{CALLBACK_NEXT, STREAM_SYNC};
use rekindle_wire::control::{Opening, Reply, Request};
use rekindle_wire::frame;
use rekindle_wire::layout::{PINNED_NAME, SHARED_NAME, SHARED_SIZE, STAGING_NAME, Shared};
use rekindle_wire::ring::Consumer;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use crate::twin::{Manner, Source, Taken, cookie_of};
use crate::{App, Node, Result, process, stage, until};

const PAGE: usize = 4096;
/// The number that the test, in the role of CRIU, gives the socket.
const SOCKET: u32 = 7;

/// The expected state after the last command of the ring.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct After {
    /// The reply slot in which the process waits for the end of those commands.
    pub waits_in: usize,
    /// The hash of each region's content, by the region's description.
    pub regions: BTreeMap<String, String>,
}

/// The folders of all kept images.
pub fn all() -> Result<Vec<PathBuf>> {
    let folder = stage::repository()?.join("tests/e2e/kept");
    let mut found: Vec<_> = fs::read_dir(folder)?.map(|it| Ok(it?.path())).collect::<Result<_>>()?;
    found.retain(|it| it.is_dir());
    found.sort();
    Ok(found)
}

/// Writes a file in the kept form: its size, then each page that is not zero, preceded by the page's number.
fn keep(content: &[u8], file: &Path) -> Result {
    let mut out = Vec::from((content.len() as u64).to_le_bytes());
    for (number, page) in content.chunks(PAGE).enumerate().filter(|(_, page)| page.iter().any(|byte| *byte != 0)) {
        out.extend((number as u64).to_le_bytes());
        out.extend(page);
    }
    Ok(File::create_new(file)?.write_all(&out)?)
}

/// Reads a file that `keep` wrote.
pub fn kept(file: &Path) -> Result<Vec<u8>> {
    let bytes = fs::read(file).with_context(|| file.display().to_string())?;
    let number =
        |at: usize| Ok::<_, anyhow::Error>(u64::from_le_bytes(bytes.get(at..at + 8).context("cut")?.try_into()?));
    let mut content = vec![0; number(0)? as usize];
    for at in (8..bytes.len()).step_by(8 + PAGE) {
        let start = number(at)? as usize * PAGE;
        let page = content.get_mut(start..start + PAGE).context("a page outside")?;
        page.copy_from_slice(bytes.get(at + 8..at + 8 + PAGE).context("cut")?);
    }
    Ok(content)
}

/// The memory that a process shares with its worker: the name of each file in a kept image, and its content.
fn shared(pid: i32) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut found = BTreeMap::new();
    for line in fs::read_to_string(format!("/proc/{pid}/maps"))?.lines() {
        let Some((_, name)) = line.split_once("/memfd:") else { continue };
        let name = name.trim_end_matches(" (deleted)");
        let range = line.split(' ').next().unwrap_or_default();
        let name = match name.strip_prefix(PINNED_NAME) {
            Some(serial) => format!("pinned-{serial}-{}.pages", range.split('-').next().unwrap_or_default()),
            None if name.as_bytes() == SHARED_NAME.to_bytes() => "ring.pages".to_owned(),
            None if name.as_bytes() == STAGING_NAME.to_bytes() => "staging.pages".to_owned(),
            None => continue,
        };
        let mut content = Vec::new();
        File::open(format!("/proc/{pid}/map_files/{range}"))?.read_to_end(&mut content)?;
        found.insert(name, content);
    }
    Ok(found)
}

/// The calls that wait in a copy of a ring, each with its reply slot plus one.
fn waiting(ring: &[u8]) -> Result<Vec<(u16, u16)>> {
    ensure!(ring.len() == SHARED_SIZE, "a ring of {} bytes", ring.len());
    #[repr(C, align(4096))]
    #[derive(Clone, Copy)]
    struct Page([u8; PAGE]);
    let mut copy = vec![Page([0; PAGE]); SHARED_SIZE.div_ceil(PAGE)];
    copy.iter_mut().zip(ring.chunks(PAGE)).for_each(|(page, bytes)| page.0[..bytes.len()].copy_from_slice(bytes));
    // SAFETY: the copy is as large, aligned to pages, of this function alone, and stays to its end.
    let shared = unsafe { Shared::new(copy.as_mut_ptr().cast()) };
    let head = shared.header().head.load(std::sync::atomic::Ordering::Relaxed);
    let mut consumer = Consumer::new(shared, head);
    let mut calls = Vec::new();
    while let Some((header, _)) = consumer.take()? {
        calls.push((header.call, header.reply));
    }
    Ok(calls)
}

/// The hash of each region of an image, and of each pinned mapping of its process.
pub fn regions(image: &Path, pid: i32) -> Result<BTreeMap<String, String>> {
    /// Blobs with content of the application: its printed output and its arrays.
    const OF_THE_APPLICATION: [BlobKind; 2] = [BlobKind::ArrayContent, BlobKind::Printed];
    let image = Image::open(image)?;
    let reader = image.data_reader()?;
    let [client] = image.manifest().clients.as_slice() else { bail!("not one client") };
    let mut found = BTreeMap::new();
    for region in client.regions().filter(|it| !it.pieces.is_empty()) {
        let name = match region.what {
            RegionKind::Allocation { device, address } => format!("allocation {device} {address:#x}"),
            RegionKind::Global { module, name, address } => format!("global {module:#x} {name} {address:#x}"),
            RegionKind::Blob { kind, handle, .. }
                if BlobKind::try_from(kind).is_ok_and(|kind| OF_THE_APPLICATION.contains(&kind)) =>
            {
                format!("blob {kind} {handle:#x}")
            }
            _ => continue,
        };
        let mut bytes = vec![0; region.size as usize];
        reader.read_all(region.pieces, &mut bytes, NonZeroUsize::MIN)?;
        found.insert(name, format!("{:032x}", xxh3_128(&bytes)));
    }
    for (name, content) in shared(pid)?.into_iter().filter(|(name, _)| name.starts_with("pinned")) {
        found.insert(name, format!("{:032x}", xxh3_128(&content)));
    }
    Ok(found)
}

/// Dumps a process whose state does not change any more, and lets it go on. Returns the hashes of its regions.
pub fn after(node: &Node, app: &App) -> Result<BTreeMap<String, String>> {
    let dir = node.fresh("after");
    fs::create_dir(&dir)?;
    match Source::new(node, app)?.take(&dir, Manner::PLAIN)? {
        Taken::Both(image, _) => regions(&image, app.pid()),
        other => bail!("no image of what came after: {other:?}"),
    }
}

fn ask(stream: &UnixStream, request: &Request) -> Result<Reply> {
    frame::send(stream, request, &[], &[])?;
    Ok(frame::receive(stream)?.body)
}

/// Checks that an image has everything that a kept image must have.
fn holds_all(image: &Path) -> Result {
    const BLOBS: [BlobKind; 4] =
        [BlobKind::ArrayContent, BlobKind::DeferredCommands, BlobKind::Graphs, BlobKind::Mapped];
    const CREATED: [&str; 11] = [
        "ARRAY_CREATE",
        "CONTEXT_RETAIN",
        "LIBRARY_KERNEL",
        "LIBRARY_LOAD",
        "MODULE_FUNCTION",
        "MODULE_LOAD",
        "SURFACE_CREATE",
        "TEXTURE_CREATE",
        "cuEventCreate",
        "cuStreamCreateWithPriority",
        "INSTANTIATE",
    ];
    let image = Image::open(image)?;
    let [client] = image.manifest().clients.as_slice() else { bail!("not one client") };
    for kind in BLOBS {
        ensure!(client.blobs.iter().any(|blob| blob.is(kind)), "no blob of the kind {kind:?}");
    }
    for name in CREATED {
        let kinds: Vec<_> = client.object_kinds.iter().map(|it| it.name.as_str()).collect();
        ensure!(kinds.contains(&name), "no {name} among {kinds:?}");
    }
    ensure!(!client.pinned.is_empty() && !client.globals.is_empty() && client.allocations.len() > 7, "{client:?}");
    Ok(())
}

/// Makes the kept image of this release, from the program `kept` of `tests/apps`, in a new folder.
pub fn make(folder: &Path) -> Result {
    fs::create_dir(folder)?;
    let node = Node::configured("[image]\ncompression = \"zstd\"\n", &[])?;
    let go = node.path("go");
    let app = node.run_held("kept", &["--go", &go.display().to_string()], None)?;
    app.reaches(1)?;
    node.client(app.pid())?;
    let pid = app.pid();

    let stream = UnixStream::connect(node.socket())?;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    let dir = File::open(folder)?;
    let opening = Opening::new(&Request::Pause { root: pid, leave_running: true, traceparent: None })?;
    frame::send(&stream, &opening, &[], &[dir.as_raw_fd()])?;
    let paused: Reply = frame::receive(&stream)?.body;
    ensure!(paused == Reply::Paused { pids: vec![pid] }, "{paused:?}");
    // The worker is quiesced. Commands that the program sends now wait in the ring.
    fs::write(&go, "")?;
    let waits_in = until("the program waits for all it has enqueued, and its callback has returned", || {
        let memory = shared(pid)?;
        let calls = waiting(memory.get("ring.pages").context("no ring")?)?;
        let slot = calls.iter().find(|(call, _)| *call == STREAM_SYNC).map(|(_, reply)| usize::from(*reply) - 1);
        Ok(slot.filter(|_| calls.iter().any(|(call, _)| *call == CALLBACK_NEXT)))
    })?;
    process::signal(pid, libc::SIGSTOP)?;
    until("it stands still", || {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        Ok(stat.contains(") T ").then_some(()))
    })?;
    let frozen = ask(&stream, &Request::Frozen { pid })?;
    ensure!(frozen == Reply::Frozen { ours: true }, "{frozen:?}");
    let socket = ask(&stream, &Request::Socket { id: SOCKET, cookie: cookie_of(pid, node.socket())? })?;
    ensure!(matches!(socket, Reply::Socket { ours: true, .. }), "{socket:?}");
    for (name, content) in shared(pid)? {
        keep(&content, &folder.join(name))?;
    }
    process::signal(pid, libc::SIGCONT)?;
    let durable = ask(&stream, &Request::Finish)?;
    ensure!(durable == Reply::Durable, "{durable:?}");
    drop(stream);

    holds_all(folder)?;
    app.reaches(2)?;
    let after = After { waits_in, regions: after(&node, &app)? };
    fs::write(folder.join("after.json"), serde_json::to_string_pretty(&after)? + "\n")?;
    drop(app);
    node.finish()
}
