//! The files of TLS, which an administrator makes. They are read for each connection, so new ones need no restart.
//!
//! | | |
//! |---|---|
//! | `ca.pem` | the certificates of who signs those of all hosts: whoever has one of them is let in |
//! | `cert.pem` | this host's certificate, and those between it and `ca.pem` if there are any |
//! | `key.pem` | its key, which nobody else may read |
//! | `peers` | the names of hosts that are let in, one a line; without this file nobody is, unless the administrator has said otherwise |
//!
//! They, and their directory, belong to root or to who runs this, and nobody else can write them: whoever can write them can let anybody in.

use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::Resumption;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use thiserror::Error;

use super::peers::Peers;
use crate::owner;

/// The default directory.
pub(crate) const DIRECTORY: &str = "/etc/rekindle/tls";
const CA: &str = "ca.pem";
const CERTIFICATE: &str = "cert.pem";
const KEY: &str = "key.pem";
const PEERS: &str = "peers";
/// What both ends say that they speak: its version.
const PROTOCOL: &[u8] = b"rekindle/1";
/// The bits of a mode by which others read, write or execute.
const OTHERS: u32 = 0o077;

/// Why there is no TLS with these files.
#[derive(Debug, Error)]
pub(super) enum KeysError {
    #[error("cannot read {path}: {source}. docs/migration.md says how to make the files for TLS")]
    Read { path: PathBuf, source: io::Error },
    #[error(
        "others than its owner can read {path} (mode {mode:o}): run `chmod 600 {path}`, and make a new key if somebody may have read it"
    )]
    Readable { path: PathBuf, mode: u32 },
    #[error("others than its owner can write {path} (mode {mode:o}), and so let anybody in: run `chmod go-w {path}`")]
    Writable { path: PathBuf, mode: u32 },
    #[error("{path} belongs to the user {uid}, who could let anybody in: run `chown root {path}`")]
    Owner { path: PathBuf, uid: u32 },
    #[error(
        "there is no {path}, so nobody is let in: name the hosts in it that are, one a line as in their certificates (whoever is let in is \
         like root here), or give --any-host to let all in whose certificate is good"
    )]
    NoPeers { path: PathBuf },
    #[error("{path} has no certificate in the form of PEM")]
    NoCertificate { path: PathBuf },
    #[error("{path} is not in the form of PEM: {source}")]
    Pem { path: PathBuf, source: pem::Error },
    #[error("{path} has something that is no certificate: {source}")]
    Certificate { path: PathBuf, source: rustls::Error },
    #[error("no certificate can be checked by {path}: {source}")]
    Verifier { path: PathBuf, source: VerifierBuilderError },
    #[error("the certificate and the key in {dir} cannot be used: {source}")]
    Pair { dir: PathBuf, source: rustls::Error },
    #[error("{path} has {line:?}, which is no name of a host: give one name or address a line")]
    Name { path: PathBuf, line: String },
}

/// A directory with the files of TLS.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    dir: PathBuf,
    lets_any_in: bool,
}

impl Keys {
    /// Those in this directory.
    pub(super) fn of(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), lets_any_in: false }
    }

    /// The same. If there is no list of hosts, all may be let in whose certificate is good.
    pub(super) fn that_let_in(self, any: bool) -> Self {
        Self { lets_any_in: any, ..self }
    }

    /// What a host that listens presents and demands.
    pub(super) fn server(&self) -> Result<Arc<ServerConfig>, KeysError> {
        let (provider, (chain, key)) = (provider(), self.own()?);
        let roots = Arc::new(self.roots()?);
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider.clone()).build();
        let verifier = verifier.map_err(|source| KeysError::Verifier { path: self.path(CA), source })?;
        let config = ServerConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13]);
        let config = config.and_then(|it| it.with_client_cert_verifier(verifier).with_single_cert(chain, key));
        let mut config = config.map_err(|source| KeysError::Pair { dir: self.dir.clone(), source })?;
        // Each connection shows its certificate: an earlier one proves nothing.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        config.alpn_protocols = vec![PROTOCOL.to_vec()];
        Ok(Arc::new(config))
    }

    /// What a host that connects presents and demands.
    pub(super) fn client(&self) -> Result<Arc<ClientConfig>, KeysError> {
        let ((chain, key), roots) = (self.own()?, self.roots()?);
        let config = ClientConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13]);
        let config = config.and_then(|it| it.with_root_certificates(roots).with_client_auth_cert(chain, key));
        let mut config = config.map_err(|source| KeysError::Pair { dir: self.dir.clone(), source })?;
        config.resumption = Resumption::disabled();
        config.alpn_protocols = vec![PROTOCOL.to_vec()];
        Ok(Arc::new(config))
    }

    /// The hosts that are let in.
    pub(super) fn peers(&self) -> Result<Peers, KeysError> {
        let path = self.path(PEERS);
        match self.read(PEERS, owner::OTHERS_WRITE) {
            Ok(bytes) => Peers::parse(&String::from_utf8_lossy(&bytes)).map_err(|line| KeysError::Name { path, line }),
            Err(KeysError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                if self.lets_any_in {
                    Ok(Peers::any())
                } else {
                    Err(KeysError::NoPeers { path })
                }
            }
            Err(error) => Err(error),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Reads a file, unless others may do with it what these bits say, or may put another in its place.
    fn read(&self, name: &str, forbidden: u32) -> Result<Vec<u8>, KeysError> {
        let path = self.path(name);
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| KeysError::Read { path, source }
        };
        let about = fs::metadata(&self.dir).map_err(failed(&self.dir))?;
        check(&self.dir, &about, owner::OTHERS_WRITE)?;
        let mut file = File::open(&path).map_err(failed(&path))?;
        check(&path, &file.metadata().map_err(failed(&path))?, forbidden)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(failed(&path))?;
        Ok(bytes)
    }

    fn certificates(&self, name: &str) -> Result<Vec<CertificateDer<'static>>, KeysError> {
        let (path, bytes) = (self.path(name), self.read(name, owner::OTHERS_WRITE)?);
        match CertificateDer::pem_slice_iter(&bytes).collect::<Result<Vec<_>, _>>() {
            Ok(found) if found.is_empty() => Err(KeysError::NoCertificate { path }),
            found => found.map_err(|source| KeysError::Pem { path, source }),
        }
    }

    fn roots(&self) -> Result<RootCertStore, KeysError> {
        let mut roots = RootCertStore::empty();
        for certificate in self.certificates(CA)? {
            let added = roots.add(certificate);
            added.map_err(|source| KeysError::Certificate { path: self.path(CA), source })?;
        }
        Ok(roots)
    }

    /// This host's certificate and key.
    fn own(&self) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), KeysError> {
        let key = PrivateKeyDer::from_pem_slice(&self.read(KEY, OTHERS)?);
        let key = key.map_err(|source| KeysError::Pem { path: self.path(KEY), source })?;
        Ok((self.certificates(CERTIFICATE)?, key))
    }
}

/// Whether nobody but root and the user who runs this has written a file or directory, and others may not do what these bits say.
fn check(path: &Path, about: &Metadata, forbidden: u32) -> Result<(), KeysError> {
    let (path, mode) = (path.to_owned(), about.mode() & 0o7777);
    match mode & forbidden {
        _ if !owner::is_trusted(about) => Err(KeysError::Owner { path, uid: about.uid() }),
        0 => Ok(()),
        _ if forbidden == OTHERS => Err(KeysError::Readable { path, mode }),
        _ => Err(KeysError::Writable { path, mode }),
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::super::authority::Authority;
    use super::*;

    #[test]
    fn a_key_that_others_can_read_is_not_used_nor_a_list_that_they_can_write() {
        let dir = Authority::new().host("gpu1");
        let keys = Keys::of(dir.path());
        assert!(keys.server().is_ok() && keys.client().is_ok());
        let set = |name: &str, mode: u32| {
            fs::set_permissions(dir.path().join(name), Permissions::from_mode(mode)).unwrap();
        };
        for mode in [0o640, 0o604, 0o660] {
            set(KEY, mode);
            let said = [keys.server().map(drop), keys.client().map(drop)].map(|it| it.unwrap_err().to_string());
            assert!(said.iter().all(|it| it.contains("chmod 600") && it.contains("key.pem")), "{said:?}");
        }
        set(KEY, 0o400);
        assert!(keys.server().is_ok());
        fs::write(dir.path().join(PEERS), "gpu2\n").unwrap();
        for name in [CA, PEERS] {
            set(name, 0o664);
            let said = keys.server().map(drop).and_then(|()| keys.peers().map(drop)).unwrap_err().to_string();
            assert!(said.contains("chmod go-w") && said.contains(name), "{said}");
            set(name, 0o644);
        }
        assert!(keys.server().is_ok() && keys.peers().is_ok());
    }

    /// Tests run as root.
    #[test]
    fn what_another_user_has_or_can_replace_is_not_used() {
        use std::os::unix::fs::chown;

        let dir = Authority::new().host("gpu1");
        fs::write(dir.path().join(PEERS), "gpu2\n").unwrap();
        let keys = Keys::of(dir.path());
        let used = || keys.server().map(drop).and_then(|()| keys.client().map(drop)).and(keys.peers().map(drop));
        for name in [CA, CERTIFICATE, KEY, PEERS, "."] {
            let path = dir.path().join(name);
            chown(&path, Some(12345), None).unwrap();
            let said = used().unwrap_err().to_string();
            assert!(said.contains("12345") && said.contains("chown root"), "{name}: {said}");
            chown(&path, Some(0), None).unwrap();
            used().unwrap();
        }
        // `/tmp` keeps files apart, and lets anybody add those that are missing.
        for mode in [0o775, 0o757, 0o1777] {
            fs::set_permissions(dir.path(), Permissions::from_mode(mode)).unwrap();
            let said = used().unwrap_err().to_string();
            assert!(said.contains("chmod go-w"), "{mode:o}: {said}");
        }
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
        used().unwrap();
    }

    #[test]
    fn without_a_list_nobody_is_let_in_unless_all_may_be() {
        let dir = Authority::new().host("gpu1");
        let keys = Keys::of(dir.path());
        let certificate = CertificateDer::from_pem_file(dir.path().join(CERTIFICATE)).unwrap();
        let said = keys.peers().unwrap_err().to_string();
        assert!(said.contains("peers") && said.contains("--any-host"), "{said}");
        let any = keys.that_let_in(true);
        assert!(any.peers().unwrap().admits(&certificate).is_ok());
        // A list that is there decides.
        fs::write(dir.path().join(PEERS), "gpu2\n").unwrap();
        assert!(any.peers().unwrap().admits(&certificate).is_err());
    }

    #[test]
    fn files_that_are_missing_or_damaged_are_named() {
        let authority = Authority::new();
        for name in [CA, CERTIFICATE, KEY] {
            let dir = authority.host("gpu1");
            let keys = Keys::of(dir.path());
            // The mode stays.
            fs::write(dir.path().join(name), "no PEM").unwrap();
            for said in [keys.server().map(drop), keys.client().map(drop)].map(|it| it.unwrap_err().to_string()) {
                assert!(said.contains(name), "{said}");
            }
            fs::remove_file(dir.path().join(name)).unwrap();
            let said = keys.client().unwrap_err().to_string();
            assert!(said.contains(name) && said.contains("docs/migration.md"), "{said}");
        }
        // The key of another.
        let (dir, other) = (authority.host("gpu1"), authority.host("gpu1"));
        fs::copy(other.path().join(KEY), dir.path().join(KEY)).unwrap();
        assert!(Keys::of(dir.path()).server().is_err());
    }
}
