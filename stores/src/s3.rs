//! Objects in a bucket of S3, or of what speaks like it.
//!
//! The crate `object_store` is asynchronous; its runtime is here, and nowhere else. Objects are bounded
//! ([`crate::pack`]), and many go at a time, so none needs to be sent in parts.

use std::ops::Range;
use std::sync::Once;
use std::time::Duration;

use futures_util::TryStreamExt;
use object_store::aws::{AmazonS3, AmazonS3Builder, S3ConditionalPut};
use object_store::path::Path;
use object_store::{
    ClientOptions, Error, GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions,
    PutPayload, RetryConfig,
};
use tokio::runtime::{Builder, Runtime};

use crate::StoreError;
use crate::transport::{Found, MAX_OBJECT, ObjectName, Transport};

/// The variable with the address of a server that is not Amazon's.
const ENDPOINTS: [&str; 3] = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"];

/// A bucket, and a prefix in it.
#[derive(Debug)]
pub(crate) struct S3 {
    runtime: Runtime,
    bucket: AmazonS3,
    prefix: String,
}

impl S3 {
    pub(crate) fn open(shown: &str, bucket: &str, prefix: &str) -> Result<Self, StoreError> {
        static PROVIDER: Once = Once::new();
        // One that is installed already does as well.
        PROVIDER.call_once(|| drop(rustls::crypto::ring::default_provider().install_default()));
        let failed = |error: &dyn std::fmt::Display| StoreError::remote("reach", shown, error);
        let runtime =
            Builder::new_multi_thread().worker_threads(2).enable_all().build().map_err(|error| failed(&error))?;
        let endpoint = ENDPOINTS.iter().find_map(|name| std::env::var(name).ok());
        // Nobody writes http:// by accident.
        let is_plain = endpoint.as_deref().is_some_and(|it| it.starts_with("http://"));
        let client = ClientOptions::new()
            .with_connect_timeout(Duration::from_secs(10))
            .with_timeout(Duration::from_secs(300))
            .with_allow_http(is_plain);
        let retry = RetryConfig { max_retries: 8, retry_timeout: Duration::from_secs(120), ..RetryConfig::default() };
        let mut builder = AmazonS3Builder::from_env()
            .with_bucket_name(bucket)
            .with_client_options(client)
            .with_retry(retry)
            .with_conditional_put(S3ConditionalPut::ETagMatch)
            // Not all that speak like S3 remove several objects by one request.
            .with_disable_bulk_delete(true);
        if let Some(endpoint) = endpoint {
            builder = builder.with_endpoint(endpoint);
        }
        let bucket = builder.build().map_err(|error| failed(&error))?;
        let prefix = if prefix.is_empty() { String::new() } else { format!("{prefix}/") };
        Ok(Self { runtime, bucket, prefix })
    }

    fn path(&self, name: &str) -> Result<Path, StoreError> {
        Path::parse(format!("{}{name}", self.prefix)).map_err(|error| StoreError::remote("name", name, error))
    }

    fn describe(&self, meta: &ObjectMeta) -> Option<Found> {
        let name = ObjectName::parse(meta.location.as_ref().strip_prefix(&self.prefix)?)?;
        let modified = u64::try_from(meta.last_modified.timestamp_millis()).unwrap_or(0);
        Some(Found { name, size: meta.size, modified })
    }
}

/// Does something again where an answer came and was cut off, which `object_store` does not try again in all cases.
/// What a server refuses, it refuses again.
fn again<T>(mut ask: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
    match ask() {
        Err(Error::Generic { .. }) => ask(),
        answer => answer,
    }
}

/// An error with its causes: the first says what was asked for, and often only the last why it failed.
fn with_causes(error: &Error) -> String {
    let mut said = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        let more = error.to_string();
        if !said.contains(&more) {
            said += &format!(": {more}");
        }
        cause = error.source();
    }
    said
}

/// An error of the store, with what may be done about it.
fn failed(action: &'static str, name: &str) -> impl FnOnce(Error) -> StoreError {
    let name = name.to_owned();
    move |error| {
        let hint = match &error {
            Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => "; look at the AWS_ variables",
            _ => "",
        };
        StoreError::remote(action, name, with_causes(&error) + hint)
    }
}

impl Transport for S3 {
    fn put(&self, name: &ObjectName, content: &[u8]) -> Result<(), StoreError> {
        let path = self.path(name.as_str())?;
        let content = PutPayload::from(content.to_vec());
        let put = || self.bucket.put(&path, content.clone());
        again(|| self.runtime.block_on(put())).map(drop).map_err(failed("write", name.as_str()))
    }

    fn put_if_absent(&self, name: &ObjectName, content: &[u8]) -> Result<bool, StoreError> {
        let path = self.path(name.as_str())?;
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        let content = PutPayload::from(content.to_vec());
        let put = || self.bucket.put_opts(&path, content.clone(), options.clone());
        match again(|| self.runtime.block_on(put())) {
            Ok(_) => Ok(true),
            Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => Ok(false),
            Err(error) => Err(failed("write", name.as_str())(error)),
        }
    }

    fn get(&self, name: &ObjectName, range: Option<Range<u64>>) -> Result<Option<Vec<u8>>, StoreError> {
        if range.as_ref().is_some_and(Range::is_empty) {
            return Ok(self.head(name)?.map(|_| Vec::new()));
        }
        let path = self.path(name.as_str())?;
        let begin = range.as_ref().map_or(0, |it| it.start);
        let options = GetOptions { range: range.map(GetRange::Bounded), ..GetOptions::default() };
        let read = || async {
            let found = self.bucket.get_opts(&path, options.clone()).await?;
            let length = found.range.end.saturating_sub(found.range.start);
            if length > MAX_OBJECT {
                return Err(Error::Generic {
                    store: "S3",
                    source: format!("it is longer than {MAX_OBJECT} bytes").into(),
                });
            }
            found.bytes().await
        };
        match again(|| self.runtime.block_on(read())) {
            Ok(content) => Ok(Some(content.into())),
            Err(Error::NotFound { .. }) => Ok(None),
            // Nothing is where the range begins: the object ends before.
            Err(error) => match self.head(name) {
                Ok(Some(found)) if found.size <= begin => Ok(Some(Vec::new())),
                _ => Err(failed("read", name.as_str())(error)),
            },
        }
    }

    fn head(&self, name: &ObjectName) -> Result<Option<Found>, StoreError> {
        let path = self.path(name.as_str())?;
        match again(|| self.runtime.block_on(self.bucket.head(&path))) {
            Ok(meta) => Ok(self.describe(&meta)),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(failed("ask about", name.as_str())(error)),
        }
    }

    fn list(&self, folder: &str) -> Result<Vec<Found>, StoreError> {
        let path = self.path(folder)?;
        let list = || self.bucket.list(Some(&path)).try_collect();
        let listed: Vec<_> = again(|| self.runtime.block_on(list())).map_err(failed("list", folder))?;
        Ok(listed.iter().filter_map(|it| self.describe(it)).collect())
    }

    fn delete(&self, name: &ObjectName) -> Result<(), StoreError> {
        let path = self.path(name.as_str())?;
        match again(|| self.runtime.block_on(self.bucket.delete(&path))) {
            Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(failed("remove", name.as_str())(error)),
        }
    }
}
