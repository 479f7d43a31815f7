//! The names of hosts that are let in.

use rustls::client::verify_server_name;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::ParsedCertificate;
use webpki::EndEntityCert;

/// The most names of a certificate that a message has.
const SHOWN: usize = 4;

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

    /// The name by which whoever has this certificate is let in, for messages. The certificate was checked. The error says why not.
    pub(super) fn admits(&self, certificate: &CertificateDer<'_>) -> Result<String, String> {
        let unreadable = |_| "the names in its certificate cannot be read".to_owned();
        let names = EndEntityCert::try_from(certificate).map_err(unreadable)?;
        let Some(peers) = &self.names else { return Ok(named(&names)) };
        // It would pass for hosts whose certificates its owner does not have.
        if let Some(wildcard) = names.valid_dns_names().find(|it| it.starts_with('*')) {
            return Err(format!(
                "its certificate is for {wildcard}, which are many hosts, and the list of hosts that are let in (`peers`) names single ones: \
                 it needs a certificate with its own names"
            ));
        }
        let parsed = ParsedCertificate::try_from(certificate).map_err(|error| error.to_string())?;
        let name = peers.iter().find(|name| verify_server_name(&parsed, name).is_ok());
        name.map(|it| it.to_str().into_owned()).ok_or_else(|| {
            "its certificate is good, and none of its names is in the list of hosts that are let in (`peers`)"
                .to_owned()
        })
    }
}

/// What names a host of which nothing else is known.
fn named(certificate: &EndEntityCert<'_>) -> String {
    let names: Vec<_> = certificate.valid_dns_names().take(SHOWN).collect();
    if names.is_empty() { "a certificate without a name of DNS".to_owned() } else { names.join(" ") }
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
        assert_eq!(admits(&["gpu1"]).as_deref(), Ok("gpu1"));
        assert_eq!(admits(&["x", "GPU2.example"]).as_deref(), Ok("gpu2.example"));
        assert_eq!(admits(&["10.0.0.3"]).as_deref(), Ok("10.0.0.3"));
        for names in [&["gpu3"][..], &["gpu1.example"], &["10.0.0.4"], &[]] {
            assert!(admits(names).unwrap_err().contains("none of its names"), "{names:?}");
        }
        assert!(Peers::parse("# nobody\n").unwrap().admits(&certificate(&["gpu1"])).is_err());
        for bad in ["two names", "/etc", "gpu1\nb@d"] {
            assert!(Peers::parse(bad).is_err(), "{bad}");
        }
    }

    /// A certificate for `*.cluster.example` would be that of each line.
    #[test]
    fn a_host_that_may_be_many_is_none_of_the_list() {
        let dir = Authority::new().host_of(&["*.cluster.example", "gpu1"]);
        let certificate = CertificateDer::from_pem_file(dir.path().join("cert.pem")).unwrap();
        for list in ["gpu2.cluster.example\n", "gpu1\n"] {
            let said = Peers::parse(list).unwrap().admits(&certificate).unwrap_err();
            assert!(said.contains("*.cluster.example") && said.contains("own names"), "{said}");
        }
    }

    #[test]
    fn where_all_are_let_in_the_log_has_their_names() {
        let authority = Authority::new();
        let named = |names: &[&str]| {
            let dir = authority.host_of(names);
            Peers::any().admits(&CertificateDer::from_pem_file(dir.path().join("cert.pem")).unwrap()).unwrap()
        };
        assert_eq!(named(&["gpu3", "*.cluster.example"]), "gpu3 *.cluster.example");
        assert!(named(&["10.0.0.3"]).contains("without a name of DNS"));
    }
}
