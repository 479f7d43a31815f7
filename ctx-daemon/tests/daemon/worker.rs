//! A fake worker: speaks on its channel as a worker does, and misbehaves as its client's command name, or a file in the test's
//! directory, tells it to.

use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use rekindle_images::content::ContentKey;
use rekindle_images::{
    Allocation, Client as Record, ClientGpu, CodeHash, DataFile, DataReader, DataWriter, HashKey, Known, Object,
    Pinned, Storage,
};
use rekindle_wire::attach::{Answer, Attach, Attached, CHOSEN_PROTOCOL, Device};
use rekindle_wire::calls::Count;
use rekindle_wire::control::{
    self, ASSURED, Failure, FailureKind, Learned, LoadTimes, SavedCode, Secured, Suspension, TemplatePiece, Waits,
    WorkerReply, WorkerRequest,
};
use rekindle_wire::frame::{self, FrameError, Message};

use rekindle_ctx_worker::rejoin;

/// The code image that every client has.
pub(crate) const CODE: &[u8] = b"a code image";
/// The size of every client's one allocation. Its content begins with the command's name.
pub(crate) const MEMORY: usize = 100_000;
/// Where clients whose name begins with `pinned` have pinned memory.
pub(crate) const PINNED: (u64, u64) = (rekindle_wire::window::PINNED_BASE + (1 << 30), 8192);

/// Data files with their numbers.
type DataFiles = Vec<(u32, std::fs::File)>;

struct Worker {
    channel: UnixStream,
    dir: PathBuf,
    command: String,
    attach: Option<Attach>,
    attached: Attached,
    client: Option<UnixStream>,
    /// The save that is under way: the key, the files with their numbers, and the known hashes.
    saving: Option<([u8; 16], DataFiles, Vec<u8>)>,
    pinned: usize,
    /// Whether the daemon was told that content is being loaded.
    loading: bool,
    suspended: Option<Suspension>,
    /// Whether its client borrows memory.
    borrows: bool,
    is_save_cancelled: bool,
    /// What this worker keeps of a deeply suspended client.
    kept: Option<Kept>,
    /// The worker that is to take the client over, or that keeps it until this one does.
    other: Option<UnixStream>,
    code: usize,
    /// Whether it has loaded the code of a client that may come.
    has_code: bool,
    /// Whether nobody waits for an answer.
    is_ahead: bool,
}

/// The client's part of a manifest, how it is hashed, with which key, and the data files.
type Kept = (Vec<u8>, u32, [u8; 16], Vec<control::DataFile>, Vec<OwnedFd>);

pub(crate) fn main(channel: RawFd) -> ! {
    // SAFETY: the daemon left it open for us.
    let channel = unsafe { UnixStream::from_raw_fd(channel) };
    let dir = PathBuf::from(std::env::var_os("FAKE_DIR").unwrap());
    if dir.join("no-gpu").exists() {
        std::process::exit(9);
    }
    if let Ok(reason) = std::fs::read_to_string(dir.join("not-ready")) {
        frame::send(&channel, &WorkerReply::Failed(Failure::internal(reason)), &[], &[]).unwrap();
        std::process::exit(1);
    }
    // One of the workers hangs.
    if std::fs::remove_file(dir.join("hang-once")).is_ok() || dir.join("hang").exists() {
        let own = std::process::id().to_string();
        std::fs::write(dir.join("hanging"), own).unwrap();
        // Waits until the test is over.
        let _ = frame::receive::<WorkerRequest>(&channel);
        std::process::exit(0);
    }
    let worker = Worker {
        attached: attached(&dir),
        channel,
        dir,
        command: "spare".to_owned(),
        attach: None,
        client: None,
        saving: None,
        pinned: 0,
        loading: false,
        suspended: None,
        borrows: false,
        is_save_cancelled: false,
        kept: None,
        other: None,
        code: 0,
        has_code: false,
        is_ahead: false,
    };
    let attached = worker.attached.clone();
    worker.reply(&WorkerReply::Ready {
        attached,
        wire: rekindle_wire::CONTROL_VERSION,
        oldest: rekindle_wire::OLDEST_CONTROL,
    });
    worker.serve()
}

fn attached(dir: &std::path::Path) -> Attached {
    let number = |name: &str, default: i64| {
        let text = std::fs::read_to_string(dir.join(name));
        text.map_or(default, |it| it.trim().parse().unwrap())
    };
    let mut attributes = vec![(0, 0); 120];
    attributes[75] = (0, number("capability", 9) as i32);
    let gpu = Device {
        name: "Fake".to_owned(),
        uuid: [1; 16],
        memory: number("memory", 1 << 30) as u64,
        pci_bus_id: "0000:01:00.0".to_owned(),
        attributes,
        stream_priorities: (0, -5),
        peers: Vec::new(),
        part_of: None,
    };
    let part = |part: i64| Device {
        uuid: [part as u8 + 2; 16],
        pci_bus_id: format!("{}000:01:00.0", part + 1),
        peers: vec![true; 2],
        part_of: Some(gpu.uuid),
        ..gpu.clone()
    };
    let parts: Vec<_> = (0..number("parts", 0)).map(part).collect();
    Attached {
        driver_version: 13000,
        driver_build: std::fs::read_to_string(dir.join("driver")).unwrap_or_default(),
        api_version: 4,
        devices: if parts.is_empty() { vec![gpu] } else { parts },
    }
}

impl Worker {
    fn serve(mut self) -> ! {
        loop {
            match self.wait() {
                Woken::Client => self.end("client gone"),
                Woken::Heir => self.give_away(),
                Woken::Daemon => match frame::receive::<WorkerRequest>(&self.channel) {
                    Ok(message) => self.answer(message),
                    Err(FrameError::Closed | FrameError::Io(_)) => self.rejoin(),
                    Err(error) => panic!("{error}"),
                },
            }
        }
    }

    fn end(&self, why: &str) -> ! {
        self.note(why);
        std::process::exit(0)
    }

    fn rejoin(&mut self) {
        let (Some(attach), Some(client)) = (&self.attach, &self.client) else {
            self.end("daemon gone");
        };
        self.note("daemon gone");
        let stop = self.dir.join("stop");
        let gone = || stop.exists() || !self.dir.exists() || is_closed(client);
        // A worker under its client's control brings another connection, to the listener in the test's directory.
        let another = self.is("impostor").then(|| UnixStream::connect(self.dir.join("victim")).unwrap());
        let brought = another.as_ref().unwrap_or(client);
        let rejoined = rejoin::rejoin(attach, &self.attached, std::os::fd::AsFd::as_fd(brought), gone);
        match rejoined {
            Some(channel) => self.channel = channel,
            None => self.end("client gone"),
        }
    }

    fn note(&self, event: &str) {
        let file = std::fs::File::options().create(true).append(true).open(self.dir.join("events"));
        // A single write, so that lines of several workers do not mix. The test may be over.
        if let Ok(mut file) = file {
            let _ = file.write_all(format!("{} {event}\n", self.command).as_bytes());
        }
    }

    /// The number in the file of this name for its client.
    fn number(&self, name: &str, default: u64) -> u64 {
        let text = std::fs::read_to_string(self.dir.join(format!("{name}-{}", self.command)));
        text.ok().and_then(|it| it.trim().parse().ok()).unwrap_or(default)
    }

    fn reply(&self, reply: &WorkerReply) {
        self.reply_with(reply, &[]);
    }

    /// Tells what the client's commands have taught: the file has the address of an allocation, and perhaps why the client cannot
    /// go on.
    fn teach(&self) {
        let Ok(lesson) = std::fs::read_to_string(self.dir.join("teaches")) else { return };
        if self.borrows {
            let (address, fault) = lesson.split_once(' ').unwrap_or((&lesson, ""));
            let learned = Learned { kernels: Vec::new(), written: vec![address.parse().unwrap()] };
            let fault = Some(fault.to_owned()).filter(|it| !it.is_empty());
            self.reply_with(&WorkerReply::Learned { fault }, &learned.to_bytes().unwrap());
        }
    }

    fn reply_with(&self, reply: &WorkerReply, blob: &[u8]) {
        if self.is_ahead {
            return;
        }
        if frame::send(&self.channel, reply, blob, &[]).is_err() {
            self.note("could not reply");
        }
    }

    fn failed(&self, reason: &str) {
        self.reply(&WorkerReply::Failed(Failure::internal(reason)));
    }

    /// Replays the log as long as a file is there. Returns why that fails, if the file says so at its end.
    fn replays(&self) -> Option<String> {
        self.note("replays");
        let file = self.dir.join("assures");
        loop {
            match std::fs::read_to_string(&file) {
                Err(_) => return None,
                Ok(why) if !why.is_empty() => return Some(why),
                Ok(_) => std::thread::sleep(Duration::from_millis(2)),
            }
        }
    }

    /// Ends its client, and with it this worker.
    fn ends_with_its_client(&self, when: &str) {
        if self.is(when) {
            let client = self.attach.as_ref().unwrap().pid;
            // SAFETY: a process that this test has caused to be.
            assert_eq!(unsafe { libc::kill(client, libc::SIGKILL) }, 0);
            self.end("client gone");
        }
    }

    /// Whether its client's name asks for this misbehaviour.
    fn is(&self, misbehaviour: &str) -> bool {
        self.command.starts_with(misbehaviour)
    }

    /// Stops this process, once, at the request that the file `stop-at` names, after as many others of that name as the file
    /// says.
    fn stop_at(&self, request: &WorkerRequest) {
        let path = self.dir.join("stop-at");
        let Ok(text) = std::fs::read_to_string(&path) else { return };
        let (name, before) = text.split_once(' ').unwrap();
        let debug = format!("{request:?}");
        if debug.split([' ', '(', '{']).next() != Some(name) {
            return;
        }
        match before.parse::<usize>().unwrap().checked_sub(1) {
            Some(before) => std::fs::write(&path, format!("{name} {before}")).unwrap(),
            None => {
                std::fs::remove_file(&path).unwrap();
                // SAFETY: no memory is concerned.
                assert_eq!(unsafe { libc::raise(libc::SIGSTOP) }, 0);
            }
        }
    }

    fn answer(&mut self, message: Message<WorkerRequest>) {
        self.stop_at(&message.body);
        let Message { body, blob, fds } = message;
        match body {
            WorkerRequest::Adopt { attach, .. } => {
                self.adopt(attach, fds);
                if self.is("needs-room") {
                    self.reply(&WorkerReply::NeedsRoom);
                }
            }
            WorkerRequest::Quiesce { .. } => {
                self.note("Quiesce");
                self.ends_with_its_client("ends-in-quiesce");
                if self.is("busy") {
                    return self.failed("stream 0x1 is busy in kernel spin");
                }
                if self.is("slow-quiesce") {
                    std::thread::sleep(Duration::from_millis(3500));
                }
                self.reply(&WorkerReply::Done);
            }
            WorkerRequest::Calm { .. } | WorkerRequest::Userfault | WorkerRequest::Advance { .. } => {
                self.reply(&WorkerReply::Done)
            }
            WorkerRequest::Open => {
                self.note("Open");
                if self.dir.join("opens-badly").exists() {
                    return self.failed("its ring does not open");
                }
                if self.kept.is_none()
                    && let Some(mut keeper) = self.other.take()
                {
                    if self.dir.join("dies-at-open").exists() {
                        std::fs::remove_file(self.dir.join("dies-at-open")).unwrap();
                        std::process::exit(13);
                    }
                    let mut answer = [0];
                    keeper.write_all(b"?").unwrap();
                    std::io::Read::read_exact(&mut keeper, &mut answer).unwrap();
                    assert_eq!(&answer, b"!");
                }
                self.reply(&WorkerReply::Done);
                self.teach();
            }
            WorkerRequest::Reserve { .. } => {
                self.note("Reserve");
                self.reply(&WorkerReply::Done);
            }
            WorkerRequest::Stage { unit, units, new } => {
                assert_eq!(new.len(), fds.len());
                let size = |fd: OwnedFd| std::fs::File::from(fd).metadata().unwrap().len();
                assert!(fds.into_iter().all(|fd| size(fd) == unit));
                self.note(&format!("Stage {} {}", units.len(), new.len()));
                if self.is("no-stage") {
                    return self.failed("there are no addresses left");
                }
                self.reply(&WorkerReply::Done);
            }
            WorkerRequest::Pace { bandwidth, application_first } => {
                // Default values are not reported.
                if bandwidth.iter().any(|it| *it > 0) || !application_first {
                    self.note(&format!("Pace {bandwidth:?} {application_first}"));
                }
                self.reply(&WorkerReply::Done);
            }
            WorkerRequest::Precopy { files, .. } => {
                self.note(&format!("Precopy {}", files[0]));
                self.reply(&WorkerReply::Done);
            }
            WorkerRequest::Save { hash_key, files, copying, .. } => {
                self.note(&format!("Save {copying:?}"));
                assert!([files.len(), 2 * files.len()].contains(&fds.len()));
                let files = files.into_iter().zip(fds.into_iter().map(std::fs::File::from)).collect();
                self.save(hash_key, files, blob);
            }
            WorkerRequest::Progress => self.progress(),
            WorkerRequest::SaveCode { hash } => {
                self.note("SaveCode");
                assert_eq!(hash, CodeHash::of(CODE).to_string());
                let mut file = std::fs::File::from(fds.into_iter().next().unwrap());
                file.write_all(CODE).unwrap();
                self.reply(&WorkerReply::Done);
            }
            WorkerRequest::Cancel => {
                self.note("Cancel");
                self.is_save_cancelled = true;
            }
            // Only for containers that have limits; there are none here.
            WorkerRequest::JoinContainer { .. } => self.reply(&WorkerReply::Done),
            WorkerRequest::Data { .. } => panic!("there are few data files"),
            WorkerRequest::Code { code } => {
                assert_eq!(code.len(), fds.len());
                self.code += code.len();
                self.reply(&WorkerReply::Done);
            }
            WorkerRequest::LoadCode => {
                assert_eq!(std::mem::take(&mut self.code), 1);
                assert!(rekindle_images::Client::from_bytes(&blob).is_ok());
                self.note("LoadCode");
                if self.dir.join("loads-no-code").exists() {
                    return self.failed("the driver takes no library");
                }
                self.has_code = true;
                self.reply(&WorkerReply::Done);
            }
            WorkerRequest::Load { data, hash_algorithm, hash_key, code, early, warm, steps, .. } => {
                if self.has_code {
                    self.note("has its code");
                }
                // The last one is of a later version.
                for step in ["code", "replay", "map", "unheard of"].into_iter().filter(|_| steps) {
                    self.reply(&WorkerReply::LoadStep { step: step.to_owned() });
                }
                if early && self.dir.join("assures").exists() {
                    self.reply(&WorkerReply::LoadStep { step: ASSURED.to_owned() });
                    if let Some(why) = self.replays() {
                        return self.failed(&why);
                    }
                }
                let data = data.iter().map(|it| DataFile { depth: it.depth, index: it.index }).collect::<Vec<_>>();
                let key = HashKey::from_parts(hash_algorithm, hash_key).unwrap();
                let how = if warm { "Load warm" } else { "Load" };
                self.load(how, (key, &data, &code), &blob, fds);
            }
            // A file says how the load of the content goes; without it, all is there.
            WorkerRequest::LoadProgress => match std::fs::read_to_string(self.dir.join("content")).as_deref() {
                // An empty one is about to be written.
                Ok("stands still" | "") => {
                    self.loading = true;
                    self.reply(&WorkerReply::Loading { loaded: 0, bytes: MEMORY as u64 });
                }
                Ok(why) => self.failed(why),
                Err(_) => {
                    if std::mem::take(&mut self.loading) {
                        self.note("content is there");
                    }
                    self.reply(&WorkerReply::Loaded { times: LoadTimes::default() });
                }
            },
            // Any file stands for memory.
            WorkerRequest::ExportTemplate { first } => {
                let piece = |number: u64| TemplatePiece { device: 0, address: number << 21, size: 1 << 21 };
                let pieces: Vec<_> = [piece(1), piece(2)].into_iter().skip(first).take(1).collect();
                let file = std::fs::File::open(self.dir.join("events")).unwrap();
                let fds: Vec<_> = pieces.iter().map(|_| file.as_raw_fd()).collect();
                frame::send(&self.channel, &WorkerReply::Template { count: 2, pieces }, &[], &fds).unwrap();
            }
            WorkerRequest::Borrow => {
                let learned = Learned::from_bytes(&blob).unwrap();
                self.note(&format!("Borrow {:?}", learned.written));
                self.borrows = true;
                self.reply(&WorkerReply::Done);
            }
            WorkerRequest::CopyTemplate if self.dir.join("knows-no-copies").exists() => {
                self.failed("unknown variant `CopyTemplate`");
            }
            WorkerRequest::CopyTemplate => {
                self.note("CopyTemplate");
                self.reply(&WorkerReply::Done);
            }
            WorkerRequest::TakeTemplate { pieces } => {
                assert_eq!(pieces.len(), fds.len());
                self.note(&format!("TakeTemplate {}", pieces.len()));
                self.reply(&WorkerReply::Done);
            }
            WorkerRequest::Suspend { data, hold, deep, hash_algorithm, hash_key } => {
                assert_eq!(data.len(), fds.len());
                self.note(&format!("Suspend {hold}{}", if deep { " deep" } else { "" }));
                if let Some(suspended) = &mut self.suspended {
                    suspended.hold = hold;
                    return self.reply(&WorkerReply::Suspended { bytes: 0 });
                }
                if self.is("shares-late") {
                    return self.failed("it shares GPU memory");
                }
                if deep {
                    self.kept = Some((blob, hash_algorithm, hash_key, data, fds));
                }
                self.suspended = Some(Suspension { bytes: MEMORY as u64, hold, waits_for_room: false, deep });
                self.reply(&WorkerReply::Suspended { bytes: MEMORY as u64 });
            }
            WorkerRequest::Kept => {
                self.note("Kept");
                let (blob, hash_algorithm, hash_key, data, files) = self.kept.as_ref().unwrap();
                let reply =
                    WorkerReply::Kept { data: data.clone(), hash_algorithm: *hash_algorithm, hash_key: *hash_key };
                let files: Vec<_> = files.iter().map(AsRawFd::as_raw_fd).collect();
                frame::send(&self.channel, &reply, blob, &files).unwrap();
            }
            WorkerRequest::HandOver => {
                self.note("HandOver");
                self.other = Some(UnixStream::from(fds.into_iter().next().unwrap()));
                let client = self.client.as_ref().unwrap().as_raw_fd();
                frame::send(&self.channel, &WorkerReply::HandedOver, &[], &[client]).unwrap();
            }
            WorkerRequest::BringBack if self.dir.join("no-room").exists() => {
                self.reply(&WorkerReply::Busy { what: "its GPU has no room".to_owned() });
            }
            WorkerRequest::BringBack => {
                self.note("BringBack");
                self.suspended = None;
                self.reply(&WorkerReply::Done);
            }
            WorkerRequest::Pinned { pinned } => {
                assert_eq!(pinned.len(), fds.len());
                self.pinned += pinned.len();
                self.reply(&WorkerReply::Done);
            }
            WorkerRequest::Connect { pinned, takes_over } => {
                assert_eq!(pinned.len() + 3 + usize::from(takes_over.is_some()), fds.len());
                self.pinned += pinned.len();
                self.note(&format!("Connect {}", self.pinned));
                let mut fds = fds.into_iter();
                self.client = fds.next().map(UnixStream::from);
                if let Some(attach) = takes_over {
                    self.attach = Some(attach);
                    self.other = fds.next().map(UnixStream::from);
                }
                self.reply(&WorkerReply::Done);
            }
            WorkerRequest::Comes { attach } => {
                self.note("Comes");
                self.attach = Some(*attach);
                self.client = fds.into_iter().next().map(UnixStream::from);
            }
            WorkerRequest::Ahead { request } => {
                self.is_ahead = true;
                self.answer(Message { body: *request, blob, fds });
                self.is_ahead = false;
            }
            WorkerRequest::Shares => {
                // A file per client lists its shared memory.
                let said = std::fs::read_to_string(self.dir.join(format!("shares-{}", self.command)));
                let ids = |what: &str| match &said {
                    Ok(said) if said == what => vec![[7; 16]],
                    _ => Vec::new(),
                };
                self.reply(&WorkerReply::Shares { own: ids("own"), others: ids("others") });
            }
            WorkerRequest::Export { .. } => self.failed("it has nothing of this name"),
            WorkerRequest::MakeShared { .. } => {
                self.reply(&WorkerReply::MadeShared { count: 0, ids: Vec::new(), needed: Vec::new() });
            }
            WorkerRequest::Registers { .. } | WorkerRequest::Import { .. } | WorkerRequest::TakeShared { .. } => {
                self.reply(&WorkerReply::Done)
            }
            WorkerRequest::Describe => {
                if self.is("meets") {
                    self.meet("Describe");
                }
                self.reply(&WorkerReply::Description {
                    device_memory: vec![match () {
                        () if self.is("huge") => 1 << 60,
                        () if self.is("wide") || self.is("narrow") => 4 << 20,
                        () => 4096,
                    }],
                    pinned_memory: 8,
                    commands: 42,
                    suspended: self.suspended,
                    // A file per client says how long it has been idle.
                    idle_ms: self.number("idle", 0),
                    physical: vec![if self.suspended.is_some() { 0 } else { MEMORY as u64 }],
                    refused_calls: Some(3),
                    first_command_ago_ns: Some(1),
                    gpu_time_ns: vec![1_500_000_000],
                });
            }
            WorkerRequest::ConfirmQuiesced if self.is("went-on") => self.failed("it has gone on by itself"),
            WorkerRequest::ConfirmQuiesced => self.reply(&WorkerReply::Done),
            WorkerRequest::Alive => {}
            WorkerRequest::GiveWay => self.note("GiveWay"),
            WorkerRequest::Room { how_much: true, .. } => {
                let free = vec![self.number("needs", MEMORY as u64)];
                self.reply(&WorkerReply::Needs { free, waited_ms: self.number("waited", 0) });
            }
            WorkerRequest::Room { again: true, .. } => self.note("Room again"),
            WorkerRequest::Room { coming, .. } => self.note(&format!("Room {coming}")),
            WorkerRequest::Remember { protocol } => {
                let attach = self.attach.as_mut().unwrap();
                attach.settings.retain(|(name, _)| name != CHOSEN_PROTOCOL);
                attach.settings.extend(protocol.map(|it| (CHOSEN_PROTOCOL.to_owned(), it)));
                self.reply(&WorkerReply::Done);
            }
            WorkerRequest::Moment { awaited } => {
                self.note(if awaited { "Moment" } else { "no Moment" });
                self.reply(&WorkerReply::Done);
            }
            WorkerRequest::Calls => self.reply(&WorkerReply::Calls {
                // A function that exists, and one that does not.
                counts: vec![
                    Count { function: 0, asked: 5, refused: 5 },
                    Count { function: 999, asked: 1, refused: 0 },
                ],
            }),
            WorkerRequest::Access => {
                let report = rekindle_wire::access::AccessReport { watched: 7, ..Default::default() };
                self.reply(&WorkerReply::Access { report: Box::new(report) });
            }
            WorkerRequest::Memory => {
                let free = std::fs::read_to_string(self.dir.join("free"));
                let free = free.map_or(1 << 29, |it| it.trim().parse().unwrap());
                let memory = rekindle_wire::nvml::Memory { total: 1 << 30, free, reserved: 0 };
                self.reply(&WorkerReply::Memory { devices: vec![memory] });
            }
            WorkerRequest::Check => {
                self.ends_with_its_client("ends-in-check");
                let reasons = if self.is("unsavable") { vec!["it calls malloc".to_owned()] } else { Vec::new() };
                self.reply(&WorkerReply::Checked { reasons });
            }
        }
    }

    /// Waits until all workers whose clients are called `meets-...` have received this request as often as this one. A file has
    /// the number of these workers.
    fn meet(&self, request: &str) {
        self.note(request);
        let wanted: usize = std::fs::read_to_string(self.dir.join("meeting")).unwrap().trim().parse().unwrap();
        let line = |command: &str| format!("{command} {request}");
        while !self.dir.join("stop").exists() && self.dir.exists() {
            let events = std::fs::read_to_string(self.dir.join("events")).unwrap_or_default();
            let mut asked = std::collections::BTreeMap::<&str, usize>::new();
            events.lines().filter(|it| it.starts_with("meets")).for_each(|it| *asked.entry(it).or_default() += 1);
            let own = asked.get(line(&self.command).as_str()).copied().unwrap_or(0);
            let there = asked.iter().filter(|(it, times)| it.ends_with(request) && **times >= own);
            if there.count() >= wanted {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn adopt(&mut self, attach: Attach, fds: Vec<OwnedFd>) {
        let [connection, _ring, _staging] = <[OwnedFd; 3]>::try_from(fds).unwrap();
        let client = UnixStream::from(connection);
        self.command.clone_from(&attach.command);
        self.attach = Some(attach);
        self.note("Adopt");
        if self.is("dies-on-adopt") {
            std::process::exit(11);
        }
        if self.is("refused") {
            let reason = "no memory for staging".to_owned();
            frame::send(&client, &Answer::Refused { reason }, &[], &[]).unwrap();
            return self.failed("no memory for staging");
        }
        let answer = Answer::Attached(self.attached.clone());
        frame::send(&client, &answer, &[], &[]).unwrap();
        self.client = Some(client);
        self.reply(&WorkerReply::Done);
    }

    fn save(&mut self, hash_key: [u8; 16], files: DataFiles, known: Vec<u8>) {
        self.ends_with_its_client("ends-in-save");
        if self.is("dies-on-save") {
            std::process::exit(12);
        }
        if self.is("fails-save") {
            return self.failed("copy of 0x2000 failed: 700");
        }
        self.saving = Some((hash_key, files, known));
        self.is_save_cancelled = false;
        let code = vec![SavedCode { hash: CodeHash::of(CODE).to_string(), size: CODE.len() as u64 }];
        let secured = Secured { bytes: MEMORY as u64, ..Secured::default() };
        self.reply(&WorkerReply::Begun { code, secured });
    }

    fn progress(&mut self) {
        let bytes = MEMORY as u64;
        // The request is a pre-copy.
        let Some((hash_key, files, known)) = self.saving.take() else {
            return self.reply(&WorkerReply::Saved { bytes, waits: Waits::default() });
        };
        if self.is("clones") && !self.dir.join("save-now").exists() {
            self.saving = Some((hash_key, files, known));
            return self.reply(&WorkerReply::Saving { may_open: true, copied: 0, bytes });
        }
        if self.is("keeps-saving") {
            if self.is_save_cancelled {
                return self.failed("cancelled");
            }
            self.saving = Some((hash_key, files, known));
            return self.reply(&WorkerReply::Saving { may_open: false, copied: 0, bytes });
        }
        if self.is("mispredicts") {
            let reason = "8 bytes at 0x2000 were written while they were copied";
            return self.reply(&WorkerReply::Failed(Failure::new(FailureKind::Mispredicted, reason)));
        }
        if self.is("slow-save") {
            // Goes on until it is cancelled, like a worker that checks for that between two chunks.
            let mut cancelled = false;
            for _ in 0..500 {
                std::thread::sleep(Duration::from_millis(20));
                cancelled |= self.is_cancelled();
                if cancelled || self.dir.join("save-now").exists() {
                    break;
                }
            }
            if cancelled {
                return self.failed("cancelled");
            }
        }
        // One writer for each file, as if the last file had a thread of its own.
        let writers = files.into_iter().map(|(index, file)| {
            let writer = DataWriter::new(file, index, ContentKey::from_bytes(hash_key)).unwrap();
            writer.with_known(Known::from_bytes(&known).unwrap())
        });
        let writers: Vec<_> = writers.collect();
        let (writer, last) = (&writers[0], writers.last().unwrap());
        let mut content = self.command.clone().into_bytes();
        content.resize(MEMORY, 7);
        let hash = CodeHash::of(CODE);
        let mut record = Record {
            // The version of a state that every later release reads.
            worker_version: 9,
            gpus: vec![ClientGpu { ordinal: 0, uuid: [1; 16] }],
            objects: vec![Object { sequence: 1, code: vec![hash], ..Object::default() }],
            allocations: vec![Allocation {
                address: 0x2000_0000_0000,
                size: MEMORY as u64,
                pieces: writer.append_all(&content).unwrap(),
                ..Allocation::default()
            }],
            ..Record::default()
        };
        if self.is("wide") {
            let pieces = last.append_all(&content).unwrap();
            let more = Allocation { address: 0x2000_1000_0000, pieces, ..record.allocations[0].clone() };
            record.allocations.push(more);
        }
        if self.is("strays") {
            let Storage::Stored(extent) = &mut record.allocations[0].pieces[0].storage else { panic!("it is stored") };
            extent.file += 1;
        }
        if self.is("pinned") {
            record.pinned = vec![Pinned { address: PINNED.0, size: PINNED.1, ..Pinned::default() }];
        }
        writers.into_iter().for_each(|it| assert!(it.finish().is_ok()));
        let saved = WorkerReply::Saved { bytes, waits: Waits::default() };
        self.reply_with(&saved, &record.to_bytes().unwrap());
    }

    fn is_cancelled(&self) -> bool {
        let mut byte = 0_u8;
        // SAFETY: receives at most one byte into the local, and leaves it queued.
        let got = unsafe {
            libc::recv(self.channel.as_raw_fd(), (&raw mut byte).cast(), 1, libc::MSG_PEEK | libc::MSG_DONTWAIT)
        };
        got >= 0
    }

    fn load(
        &mut self,
        how: &str,
        (key, data, code): (HashKey, &[DataFile], &[String]),
        blob: &[u8],
        fds: Vec<OwnedFd>,
    ) {
        let record = Record::from_bytes(blob).unwrap();
        self.command.clone_from(&record.command);
        assert_eq!(fds.len(), data.len() + code.len());
        let files = fds.into_iter().map(std::fs::File::from);
        let reader = DataReader::new(key, data.iter().copied().zip(files));
        for allocation in &record.allocations {
            for piece in &allocation.pieces {
                let mut content = vec![0; piece.length as usize];
                if let Err(error) = reader.read(piece, &mut content) {
                    self.note("Load fails");
                    return self.failed(&error.to_string());
                }
                assert!(content.starts_with(self.command.as_bytes()));
            }
        }
        self.code += code.len();
        self.attach = Some(Attach {
            dialect: rekindle_wire::Dialect::from_parts(record.wire_version, &record.shared_state),
            pid: record.namespace_pid as i32,
            command: record.command.clone(),
            socket: record.socket_path.display().to_string(),
            cookie: 0,
            settings: Vec::new(),
        });
        self.note(&format!("{how} {}", self.code));
        self.reply(&WorkerReply::Done);
    }

    fn wait(&self) -> Woken {
        let poll = |fd: RawFd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let client = self.client.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let heir = self.kept.as_ref().and(self.other.as_ref()).map_or(-1, AsRawFd::as_raw_fd);
        let mut fds = [poll(self.channel.as_raw_fd()), poll(client), poll(heir)];
        // SAFETY: three structures, alive during the call. A negative descriptor is passed over.
        unsafe { libc::poll(fds.as_mut_ptr(), 3, -1) };
        match fds.map(|it| it.revents != 0) {
            [_, true, _] => Woken::Client,
            [_, _, true] => Woken::Heir,
            _ => Woken::Daemon,
        }
    }

    /// Gives its client to the worker that asks for it.
    fn give_away(&mut self) {
        let Some(mut heir) = self.other.take() else { return };
        if matches!(std::io::Read::read(&mut heir, &mut [0]), Ok(1)) {
            heir.write_all(b"!").unwrap();
            self.end("given away");
        }
    }
}

enum Woken {
    Daemon,
    Client,
    /// The worker that is to take the client over asks for it, or is gone.
    Heir,
}

fn is_closed(stream: &UnixStream) -> bool {
    let mut byte = 0_u8;
    // SAFETY: receives at most one byte into the local, and leaves it queued.
    let got = unsafe { libc::recv(stream.as_raw_fd(), (&raw mut byte).cast(), 1, libc::MSG_PEEK | libc::MSG_DONTWAIT) };
    got == 0
}
