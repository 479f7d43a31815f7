//! The checkpoint image on disk: format, writer, reader, verification.
