//! The names of hosts that are let in.

use rustls::client::verify_server_name;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::ParsedCertificate;

/// The hosts that are let in, by the names in their certificates (subject alternative names).
#[derive(Debug)]
pub(super) struct Peers {
    /// None: all.
    names: Option<Vec<ServerName<'static>>>,
}

impl Peers {
    /// All whose certificate is good.
    pub(super) fn any() -> Self {
        Self { names: None }
    }

    /// One name or address a line. What comes behind `#` is a comment. The error is a line that has neither.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let lines = text.lines().map(|it| it.split('#').next().unwrap_or_default().trim());
        let names =
            lines.filter(|it| !it.is_empty()).map(|it| ServerName::try_from(it.to_owned()).map_err(|_| it.to_owned()));
        Ok(Self { names: Some(names.collect::<Result<_, _>>()?) })
    }

    /// The name by which whoever has this certificate is let in, for messages. The certificate was checked.
    pub(super) fn admits(&self, certificate: &CertificateDer<'_>) -> Option<String> {
        let Some(names) = &self.names else { return Some("a host with a good certificate".to_owned()) };
        let parsed = ParsedCertificate::try_from(certificate).ok()?;
        let name = names.iter().find(|name| verify_server_name(&parsed, name).is_ok())?;
        Some(name.to_str().into_owned())
    }
}

#[cfg(test)]
mod tests {
    use rustls::pki_types::pem::PemObject;

    use super::super::authority::Authority;
    use super::*;

    #[test]
    fn a_host_is_let_in_by_one_of_its_names() {
        let authority = Authority::new();
        let certificate =
            |names: &[&str]| CertificateDer::from_pem_file(authority.host_of(names).path().join("cert.pem")).unwrap();
        let peers = Peers::parse("# ours\ngpu1\n\n gpu2.example # the new one\n10.0.0.3\n").unwrap();
        let admits = |names: &[&str]| peers.admits(&certificate(names));
        assert_eq!(admits(&["gpu1"]).as_deref(), Some("gpu1"));
        assert_eq!(admits(&["x", "GPU2.example"]).as_deref(), Some("gpu2.example"));
        assert_eq!(admits(&["10.0.0.3"]).as_deref(), Some("10.0.0.3"));
        for names in [&["gpu3"][..], &["gpu1.example"], &["10.0.0.4"], &[]] {
            assert_eq!(admits(names), None, "{names:?}");
        }
        assert!(Peers::any().admits(&certificate(&["gpu3"])).is_some());
        assert_eq!(Peers::parse("# nobody\n").unwrap().admits(&certificate(&["gpu1"])), None);
        for bad in ["two names", "/etc", "gpu1\nb@d"] {
            assert!(Peers::parse(bad).is_err(), "{bad}");
        }
    }
}
