//! What kind errors of other crates are of.

use rekindle_images::{ErrorKind, ImageError};
use rekindle_wire::control::FailureKind;

/// The kind of what is wrong with an image, or with the place where one is to be.
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
