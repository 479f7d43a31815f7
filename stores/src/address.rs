//! Where a store is.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::StoreError;

/// Where a store is, as a user writes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A directory of this machine: a path, or `file://PATH`.
    Directory(PathBuf),
    /// `s3://BUCKET/PREFIX`. Where that is, and with which rights, the `AWS_` variables say.
    S3 {
        /// The bucket.
        bucket: String,
        /// What the names of all objects begin with; may be empty.
        prefix: String,
    },
    /// `ssh://[USER@]HOST[:PORT]/DIR`.
    Ssh {
        /// The user, if it is not ssh's choice.
        user: Option<String>,
        /// The host.
        host: String,
        /// The port, if it is not ssh's choice.
        port: Option<u16>,
        /// The absolute path of a directory there.
        directory: String,
    },
}

impl Address {
    /// Reads an address. A text without `://` is a path.
    ///
    /// # Errors
    /// It is none: the message says what would be.
    pub fn parse(text: &str) -> Result<Self, StoreError> {
        let Some((scheme, rest)) = text.split_once("://") else {
            if text.is_empty() {
                return Err(StoreError::usage("the address of a store is empty"));
            }
            return Ok(Self::Directory(text.into()));
        };
        match scheme {
            "file" if rest.starts_with('/') => Ok(Self::Directory(rest.into())),
            "file" => Err(StoreError::usage(format!("{text}: say file:///PATH, with an absolute path"))),
            "s3" => s3(text, rest),
            "ssh" => ssh(text, rest),
            _ => {
                Err(StoreError::usage(format!("{text}: a store is a directory, s3://BUCKET/PREFIX or ssh://HOST/DIR")))
            }
        }
    }

    /// Whether it is a path without a scheme or with `file://`.
    #[must_use]
    pub fn as_directory(&self) -> Option<&Path> {
        if let Self::Directory(path) = self { Some(path) } else { None }
    }

    /// The address without its last part, and that part, which may be an image's name.
    #[must_use]
    pub fn split(&self) -> Option<(Self, String)> {
        let cut = |text: &str| {
            let (rest, last) = text.trim_end_matches('/').rsplit_once('/')?;
            (!last.is_empty()).then(|| (rest.to_owned(), last.to_owned()))
        };
        match self {
            Self::Directory(path) => {
                let last = path.file_name()?.to_str()?.to_owned();
                let parent = path.parent()?;
                let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
                Some((Self::Directory(parent.to_owned()), last))
            }
            Self::S3 { bucket, prefix } => {
                let (prefix, last) = match cut(prefix) {
                    Some(parts) => parts,
                    None if prefix.is_empty() => return None,
                    None => (String::new(), prefix.clone()),
                };
                Some((Self::S3 { bucket: bucket.clone(), prefix }, last))
            }
            Self::Ssh { user, host, port, directory } => {
                let (directory, last) = cut(directory)?;
                let directory = if directory.is_empty() { "/".to_owned() } else { directory };
                Some((Self::Ssh { user: user.clone(), host: host.clone(), port: *port, directory }, last))
            }
        }
    }
}

fn s3(text: &str, rest: &str) -> Result<Address, StoreError> {
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    let prefix = prefix.trim_matches('/');
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b".-_".contains(&byte);
    if bucket.is_empty() || !bucket.bytes().all(allowed) {
        return Err(StoreError::usage(format!("{text}: say s3://BUCKET/PREFIX; {bucket:?} is no name of a bucket")));
    }
    let plain = |part: &str| {
        !matches!(part, "" | "." | "..")
            && part.bytes().all(|it| it.is_ascii_alphanumeric() || b"._+-@:=".contains(&it))
    };
    if !prefix.is_empty() && !prefix.split('/').all(plain) {
        return Err(StoreError::usage(format!(
            "{text}: a prefix has letters, digits and ._+-@:= between single slashes"
        )));
    }
    Ok(Address::S3 { bucket: bucket.to_owned(), prefix: prefix.to_owned() })
}

fn ssh(text: &str, rest: &str) -> Result<Address, StoreError> {
    let say = "say ssh://[USER@]HOST[:PORT]/DIR";
    let (at, directory) = rest.split_once('/').ok_or_else(|| StoreError::usage(format!("{text}: {say}")))?;
    let (user, host) = match at.rsplit_once('@') {
        Some((user, host)) => (Some(user.to_owned()), host),
        None => (None, at),
    };
    // [::1]:22
    let (host, port) = match host.strip_prefix('[').and_then(|it| it.split_once(']')) {
        Some((host, port)) => (host, port.strip_prefix(':')),
        None => host.rsplit_once(':').map_or((host, None), |(host, port)| (host, Some(port))),
    };
    let port =
        port.map(str::parse).transpose().map_err(|_| StoreError::usage(format!("{text}: that is no port; {say}")))?;
    // What begins with a dash would be an option of ssh.
    let is_plain = |it: &str| {
        !it.is_empty() && !it.starts_with('-') && !it.contains(|c: char| c.is_whitespace() || c.is_control())
    };
    if !is_plain(host) || user.as_deref().is_some_and(|it| !is_plain(it)) {
        return Err(StoreError::usage(format!("{text}: that is no host; {say}")));
    }
    if directory.contains(|c: char| c.is_control()) {
        return Err(StoreError::usage(format!("{text}: a directory's name has no such characters")));
    }
    Ok(Address::Ssh { user, host: host.to_owned(), port, directory: format!("/{directory}") })
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) => write!(f, "{}", path.display()),
            Self::S3 { bucket, prefix } if prefix.is_empty() => write!(f, "s3://{bucket}"),
            Self::S3 { bucket, prefix } => write!(f, "s3://{bucket}/{prefix}"),
            Self::Ssh { user, host, port, directory } => {
                f.write_str("ssh://")?;
                user.iter().try_for_each(|user| write!(f, "{user}@"))?;
                if host.contains(':') { write!(f, "[{host}]") } else { f.write_str(host) }?;
                port.iter().try_for_each(|port| write!(f, ":{port}"))?;
                f.write_str(directory)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_shown_as_they_were_written() {
        for text in [
            "/images/store",
            "store",
            "s3://bucket",
            "s3://bucket/a/b",
            "ssh://host/dir",
            "ssh://me@host:2222/a b/c",
            "ssh://[::1]:22/dir",
        ] {
            assert_eq!(Address::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(Address::parse("file:///a").unwrap(), Address::Directory("/a".into()));
        assert_eq!(Address::parse("s3://b/p/").unwrap().to_string(), "s3://b/p");
    }

    #[test]
    fn other_texts_are_refused_and_the_message_says_what_would_do() {
        for text in [
            "",
            "file://a",
            "s3://",
            "s3://B/a",
            "s3://b/a//c",
            "s3://b/../c",
            "s3://b/a?x",
            "ssh://host",
            "ssh:///dir",
            "ssh://-oProxyCommand=x/dir",
            "ssh://-x@host/dir",
            "ssh://host:port/dir",
            "ssh://ho st/dir",
            "http://x/y",
        ] {
            let error = Address::parse(text).unwrap_err();
            assert!(matches!(error, StoreError::Usage { .. }), "{text}: {error}");
        }
    }

    #[test]
    fn the_last_part_may_be_an_image() {
        for (text, store, name) in [
            ("/images/store/job", "/images/store", "job"),
            ("store", ".", "store"),
            ("s3://b/p/job", "s3://b/p", "job"),
            ("s3://b/job", "s3://b", "job"),
            ("ssh://h/dir/job", "ssh://h/dir", "job"),
            ("ssh://h/job", "ssh://h/", "job"),
        ] {
            let (found, last) = Address::parse(text).unwrap().split().unwrap();
            assert_eq!((found.to_string().as_str(), last.as_str()), (store, name));
        }
        assert_eq!(Address::parse("s3://b").unwrap().split(), None);
        assert_eq!(Address::parse("/").unwrap().split(), None);
    }
}
