//! Assigns kinds to the errors of other crates.

use rekindle_images::{ErrorKind, ImageError};
use rekindle_wire::control::FailureKind;

/// The kind of an error about an image, or about the place where an image is to be.
pub fn of_image(error: &ImageError) -> FailureKind {
    match error.kind() {
        kind if kind.is_bad_image() => FailureKind::BadImage,
        ErrorKind::NotAnImage => FailureKind::BadImage,
        ErrorKind::NoSpace => FailureKind::NoSpace,
        ErrorKind::GivenUp => FailureKind::GivenUp,
        ErrorKind::Exists | ErrorKind::Busy | ErrorKind::Overwrites => FailureKind::Refused,
        _ => FailureKind::Internal,
    }
}
