//! Containers of a user who is not root: they run with the GPUs that they ask for. podman supports checkpoints for root
//! only.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use anyhow::{Context, ensure};
use rekindle_e2e::podman::Podman;
use rekindle_e2e::{Node, Result, stage};
use serde_json::json;

/// The UUID of the second software GPU.
const SECOND: &str = "GPU-72656b69-6e64-6c65-2d73-696d67707501";
const UID: u32 = 1947;
/// A user who may connect to the daemon may use GPUs: the socket's group admits this user.
const CONFIGURATION: &str = "socket_mode = \"0660\"\nsocket_group = \"1947\"\n";

/// A user for this test, with no entry in the lists of subordinate ids: the user's containers then have only one user.
struct User {
    home: PathBuf,
}

impl User {
    fn new(node: &Node) -> Result<Self> {
        let home = node.path("home");
        let known = fs::read_to_string("/etc/passwd")?;
        if !known.contains(":1947:") {
            let mut users = File::options().append(true).open("/etc/passwd")?;
            writeln!(users, "rootless:x:{UID}:{UID}::{}:/bin/sh", home.display())?;
            writeln!(File::options().append(true).open("/etc/group")?, "rootless:x:{UID}:")?;
        }
        for dir in [&home, &home.join("run")] {
            fs::DirBuilder::new().mode(0o700).create(dir)?;
            chown(dir, Some(UID), Some(UID))?;
        }
        Ok(Self { home })
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new("setpriv");
        stage::clean_environment(&mut command);
        let uid = UID.to_string();
        command.args(["--reuid", &uid, "--regid", &uid, "--clear-groups", program]);
        command.env("HOME", &self.home).env("XDG_RUNTIME_DIR", self.home.join("run")).current_dir("/");
        // Settings of podman's storage: not every kernel lets a user mount overlays, and not every image has one user
        // only.
        command.env("STORAGE_OPTS", "vfs.ignore_chown_errors=true");
        command
    }

    /// Runs podman with crun, which works without cgroups: this user has none.
    fn podman(&self, arguments: &[&str]) -> Result<Output> {
        let options = ["--cgroup-manager", "cgroupfs", "--storage-driver", "vfs", "--runtime", "crun"];
        let mut command = self.command("podman");
        let output = command.args(options).args(["--log-level", "error"]).args(arguments).stdin(Stdio::null()).output();
        output.context("cannot start podman")
    }

    fn runs(&self, options: &[&str], program: &[&str]) -> Result<Output> {
        let apps = format!("{}:/apps:ro", stage::apps()?.display());
        let basic = ["--cgroups", "disabled", "--network", "none", "--volume", &apps];
        self.podman(&[&["run"], &basic[..], options, &["rekindle-e2e"], program].concat())
    }
}

#[test]
fn a_users_containers_have_gpus_and_others_get_none_from_the_user() -> Result {
    let node = Node::at_default_socket_with(CONFIGURATION)?;
    let podman = Podman::new(&node)?;
    podman.generate_cdi()?;
    let user = User::new(&node)?;
    let hook = stage::program("rekindle-oci-hook")?;
    let reachable =
        user.command("test").arg("-x").arg(&hook).arg("-a").arg("-r").arg(stage::app("visible")?).status()?;
    if !reachable.success() {
        eprintln!("SKIPPED: other users cannot read {}", hook.display());
        return node.finish();
    }
    let image = user.home.join("image.tar");
    podman.call(&["save", "--quiet", "--output", &image.to_string_lossy(), "rekindle-e2e"])?;
    chown(&image, Some(UID), Some(UID))?;
    let output = user.podman(&["load", "--quiet", "--input", &image.to_string_lossy()])?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    let output = user.runs(&["--rm", "--device", "rekindle.dev/gpu=1"], &["/apps/visible", "--use", "1"])?;
    let said = String::from_utf8_lossy(&output.stdout);
    let expected = format!("count 1\n0 {SECOND} ok\nuse 1: cudaErrorInvalidDevice\n");
    assert_eq!(said, expected, "{}", String::from_utf8_lossy(&output.stderr));

    // A user who may not connect gets an error that says so.
    let mode = |mode| fs::set_permissions(node.socket(), fs::Permissions::from_mode(mode));
    mode(0o600)?;
    let output = user.runs(&["--rm", "--device", "rekindle.dev/gpu=1"], &["/apps/visible"])?;
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("this user may not connect to the daemon"), "{said}");
    mode(0o660)?;

    // The user may not give GPUs to root's container, whatever configuration the user passes.
    podman.run("roots", &[], &["/bin/sleep", "1000"])?;
    let pid = podman.pid("roots")?;
    let bundle = user.home.join("bundle");
    fs::create_dir(&bundle)?;
    fs::write(bundle.join("config.json"), "{}")?;
    let mut child = user
        .command(&hook.to_string_lossy())
        .arg("--lib-dir")
        .arg(stage::interposer()?)
        .args(["create-runtime", "--gpu", "all"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let state = json!({ "id": "roots", "pid": pid, "bundle": bundle });
    child.stdin.take().context("no stdin")?.write_all(state.to_string().as_bytes())?;
    let output = child.wait_with_output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("the container's own user may give"), "{said}");

    let output = user.runs(&["--detach", "--name", "mine"], &["/bin/sleep", "1000"])?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = user.podman(&["container", "checkpoint", "mine"])?;
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("requires root"), "{said}");
    user.podman(&["rm", "--force", "--time", "0", "mine"])?;
    // Ends the processes that podman keeps for the user.
    user.podman(&["system", "migrate"])?;
    drop(podman);
    node.finish()
}
