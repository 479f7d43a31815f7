//! What the hook does to config.json before the runtime reads it.

use std::path::Path;

use thiserror::Error;

use crate::annotations::{self, AnnotationError};
use crate::host::{self, HostArgs, HostError};
use crate::image::Image;
use crate::spec::{self, Hooks, SpecError};

/// An error with a config.json, or with what its annotations ask for.
#[derive(Debug, Error)]
pub(crate) enum PrecreateError {
    #[error("config.json is no JSON: {0}")]
    Json(#[from] serde_json::Error),
    #[error(transparent)]
    Annotation(#[from] AnnotationError),
    #[error(transparent)]
    Host(#[from] HostError),
    #[error(transparent)]
    Spec(#[from] SpecError),
}

/// A container's config.json with what its annotations ask for; None if they ask for no GPU. A relative root in it is in `bundle`.
pub(crate) fn change(config: &[u8], bundle: &Path, args: &HostArgs) -> Result<Option<Vec<u8>>, PrecreateError> {
    let mut spec = serde_json::from_slice(config)?;
    if annotations::gpus(&spec)?.is_none() {
        return Ok(None);
    }
    annotations::limits(&spec)?;
    annotations::protocol(&spec)?;
    annotations::share(&spec)?;
    let provided = host::find(args.lib_dir.as_deref(), &args.socket)?;
    let root = spec::root(&spec, bundle);
    let image = root.as_deref().map(Image::open).transpose().map_err(SpecError::from)?;
    spec::add(&mut spec, &provided, &Hooks::new(args, None)?, image.as_ref())?;
    Ok(Some(spec.to_string().into_bytes()))
}
