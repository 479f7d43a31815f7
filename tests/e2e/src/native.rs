//! Programs that use the software GPU by themselves, as a program uses NVIDIA's driver, and a daemon that takes them for such.
//!
//! The software GPU has the driver's checkpoint of other processes, and a file in place of the driver's devices. The daemon's
//! configuration says where such files are.

use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, ensure};
use rekindle_wire::frame;
use rekindle_wire::native::{Answer, Call, Question, Ready};

use crate::app::{self, Hold};
use crate::{App, Node, Result, process, stage, until};

/// The folder of the software GPU's device files, in a test's directory.
const DEVICES: &str = "devices";

/// The variables of a program that uses the software GPU by itself on this node.
pub fn variables(node: &Node) -> Result<Vec<(&'static str, PathBuf)>> {
    // The last one is how a test finds what is left of its programs.
    Ok(vec![
        ("LD_LIBRARY_PATH", stage::software_gpu()?),
        ("SIMGPU_DEVICE_FILE", node.path(DEVICES).join("nvidia0")),
        ("REKINDLE_SOCKET", node.socket().to_owned()),
    ])
}

/// Starts a host whose daemon takes programs with the software GPU's device files for native ones. `more` is further configuration,
/// and `gpu` has variables for the daemon and all that it starts.
pub fn start(more: &str, gpu: &[(&str, &str)]) -> Result<Node> {
    let mut node = Node::without_daemon()?;
    fs::create_dir(node.path(DEVICES))?;
    node.configure(&format!("{more}\n[native]\ndevices = {:?}\n", node.path(DEVICES).join("nvidia")));
    node.start_daemon(gpu)?;
    node.keeps_helper();
    Ok(node)
}

/// Runs a program of `tests/apps` on the software GPU itself. It waits well past its middle until the test lifts
/// the hold, if it has run undisturbed with these arguments.
pub fn run(node: &Node, name: &str, arguments: &[&str], environment: &[(&str, &str)]) -> Result<App> {
    let late = app::late_in(name, arguments);
    let hold = late.map(|at| Hold::new(node.fresh("hold"), at)).transpose()?;
    let mut command = Command::new(stage::app(name)?);
    stage::clean_environment(&mut command);
    command.envs(variables(node)?).envs(environment.iter().copied());
    command.envs(hold.iter().map(Hold::variable));
    Ok(node.run_command(name, command, arguments)?.held(hold))
}

/// Whether a process has the software GPU's device file mapped.
pub fn has_its_device(node: &Node, pid: i32) -> Result<bool> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    Ok(maps.contains(&node.path(DEVICES).display().to_string()))
}

/// Waits until the daemon has a process with which it calls the driver.
pub fn wait_for_helper(node: &Node) -> Result<i32> {
    let daemon = node.daemon_pid()?;
    until("the daemon has a helper that calls the driver", || Ok(process::driver_helper(daemon)))
}

/// Somebody else who calls the driver's checkpoint, as `cuda-checkpoint` does.
pub struct Stranger {
    child: Child,
    channel: UnixStream,
}

impl Stranger {
    /// Starts it.
    pub fn start() -> Result<Self> {
        let (channel, theirs) = UnixStream::pair()?;
        let mut command = Command::new(stage::program("rekindled")?);
        stage::clean_environment(&mut command);
        let fd = theirs.as_raw_fd();
        command.args(["native", "--channel-fd", &fd.to_string(), "--library"]);
        command.arg(stage::software_gpu()?.join("libcuda.so.1")).stdin(Stdio::null());
        // SAFETY: the closure makes one system call.
        unsafe {
            command.pre_exec(move || match libc::fcntl(fd, libc::F_SETFD, 0) {
                -1 => Err(std::io::Error::last_os_error()),
                _ => Ok(()),
            });
        }
        let child = command.spawn().context("cannot start rekindled native")?;
        drop(OwnedFd::from(theirs));
        let ready = frame::receive::<Ready>(&channel)?.body;
        ensure!(matches!(ready, Ready::Ready(_)), "{ready:?}");
        Ok(Self { child, channel })
    }

    /// Calls the driver.
    pub fn call(&self, pid: i32, call: Call) -> Result<Answer> {
        self.ask(pid, call)?;
        self.answer()
    }

    /// Begins a call.
    pub fn ask(&self, pid: i32, call: Call) -> Result {
        Ok(frame::send(&self.channel, &Question { pid, call }, &[], &[])?)
    }

    /// Waits for the end of the call.
    pub fn answer(&self) -> Result<Answer> {
        Ok(frame::receive::<Answer>(&self.channel)?.body)
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The names of the native processes in an image, as `rekindle inspect` shows them.
pub fn in_image(node: &Node, dir: &Path) -> Result<Vec<String>> {
    let output = node.rekindle(&["inspect".as_ref(), "--json".as_ref(), dir.as_os_str()])?;
    ensure!(output.status.success(), "rekindle inspect: {}", String::from_utf8_lossy(&output.stderr));
    let image: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let natives = image["natives"].as_array().context("inspect names no native processes")?;
    Ok(natives.iter().map(|it| it["command"].as_str().unwrap_or_default().to_owned()).collect())
}
