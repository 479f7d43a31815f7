//! Clients of every kept version rely on numbers that must not change: the numbers of calls and commands, the encoding of
//! calls, and the layout of the shared memory (`docs/compatibility.md`). Each file in `kept` is of the client version in
//! its name.
//!
//! ```text
//!   call NUMBER ENCODING SYMBOL
//!   command NUMBER NAME
//!   place OFFSET NAME
//! ```

#![allow(clippy::unwrap_used)]

use std::fmt::Write;
use std::mem::offset_of;
use std::path::PathBuf;

use rekindle_cuda_abi::table;
use rekindle_wire::layout::{self, Header, ReplySlot, Shared};
use rekindle_wire::{CLIENT_VERSION, Dialect, OLDEST_CLIENT, command};

fn kept(version: u32) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/kept").join(version.to_string())
}

/// Sizes, and where things are in the shared memory.
fn places() -> Vec<(usize, &'static str)> {
    let layout = std::alloc::Layout::from_size_align(layout::SHARED_SIZE, 4096).unwrap();
    // SAFETY: the layout has a size; the memory is leaked, so it stays.
    let shared = unsafe { Shared::new(std::alloc::alloc_zeroed(layout)) };
    let base = shared.base() as usize;
    vec![
        (offset_of!(Header, magic), "magic"),
        (offset_of!(Header, version), "version"),
        (offset_of!(Header, caller_spin_us), "caller_spin_us"),
        (offset_of!(Header, tail), "tail"),
        (offset_of!(Header, head), "head"),
        (offset_of!(Header, worker_asleep), "worker_asleep"),
        (offset_of!(Header, doorbell), "doorbell"),
        (offset_of!(Header, waiting_for_room), "waiting_for_room"),
        (offset_of!(Header, room), "room"),
        (offset_of!(Header, sticky), "sticky"),
        (offset_of!(Header, deferred), "deferred"),
        (offset_of!(Header, pressure), "pressure"),
        (offset_of!(Header, printed), "printed"),
        (offset_of!(Header, moment), "moment"),
        (offset_of!(Header, standstills), "standstills"),
        (offset_of!(Header, no_standstill), "no_standstill"),
        (std::ptr::from_ref(shared.seq(0)) as usize - base, "seqs"),
        (shared.units() as usize - base, "units"),
        (std::ptr::from_ref(shared.reply(0)) as usize - base, "replies"),
        (std::ptr::from_ref(shared.reply(1)) as usize - base, "second reply"),
        (offset_of!(ReplySlot, state), "reply state"),
        (offset_of!(ReplySlot, result), "reply result"),
        (offset_of!(ReplySlot, length), "reply length"),
        (layout::REPLY_PAYLOAD, "reply payload"),
        (std::ptr::from_ref(shared.chunk(0)) as usize - base, "chunks"),
        (std::ptr::from_ref(shared.calls(0)) as usize - base, "calls"),
        (std::ptr::from_ref(shared.calls(1)) as usize - base, "second calls"),
        (layout::UNIT, "bytes of a unit"),
        (layout::UNITS, "units in all"),
        (layout::REPLIES, "replies in all"),
        (layout::CHUNKS, "chunks in all"),
        (layout::CHUNK_SIZE, "bytes of a chunk"),
        (layout::MAX_COMMAND, "bytes of the largest command"),
        (layout::SHARED_SIZE, "bytes of all"),
        (layout::STAGING_SIZE, "bytes of the staging"),
    ]
}

fn all() -> String {
    let table = table::parse(table::TEXT).unwrap();
    let mut out = String::new();
    for (number, encoding) in Dialect::own().calls.iter().enumerate() {
        writeln!(out, "call {number} {encoding} {}", table[number].symbol).unwrap();
    }
    for number in command::FIRST..u16::MAX {
        if let Some(name) = command::name(&table, number) {
            writeln!(out, "command {number} {name}").unwrap();
        }
    }
    for (offset, name) in places() {
        writeln!(out, "place {offset} {name}").unwrap();
    }
    out
}

#[test]
fn what_clients_of_each_kept_version_rely_on_is_as_it_was() {
    let now = all();
    let now: std::collections::HashSet<_> = now.lines().collect();
    for version in OLDEST_CLIENT..=CLIENT_VERSION {
        let then = std::fs::read_to_string(kept(version)).unwrap();
        for line in then.lines() {
            // A call that did not travel then may do so now.
            let mut words = line.split(' ');
            let (what, number, encoding, symbol) = (words.next(), words.next(), words.next(), words.next());
            let same = match (what, encoding) {
                (Some("call"), Some("0")) => now.iter().any(|it| {
                    it.starts_with(&format!("call {} ", number.unwrap()))
                        && it.ends_with(&format!(" {}", symbol.unwrap()))
                }),
                _ => now.contains(line),
            };
            assert!(same, "clients of version {version} rely on this: {line} (docs/compatibility.md)");
        }
    }
}

#[test]
#[ignore = "keeps the numbers of a new client version (scripts/keep); what is there is never changed"]
fn keep_numbers() {
    let mut file = std::fs::File::create_new(kept(CLIENT_VERSION)).unwrap();
    std::io::Write::write_all(&mut file, all().as_bytes()).unwrap();
}
