//! For tests: an administrator, who makes the files of TLS.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair, date_time_ymd,
};
use tempfile::TempDir;

/// Who signs the certificates of hosts.
pub(super) struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub(super) fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// The directory of a host of this name.
    pub(super) fn host(&self, name: &str) -> TempDir {
        self.host_of(&[name])
    }

    /// The directory of a host of these names and addresses.
    pub(super) fn host_of(&self, names: &[&str]) -> TempDir {
        self.made(names, |_| {})
    }

    /// The directory of a host whose certificate has expired.
    pub(super) fn host_of_old(&self, name: &str) -> TempDir {
        self.made(&[name], |params| params.not_after = date_time_ymd(2020, 1, 1))
    }

    /// Has hosts of this directory believe this authority instead of their own.
    pub(super) fn is_believed_in(&self, dir: &Path) {
        fs::write(dir.join("ca.pem"), self.0.pem()).unwrap();
    }

    fn made(&self, names: &[&str], change: impl FnOnce(&mut CertificateParams)) -> TempDir {
        let mut params = CertificateParams::new(names.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>()).unwrap();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        let dir = tempfile::tempdir().unwrap();
        self.is_believed_in(dir.path());
        fs::write(dir.path().join("cert.pem"), certificate.pem()).unwrap();
        let file = dir.path().join("key.pem");
        fs::write(&file, key.serialize_pem()).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        dir
    }
}
