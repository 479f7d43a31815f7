//! Bytes that a hostile peer may have written: no such bytes make a reader panic, read past their end, or take memory that
//! the bytes do not account for.

#![allow(clippy::unwrap_used)]

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering::Relaxed;

use proptest::prelude::*;
use proptest::sample::Index;
use rekindle_wire::attach::{Answer, Attach, Pinned};
use rekindle_wire::codec::{Reader, Writer};
use rekindle_wire::command::Launch;
use rekindle_wire::control::{
    Allowances, Copying, DataFile, Failure, Limits, Opening, Reply, Request, RestoreInfo, RestoredInfo, Secured,
    WorkerReply, WorkerRequest,
};
use rekindle_wire::frame::{self, FrameError};
use rekindle_wire::layout::{MAX_COMMAND, REPLIES, REPLY_BYTES, SHARED_SIZE, Shared, UNIT, UNITS};
use rekindle_wire::reply;
use rekindle_wire::ring::{Consumer, HEADER_BYTES};

/// Shared memory of this process's own, zeroed. It is leaked, since a `Shared` is not told of its end.
fn shared() -> Shared {
    let layout = std::alloc::Layout::from_size_align(SHARED_SIZE, 4096).unwrap();
    // SAFETY: the layout has a size; the memory is leaked, so it stays.
    unsafe { Shared::new(std::alloc::alloc_zeroed(layout)) }
}

thread_local! {
    static SHARED: Shared = shared();
}

/// A ring into which a client has written this: a header where `head` points, and words of its choice as sequence numbers.
fn spoil(ring: &Shared, head: u64, header: &[u8], sequences: &[(Index, u64)]) {
    let unit = (head % UNITS as u64) as usize;
    // SAFETY: a unit of the ring, and a header fits into it.
    unsafe { std::ptr::copy_nonoverlapping(header.as_ptr(), ring.units().add(unit * UNIT), header.len().min(UNIT)) };
    for (at, value) in sequences {
        ring.seq(at.index(UNITS)).store(*value, Relaxed);
    }
    ring.seq(unit).store(head.wrapping_add(1), Relaxed);
}

/// Numbers near where counting could go wrong, and any others.
fn position() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        0..3 * UNITS as u64,
        (0..200_u64).prop_map(|back| u64::MAX - back),
        (0..200_u64).prop_map(|back| (1 << 63) - back),
    ]
}

/// Messages of every kind, as they are sent.
fn messages() -> Vec<Vec<u8>> {
    let attach = Attach {
        dialect: rekindle_wire::Dialect::own(),
        pid: 7,
        command: "a".into(),
        socket: "/run/s".into(),
        cookie: 9,
        settings: vec![],
    };
    let requests = [
        Request::Attach(attach.clone()),
        Request::Reattach { restore: 1, socket: 2, cookie: 3 },
        Request::Pause { root: 1, leave_running: true, traceparent: None },
        Request::Frozen { pid: 4 },
        Request::Socket { id: 5, cookie: 6 },
        Request::Finish,
        Request::Restore,
        Request::RestoreAllowing(Allowances { other_driver: true, other_gpu: false }),
        Request::Resume { pid: 7 },
        Request::WatchRestore { hears_first: true, span: None },
        Request::List,
        Request::Status,
    ];
    let mut all: Vec<Vec<u8>> = Vec::new();
    for request in &requests {
        all.push(serde_json::to_vec(request).unwrap());
        all.push(serde_json::to_vec(&Opening::new(request).unwrap()).unwrap());
    }
    let limits = Limits { device_memory: Some(1), pinned_memory: None };
    all.push(serde_json::to_vec(&WorkerRequest::Adopt { attach, limits }).unwrap());
    let load = WorkerRequest::Load {
        data: vec![DataFile { depth: 1, index: 2 }],
        hash_algorithm: 1,
        hash_key: [1; 16],
        code: vec!["00".into()],
        limits,
        rehearsal: true,
        early: true,
        warm: false,
        steps: true,
    };
    all.push(serde_json::to_vec(&load).unwrap());
    let save = WorkerRequest::Save {
        hash_key: [255; 16],
        files: vec![1, 65_536],
        elsewhere: vec![[2; 16]],
        compression: "zstd".into(),
        copying: Copying::Cow,
        precopied: true,
        rehearses: true,
        hash_on_device: true,
    };
    all.push(serde_json::to_vec(&save).unwrap());
    all.push(serde_json::to_vec(&WorkerReply::Begun { code: vec![], secured: Secured::default() }).unwrap());
    all.push(serde_json::to_vec(&Reply::Paused { pids: vec![1, 2] }).unwrap());
    all.push(serde_json::to_vec(&Reply::Failed(Failure::refused("no"))).unwrap());
    all.push(serde_json::to_vec(&WorkerReply::Failed(Failure::internal("no"))).unwrap());
    all.push(serde_json::to_vec(&WorkerReply::LoadStep { step: "code".into() }).unwrap());
    let clients = vec![RestoredInfo { pid: Some(8), ..RestoredInfo::default() }];
    let info = RestoreInfo { clients, running_ns: Some(1), ..RestoreInfo::default() };
    all.push(serde_json::to_vec(&Reply::RestoreProgress(Some(Box::new(info)))).unwrap());
    all.push(serde_json::to_vec(&Answer::Refused { reason: "no".into() }).unwrap());
    all.push(serde_json::to_vec(&Pinned { address: 1, size: 2, serial: 3, file_offset: Some(4) }).unwrap());
    all
}

/// Reads bytes as everything that they could be.
fn decode(bytes: &[u8]) {
    let _ = serde_json::from_slice::<Opening>(bytes).map(|it| serde_json::from_value::<Request>(it.request));
    let _ = serde_json::from_slice::<Request>(bytes);
    let _ = serde_json::from_slice::<Reply>(bytes);
    let _ = serde_json::from_slice::<WorkerRequest>(bytes);
    let _ = serde_json::from_slice::<WorkerReply>(bytes);
    let _ = serde_json::from_slice::<Answer>(bytes);
    let _ = serde_json::from_slice::<Pinned>(bytes);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_is_in_a_ring_a_command_is_short_or_refused(
        head in position(),
        header in prop::collection::vec(any::<u8>(), HEADER_BYTES),
        length in prop_oneof![any::<u32>(), 0..2 * MAX_COMMAND as u32],
        sequences in prop::collection::vec((any::<Index>(), position()), 0..8),
    ) {
        SHARED.with(|ring| {
            let mut header = header;
            header[4..8].copy_from_slice(&length.to_le_bytes());
            spoil(ring, head, &header, &sequences);
            let mut consumer = Consumer::new(*ring, head);
            // The units behind it hold what was there before: as many commands as a ring has units at most.
            for _ in 0..UNITS {
                match consumer.take() {
                    Ok(Some((header, parameters))) => {
                        prop_assert_eq!(header.length as usize, parameters.len());
                        prop_assert!(HEADER_BYTES + parameters.len() <= MAX_COMMAND);
                    }
                    Ok(None) => break,
                    Err(broken) => {
                        prop_assert!(HEADER_BYTES + broken.0 as usize > MAX_COMMAND);
                        break;
                    }
                }
                let _ = consumer.ready();
            }
            Ok(())
        })?;
    }

    #[test]
    fn a_reply_slot_of_any_content_is_read_within_its_bounds(
        slot in 0..REPLIES,
        length in any::<u32>(),
        state in any::<u32>(),
        result in any::<i32>(),
        payload in prop::collection::vec(any::<u8>(), 0..2 * REPLY_BYTES),
    ) {
        SHARED.with(|ring| {
            let words = ring.reply(slot);
            words.length.store(length, Relaxed);
            words.state.store(state, Relaxed);
            words.result.store(result, Relaxed);
            let mut taken = Vec::new();
            prop_assert_eq!(reply::take(ring, slot, &mut taken), result);
            prop_assert!(taken.len() <= REPLY_BYTES);
            let waited_for = matches!(state, reply::PENDING | reply::ASLEEP);
            let fits = payload.len() <= REPLY_BYTES;
            prop_assert_eq!(reply::answer(ring, slot, 3, &payload), waited_for && fits);
            words.state.store(reply::FREE, Relaxed);
            Ok(())
        })?;
    }

    #[test]
    fn any_bytes_on_a_socket_are_a_message_or_an_error(
        bytes in prop::collection::vec(any::<u8>(), 0..300),
        lengths in prop::option::of((0..400_u32, 0..400_u32)),
    ) {
        let (mut sender, receiver) = UnixStream::pair().unwrap();
        if let Some((json, blob)) = lengths {
            sender.write_all(&json.to_le_bytes()).unwrap();
            sender.write_all(&blob.to_le_bytes()).unwrap();
        }
        sender.write_all(&bytes).unwrap();
        sender.shutdown(Shutdown::Both).unwrap();
        // Each message takes eight bytes at least, so this ends.
        while frame::receive_at_most::<Opening>(&receiver, 256, 64).is_ok() {}
    }

    #[test]
    fn a_message_cut_short_is_never_taken_for_a_whole_one(which in any::<Index>(), cut in any::<Index>(), blob in 0..40_usize) {
        let messages = messages();
        let json = which.get(&messages);
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&(json.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&(blob as u32).to_le_bytes());
        bytes.extend_from_slice(json);
        bytes.resize(bytes.len() + blob, 5);
        let cut = cut.index(bytes.len());
        let (mut sender, receiver) = UnixStream::pair().unwrap();
        sender.write_all(&bytes[..cut]).unwrap();
        drop(sender);
        let received = frame::receive::<serde_json::Value>(&receiver);
        let closed = matches!(received, Err(FrameError::Closed));
        prop_assert!(received.is_err());
        prop_assert_eq!(closed, cut == 0);
    }

    #[test]
    fn messages_with_any_bytes_changed_are_messages_or_errors(
        which in any::<Index>(),
        changes in prop::collection::vec((any::<Index>(), any::<u8>()), 0..6),
    ) {
        let messages = messages();
        let mut bytes = which.get(&messages).clone();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        decode(&bytes);
    }

    #[test]
    fn a_launch_of_any_bytes_is_refused_or_reads_as_it_is_written(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let mut reader = Reader::new(&bytes);
        if let Ok(launch) = Launch::read(&mut reader) {
            let mut writer = Writer::new();
            launch.write(&mut writer);
            let mut again = Reader::new(writer.bytes());
            prop_assert_eq!(Launch::read(&mut again), Ok(launch));
        }
    }
}

#[test]
fn deep_nesting_is_an_error() {
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    decode(deep.as_bytes());
    assert!(serde_json::from_str::<Opening>(&deep).is_err());
}

#[test]
fn allowances_are_read_as_they_are_written_and_no_unknown_word_is_one() {
    for (other_driver, other_gpu) in [(false, false), (true, false), (false, true), (true, true)] {
        let allowances = Allowances { other_driver, other_gpu };
        assert_eq!(Allowances::parse(&allowances.to_string()), Ok(allowances));
    }
    assert_eq!(Allowances::parse("other-driver, other-weather"), Err("other-weather".to_owned()));
}
