//! A program that checks itself at every step, its host, and a process that is killed meanwhile: the conditions that
//! must hold afterwards.
//!
//! The conditions hold for every victim and every moment. The program goes on, unless it was the victim, or has lost
//! its GPU state and reports that. An image is committed only if it is whole, which a restore shows. Nothing is left of
//! the operation that failed.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use rekindle_wire::control::{ProtocolChange, Reply, Request};

use crate::criu::{Running, Setting};
use crate::disk::SmallDisk;
use crate::gate::{Gate, Moment};
use crate::image::COMMIT;
use crate::wait::until_true;
use crate::{App, Fate, Footprint, Image, Node, Outcome, Result, process, stage, until};

/// Copies so slow that saving and loading the memory of `steady` takes longer than CRIU's own work.
const SLOW: [(&str, &str); 1] = [("SIMGPU_COPY_GBPS", "0.02")];
const BALLAST_KIB: &str = "4096";
/// A disk with more than enough room for an image of the program.
const DISK_KIB: u64 = 64 << 10;
/// The exit code of programs of `tests/apps` after a CUDA error.
const CUDA_ERROR: i32 = 3;

/// The process that is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    /// `rekindled`.
    Daemon,
    /// The worker of the program.
    Worker,
    /// The CRIU process that dumps or restores.
    Criu,
    /// The program.
    Application,
}

impl Victim {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Daemon, Self::Worker, Self::Criu, Self::Application];
}

/// The protocols of a dump.
const PROTOCOLS: [&str; 4] = ["stop", "clone", "cow", "recopy"];
/// The variable that selects one protocol for all dumps.
const PROTOCOL: &str = "REKINDLE_E2E_PROTOCOL";

/// The protocols to dump by: all, or the one that `REKINDLE_E2E_PROTOCOL` names.
pub fn protocols() -> Result<Vec<&'static str>> {
    let Ok(name) = std::env::var(PROTOCOL) else { return Ok(PROTOCOLS.to_vec()) };
    let known = PROTOCOLS.into_iter().find(|it| *it == name);
    Ok(vec![known.with_context(|| format!("{PROTOCOL}={name} is none of {PROTOCOLS:?}"))?])
}

/// A program that checks itself at every step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// `steady`: parameters name all memory that its kernels write.
    Steady,
    /// `hidden`: no parameter names the memory that its kernels write. A dump by `cow` detects a mispredicted write,
    /// and fails.
    Hidden,
}

impl Program {
    fn name(self) -> &'static str {
        if self == Self::Steady { "steady" } else { "hidden" }
    }
}

/// A host with a gate, and a program on it.
#[derive(Debug)]
pub struct Bench {
    /// The host.
    pub node: Node,
    /// The gate that holds CRIU.
    pub gate: Gate,
    which: Program,
    app: Option<App>,
    until: PathBuf,
}

impl Bench {
    /// Starts a host whose copies are slow, for the program `steady`.
    pub fn start() -> Result<Self> {
        Self::start_with(Program::Steady)
    }

    /// Starts a host whose copies are slow, for this program. An image of the program is begun with as many data files
    /// as there are cores.
    pub fn start_with(which: Program) -> Result<Self> {
        Self::start_as(which, "")
    }

    /// The same, for the program `steady`, where restored processes wait for all of their GPU memory.
    pub fn start_waiting() -> Result<Self> {
        Self::start_as(Program::Steady, "[restore]\nrun_before_loaded = false\n")
    }

    fn start_as(which: Program, more: &str) -> Result<Self> {
        let node = Node::configured(&format!("[image]\nfile_mib = 1\n{more}"), &SLOW)?;
        let dir = node.path("gate");
        fs::create_dir(&dir)?;
        let gate = Gate::start(&dir, node.socket())?;
        let until = node.path("until");
        Ok(Self { node, gate, which, app: None, until })
    }

    /// The program, in the midst of its work; started if it does not run. It has a UTS namespace of its own, so that
    /// CRIU has to tell its processes to go on.
    pub fn program(&mut self) -> Result<&App> {
        if self.app.is_none() {
            let until = self.until.display().to_string();
            let arguments = ["--until", &until, "--ballast-kib", BALLAST_KIB, "--sleep-us", "3000"];
            let mut command = self.node.command(Path::new("unshare"))?;
            let name = self.which.name();
            command.arg("--uts").arg(stage::app(name)?);
            if self.which == Program::Hidden {
                command.args(["--kib", "4"]);
            }
            self.app = Some(self.node.run_command(name, command, &arguments)?);
            // The daemon holds descriptors of a worker that has just started.
            self.app.iter().try_for_each(App::advances)?;
            self.node.wait_for_spare()?;
        }
        let app = self.app.as_ref().context("there is a program")?;
        app.advances()?;
        Ok(app)
    }

    /// Selects the protocol of the next dump.
    fn choose_protocol(&self, app: &App, protocol: &str) -> Result {
        let change = ProtocolChange::Choose(protocol.to_owned());
        let reply = self.node.ask(&Request::Protocol { pid: app.pid(), change })?;
        ensure!(matches!(reply, Reply::Protocol { .. }), "{reply:?}");
        Ok(())
    }

    /// The setting with which CRIU passes through the gate.
    pub fn criu(&self) -> Setting {
        self.gate.setting(self.node.criu())
    }

    /// Dumps the program, kills it, and returns an image in which no changing file is open.
    pub fn image(&mut self) -> Result<Image> {
        self.program()?;
        let app = self.app.take().context("there is a program")?;
        let image = self.node.dump(&app)?;
        app.kill()?;
        self.node.is_idle()?;
        Ok(image)
    }

    /// Takes over the program restored from `image`.
    pub fn adopt(&mut self, image: &Image) {
        self.app = Some(App::adopt(image.app.clone()));
    }

    /// Ends the program, and checks that every step of its long life was right and that nothing is left of it.
    pub fn finish(mut self) -> Result {
        self.program()?;
        fs::write(&self.until, "")?;
        let app = self.app.take().context("there is a program")?;
        assert_eq!(app.finish()?, format!("{} ok\n", self.which.name()));
        drop(self.gate);
        self.node.finish()
    }

    /// Starts a dump, holds it at this moment, kills the victim, and checks the result.
    pub fn kill_in_dump(&mut self, moment: Moment, victim: Victim, fate: Fate, protocol: &str) -> Result {
        let what = format!("{victim:?} killed at {moment:?} of a dump by {protocol}, the program to be {fate:?}");
        eprintln!("{what}");
        self.try_kill_in_dump(moment, victim, fate, protocol).context(what)
    }

    fn try_kill_in_dump(&mut self, moment: Moment, victim: Victim, fate: Fate, protocol: &str) -> Result {
        self.program()?;
        let app = self.app.take().context("there is a program")?;
        self.choose_protocol(&app, protocol)?;
        let before = Footprint::of(&self.node, &app)?;
        let worker = self.node.client(app.pid())?.worker;
        self.gate.hold(moment.held_at())?;
        let dir = self.node.fresh("image");
        fs::create_dir(&dir)?;
        let (mut criu, image) = self.node.start_dump_by(&self.criu(), dir, &app, fate)?;
        self.gate.reached(&mut criu)?;
        self.stop_within(moment, worker)?;
        self.kill(victim, worker, &criu, app.pid())?;
        process::signal(worker, libc::SIGCONT)?;
        self.gate.open()?;
        let outcome = criu.wait()?;
        if victim == Victim::Daemon {
            self.node.start_daemon(&SLOW)?;
        }
        self.settle_dump(app, image, &outcome, &before, victim, fate)
    }

    /// For a moment during a request, stops the worker, so that the daemon cannot answer.
    fn stop_within(&self, moment: Moment, worker: i32) -> Result {
        if let Moment::During(request) = moment {
            process::signal(worker, libc::SIGSTOP)?;
            self.gate.open()?;
            self.gate.is_asked(request)?;
        }
        Ok(())
    }

    fn kill(&mut self, victim: Victim, worker: i32, criu: &Running, program: i32) -> Result {
        match victim {
            Victim::Daemon => self.node.kill_daemon(),
            Victim::Worker => process::kill_all(&[worker]),
            Victim::Criu => process::signal(criu.pid(), libc::SIGKILL),
            // CRIU traces the program, and may be its parent: the process is gone only later.
            Victim::Application => process::signal(program, libc::SIGKILL),
        }
    }

    /// Starts a dump, holds it at this moment, fills the disk, and lets the dump go on.
    pub fn fill_disk_in_dump(&mut self, moment: Moment, fate: Fate, protocol: &str) -> Result {
        let what = format!("a disk full from {moment:?} of a dump by {protocol} on, the program to be {fate:?}");
        eprintln!("{what}");
        self.try_fill_disk_in_dump(moment, fate, protocol).context(what)
    }

    fn try_fill_disk_in_dump(&mut self, moment: Moment, fate: Fate, protocol: &str) -> Result {
        self.program()?;
        let app = self.app.take().context("there is a program")?;
        self.choose_protocol(&app, protocol)?;
        let before = Footprint::of(&self.node, &app)?;
        let disk = SmallDisk::mount(self.node.fresh("disk"), DISK_KIB)?;
        let dir = disk.dir.join("image");
        fs::create_dir(&dir)?;
        self.gate.hold(moment)?;
        let (mut criu, image) = self.node.start_dump_by(&self.criu(), dir.clone(), &app, fate)?;
        self.gate.reached(&mut criu)?;
        disk.fill()?;
        self.gate.open()?;
        let outcome = criu.wait()?;
        ensure!(!outcome.status.success(), "it was to fail: {outcome:?}");
        let (criu, ours) = ("No space left on device", "no space to write");
        let reasons = match moment {
            Moment::Before("Pause") => ["free some or dump elsewhere"; 2],
            Moment::Script(_) | Moment::Before("Finish") => [ours; 2],
            // CRIU or Rekindle reports the full disk, whichever writes first.
            _ => [criu, ours],
        };
        ensure!(reasons.iter().any(|it| outcome.log.contains(it)), "it does not say {reasons:?}: {outcome:?}");
        until("the daemon has removed what it wrote", || Ok(image.files()?.is_empty().then_some(())))?;
        app.advances()?;
        before.is_back(&self.node, &app)?;

        disk.make_room()?;
        let (criu, image) = self.node.start_dump_into(dir, &app, Fate::Running)?;
        criu.wait()?.succeeds()?;
        ensure!(image.path(COMMIT).exists(), "there is room, and no commit record");
        app.advances()?;
        self.app = Some(app);
        Ok(())
    }

    fn settle_dump(
        &mut self,
        app: App,
        image: Image,
        outcome: &Outcome,
        before: &Footprint,
        victim: Victim,
        fate: Fate,
    ) -> Result {
        let committed = image.path(COMMIT).exists();
        if victim != Victim::Criu {
            ensure!(committed == outcome.status.success(), "committed: {committed}, and {outcome:?}");
        }
        let dumped_dead = outcome.status.success() && fate == Fate::Killed;
        if victim == Victim::Application || dumped_dead {
            app.was_killed(&image.tree)?;
        } else if victim == Victim::Worker {
            // The program notices this at its next call, and cannot go on.
            let status = app.end()?;
            ensure!(status.code() == Some(CUDA_ERROR), "{status}: {}", app.errors()?);
            ensure!(app.errors()?.contains("the worker of this process has died"), "{}", app.errors()?);
        } else {
            app.advances()?;
            before.is_back(&self.node, &app)?;
            if committed {
                app.kill()?;
            } else {
                self.app = Some(app);
            }
        }
        if self.app.is_none() {
            self.node.is_idle()?;
        }
        if committed {
            self.app = Some(self.node.restore(&image)?);
        } else if victim != Victim::Daemon {
            until("the daemon has removed what it wrote", || Ok(image.files()?.is_empty().then_some(())))?;
        }
        Ok(fs::remove_dir_all(&image.dir)?)
    }

    /// Starts a restore, holds it at this moment, kills the victim, and checks the result. `opens` says whether the
    /// rings are open by then, so that the restore is complete. Then the program runs.
    pub fn kill_in_restore(&mut self, image: &Image, moment: Moment, victim: Victim, opens: bool) -> Result {
        let what = format!("{victim:?} killed at {moment:?} of a restore");
        eprintln!("{what}");
        self.try_kill_in_restore(image, moment, victim, opens).context(what)
    }

    fn try_kill_in_restore(&mut self, image: &Image, moment: Moment, victim: Victim, opens: bool) -> Result {
        ensure!(self.app.is_none(), "a program is there already");
        App::forget_output(&image.app, image.written)?;
        let [worker] = self.node.processes()[..] else { anyhow::bail!("not one spare worker") };
        until("the numbers of the processes are free", || {
            Ok(image.tree.iter().all(|it| process::is_gone(*it)).then_some(()))
        })?;
        let criu = if victim == Victim::Criu {
            self.hold_restore_directly(image, moment, worker)?
        } else {
            self.gate.hold(moment.held_at())?;
            let mut criu = self.node.start_restore(&self.criu(), image)?;
            self.gate.reached(&mut criu)?;
            self.stop_within(moment, worker)?;
            criu
        };
        self.kill(victim, worker, &criu, image.app.pid)?;
        process::signal(worker, libc::SIGCONT)?;
        self.gate.open()?;
        if victim == Victim::Application && matches!(moment, Moment::Script(_)) && !opens {
            // CRIU does not notice a process that dies during its scripts, and would wait for ever; the daemon does
            // notice.
            process::wait_gone("the worker for a process that was killed", worker)?;
            process::signal(criu.pid(), libc::SIGKILL)?;
        }
        let outcome = criu.wait()?;
        if victim == Victim::Daemon {
            self.node.start_daemon(&SLOW)?;
        }
        if opens {
            let must_succeed = !matches!(victim, Victim::Criu | Victim::Application);
            ensure!(!must_succeed || outcome.status.success(), "{outcome:?}");
            let app = App::adopt(image.app.clone());
            match victim {
                Victim::Application => drop(app.was_killed(&image.tree)?),
                Victim::Worker => ensure!(app.end()?.code() == Some(CUDA_ERROR), "{}", app.errors()?),
                Victim::Daemon | Victim::Criu => {
                    app.advances()?;
                    self.node.client(app.pid())?;
                    app.kill()?;
                }
            }
        } else {
            ensure!(!outcome.status.success(), "criu has not noticed");
        }
        for pid in &image.tree {
            process::wait_gone("a process whose restore failed", *pid)?;
        }
        self.node.is_idle()
    }

    /// Holds a restore by a CRIU that connects to the daemon directly, not through the gate: from the process that
    /// connects, the daemon knows which processes CRIU has made.
    fn hold_restore_directly(&self, image: &Image, moment: Moment, worker: i32) -> Result<Running> {
        const RESUMING: &str = "Run late stage hook";
        let held_at = if moment == Moment::During("Resume") { Moment::Script("post-restore") } else { moment };
        self.gate.hold(held_at)?;
        let setting = Setting { socket: self.node.socket().to_owned(), ..self.criu() };
        let mut criu = self.node.start_restore(&setting, image)?;
        self.gate.reached(&mut criu)?;
        if moment != held_at {
            process::signal(worker, libc::SIGSTOP)?;
            self.gate.open()?;
            // CRIU logs this, and then its plugin sends the request and waits for the answer.
            until_true("CRIU asks for the process to be resumed", || {
                Ok(criu.whole_log().contains(RESUMING) && process::is_polling(criu.pid())?)
            })?;
        }
        Ok(criu)
    }
}
