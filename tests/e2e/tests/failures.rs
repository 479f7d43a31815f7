//! What fails beside the daemon: disks, workers, programs.

use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::ensure;
use rekindle_e2e::app::undisturbed;
use rekindle_e2e::image::COMMIT;
use rekindle_e2e::{App, Fate, Image, Node, Result, process, until};

/// 2 MiB of GPU memory, and more than that of a process's own.
const ARGUMENTS: [&str; 6] = ["--iterations", "60", "--words", "65536", "--sleep-us", "20000"];

/// A disk of this many KiB.
struct SmallDisk {
    dir: PathBuf,
}

impl SmallDisk {
    fn mount(dir: PathBuf, kib: u64) -> Result<Self> {
        std::fs::create_dir(&dir)?;
        let size = format!("size={kib}k");
        let status = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(&dir).status()?;
        ensure!(status.success(), "mount ended with {status}");
        Ok(Self { dir })
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.dir).status();
    }
}

/// What an image takes, in KiB.
struct Sizes {
    /// CRIU's files.
    criu: u64,
    /// The GPU's memory.
    gpu: u64,
}

fn sizes(image: &Image) -> Result<Sizes> {
    let mut sizes = Sizes { criu: 0, gpu: 0 };
    for entry in std::fs::read_dir(&image.dir)? {
        let entry = entry?;
        let kib = entry.metadata()?.blocks() / 2;
        let ours = entry.file_name().to_string_lossy().starts_with("rekindle");
        *(if ours { &mut sizes.gpu } else { &mut sizes.criu }) += kib;
    }
    Ok(sizes)
}

/// A dump into a disk that is too small fails for this reason; the program goes on, to be dumped elsewhere.
fn dump_into_a_full_disk(fate: Fate, kib: impl Fn(&Sizes) -> u64, reason: &str) -> Result {
    let expected = undisturbed("streams4", &ARGUMENTS)?;
    // Copies take longer than all that CRIU does.
    let node = Node::with_gpu(&[("SIMGPU_COPY_GBPS", "0.01")])?;
    let app = node.run("streams4", &ARGUMENTS)?;
    app.reaches(20)?;
    let sizes = sizes(&node.dump(&app)?)?;
    assert!(sizes.criu > 2 * sizes.gpu && sizes.gpu > 1024, "of the program's memory, most is to be the process's own");
    let disk = SmallDisk::mount(node.path("disk"), kib(&sizes))?;
    let (criu, image) = node.start_dump_into(disk.dir.clone(), &app, fate)?;
    criu.wait()?.fails_with(reason)?;
    assert!(!image.path(COMMIT).exists(), "an image that did not fit is committed");
    app.advances()?;
    drop(disk);

    let image = node.dump_and_kill(app)?;
    image.must_be_of_the_middle(&expected)?;
    assert_eq!(node.restore(&image)?.finish()?, expected);
    node.finish()
}

#[test]
fn a_disk_too_small_for_the_gpu_memory_is_seen_before_anything_stops() -> Result {
    dump_into_a_full_disk(Fate::Killed, |sizes| sizes.gpu / 2, "free some or dump elsewhere")
}

#[test]
fn a_disk_that_criu_fills_fails_the_dump() -> Result {
    dump_into_a_full_disk(Fate::Killed, |sizes| sizes.criu / 2, "No space left on device")
}

#[test]
fn a_disk_that_gpu_memory_fills_fails_the_dump() -> Result {
    dump_into_a_full_disk(Fate::Killed, |sizes| sizes.criu + sizes.gpu / 2, "no space to write")
}

#[test]
fn a_disk_that_gpu_memory_fills_fails_the_dump_of_a_program_that_runs_again() -> Result {
    dump_into_a_full_disk(Fate::Running, |sizes| sizes.criu + sizes.gpu / 2, "no space to write")
}

/// Whether all threads of a process sleep in a futex.
fn all_wait(pid: i32) -> Result<bool> {
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let call = std::fs::read_to_string(thread?.path().join("syscall"))?;
        if call.split(' ').next() != Some(&libc::SYS_futex.to_string()) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// One thread: of several, one ends the program while others are still in the runtime, which does not bear it.
#[test]
fn a_killed_worker_is_an_error_in_its_program_and_not_a_hang() -> Result {
    let node = Node::start()?;
    let app = node.run("streams4", &["--threads", "1", "--iterations", "100000"])?;
    app.reaches(20)?;
    let worker = node.client(app.pid())?.worker;
    process::signal(worker, libc::SIGSTOP)?;
    until("a call waits for the worker", || Ok(all_wait(app.pid())?.then_some(())))?;
    process::signal(worker, libc::SIGKILL)?;
    let status = app.end()?;
    let errors = app.errors()?;
    assert_eq!(status.code(), Some(3), "{status}: {errors}");
    assert!(errors.contains("rekindle: the worker of this process has died"), "{errors}");
    assert!(errors.contains("cudaErrorLaunchFailure"), "{errors}");
    node.finish()
}

#[test]
fn a_killed_program_frees_its_worker_and_the_pool_is_full_again() -> Result {
    let node = Node::start()?;
    let app = node.run("streams4", &["--iterations", "100000", "--sleep-us", "1000"])?;
    app.reaches(20)?;
    let worker = node.client(app.pid())?.worker;
    app.kill()?;
    process::wait_gone("the worker of a killed program", worker)?;
    node.is_idle()?;
    assert!(node.clients()?.is_empty());
    node.finish()
}

#[test]
fn a_worker_that_is_slow_to_end_is_not_taken_for_that_of_the_restored_program() -> Result {
    let arguments = ["--iterations", "150", "--sleep-us", "5000"];
    let expected = undisturbed("streams4", &arguments)?;
    let node = Node::start()?;
    let app = node.run("streams4", &arguments)?;
    app.reaches(20)?;
    let image = node.dump(&app)?;
    // It cannot notice that its client is gone, whose number the restored program has then.
    let worker = node.client(app.pid())?.worker;
    process::signal(worker, libc::SIGSTOP)?;
    app.kill()?;
    let app = node.restore(&image)?;
    app.advances()?;
    let image = node.dump_and_kill(app)?;
    image.must_be_of_the_middle(&expected)?;
    assert_eq!(node.restore(&image)?.finish()?, expected);
    process::signal(worker, libc::SIGCONT)?;
    node.finish()
}

#[test]
fn a_program_that_becomes_another_frees_its_worker() -> Result {
    let node = Node::start()?;
    let go = node.path("go");
    let mut command = node.command(env!("CARGO_BIN_EXE_exec-after-cuda").as_ref())?;
    command.args([go.as_os_str(), OsStr::new("sleep"), OsStr::new("infinity")]);
    let app = App::start(&mut command, &node.fresh("exec"), None)?;
    let worker = node.client(app.pid())?.worker;
    std::fs::write(go, "")?;
    process::wait_gone("the worker of a program that is another now", worker)?;
    until("it is no client", || Ok(node.clients()?.is_empty().then_some(())))?;
    assert!(!process::is_gone(app.pid()), "it was to run on as sleep");
    assert_eq!(std::fs::read_to_string(format!("/proc/{}/comm", app.pid()))?, "sleep\n");
    app.kill()?;
    node.finish()
}
