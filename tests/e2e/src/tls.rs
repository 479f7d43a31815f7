//! `rekindle tls listen` on another host, with the files of TLS that an administrator makes.
//!
//! ```text
//!   host (Node)                                     other host (Elsewhere)
//!   rekindle migrate ── rekindle tls connect ── TCP ── rekindle tls listen ──► rekindle migrate --receive
//! ```

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

use crate::wait::until;
use crate::{Elsewhere, Node, Result, process, stage};

/// The name in the certificate of the host that connects.
pub const CALLER: &str = "here.example";
/// Starts what listens again when it has ended, as systemd does.
const RESTARTS: &str = "while :; do \"$@\"; sleep 0.05; done";

/// A host that listens, again and again. It ends with this; what it has started goes on.
#[derive(Debug)]
pub struct Listener {
    child: Child,
    /// The host's address.
    address: String,
    dir: PathBuf,
}

impl Listener {
    /// Makes the files for both hosts, and has the other one listen, which is in the same network. Migrations have their files there in
    /// `into`.
    pub fn start(here: &Node, there: &Elsewhere, into: &Path) -> Result<Self> {
        Self::at(&address(), here, there, into)
    }

    /// The same, at this address of the other host.
    pub fn at(address: &str, here: &Node, there: &Elsewhere, into: &Path) -> Result<Self> {
        let (dir, address) = (here.path("tls"), address.to_owned());
        let mut params = CertificateParams::new(Vec::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        for (host, name) in [("here", CALLER), ("there", &address)] {
            let (dir, key) = (dir.join(host), KeyPair::generate()?);
            let certificate = CertificateParams::new(vec![name.to_owned()])?.signed_by(&key, &authority)?;
            fs::create_dir_all(&dir)?;
            fs::write(dir.join("ca.pem"), authority.pem())?;
            fs::write(dir.join("cert.pem"), certificate.pem())?;
            fs::write(dir.join("key.pem"), key.serialize_pem())?;
            fs::set_permissions(dir.join("key.pem"), Permissions::from_mode(0o600))?;
        }
        fs::write(dir.join("there/peers"), format!("{CALLER}\n"))?;
        let mut command = Command::new("sh");
        stage::clean_environment(&mut command);
        command.args(["-c", RESTARTS, "sh"]).arg(stage::program("rekindle")?);
        command.args(["tls", "listen", "--listen", &address, "--tls-dir"]).arg(dir.join("there"));
        command.arg("--dir").arg(into).stdin(Stdio::null()).stderr(File::create(dir.join("said"))?);
        let listener = Self { child: there.spawn(&mut command)?, address, dir };
        until("the other host listens", || {
            Ok(fs::read_to_string(listener.said())?.contains("listens on").then_some(()))
        })?;
        Ok(listener)
    }

    /// The shell command that kills it. It starts again.
    pub fn kill(&self) -> Result<String> {
        let rekindle = stage::program("rekindle")?;
        Ok(format!("pkill -KILL -f '^{} tls listen --listen {} '", rekindle.display(), self.address))
    }

    /// The file with all that it has said, each time that it was started.
    pub fn said(&self) -> PathBuf {
        self.dir.join("said")
    }

    /// The host, as commands name it.
    pub fn host(&self) -> &str {
        &self.address
    }

    /// The directory of the files for who connects.
    pub fn dir(&self) -> PathBuf {
        self.dir.join("here")
    }

    /// Its list of hosts that are let in.
    pub fn peers(&self) -> PathBuf {
        self.dir.join("there/peers")
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let all = process::tree(self.child.id() as i32);
        let _ = self.child.kill();
        let _ = self.child.wait();
        let listens = all.into_iter().filter(|it| process::command_line(*it).contains(" tls listen "));
        let _ = process::kill_all(&listens.collect::<Vec<_>>());
    }
}

/// An address of this machine that no other test uses.
fn address() -> String {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let [.., a, b] = std::process::id().to_be_bytes();
    format!("127.{a}.{b}.{}", NEXT.fetch_add(1, Ordering::Relaxed))
}
