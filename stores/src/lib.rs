//! Checkpoint images in object stores and on other hosts.
//!
//! A store is a place with named objects: a directory, a prefix in a bucket of S3, or a directory of another host
//! ([`Address`], [`Transport`]). All images of one store share their content, which is cut into pieces that are named
//! by their hashes:
//!
//! ```text
//!   an image in a directory                            a store
//!
//!   rekindle.img       ┌─┐                             rekindle-store        what it is, and whether a key is its own
//!   rekindle.commit    └─┘─┐                      ┌──► packs/ab/RANDOM-LENGTH
//!   core-1.img …       ┌──┐├── short pieces ──────┘    ┌─────┬───┬──────┬──────────────┐
//!   pages-1.img        ├──┤│                           │piece│ … │piece │ what is in it│   up to 16 MiB
//!                      │  │┘                           └─────┴───┴──────┴──────────────┘
//!                      ├──┤── others ────────────────► pieces/cd/HASH-RANDOM    one piece each
//!   rekindle-data-0.raw├──┤   (cut where the image     images/HASH             manifest of an image: its files, with
//!                      │ 0│    itself has pieces,            │                 modes, times, holes and pieces;
//!                      ├──┤    or by content)                └─► pieces, packs written last, if there is none
//!                      └──┘                            leases/, gc/            what runs just now (see `lease`)
//! ```
//!
//! * **Only what is new is sent.** An upload lists the pieces that are there. That one was interrupted does not
//!   matter: what it sent is there, and the next upload finds it.
//! * **An image is there whole or not at all**: its manifest is written when all its pieces are there.
//! * **Nothing is used before it was checked.** Each piece and each manifest is sealed (`seal`): by a hash under the
//!   store's key or, if the store is encrypted, by AES-256-GCM. Without the key nobody can forge them, or learn from
//!   names what is in the pieces. A store made without a key finds mistakes, but no forgery.
//! * **Garbage collection runs beside uploads** and locks nothing (`lease`, `collect`). Names of objects are never
//!   used twice.
//! * **An archive of a container is an image too** (`archive`): it is cut so that it shares what an image in a directory
//!   would share.
//! * **An image that builds on others is stored with them**, as one image: it says where its parent is by a relative
//!   path, so they belong together (`tree`). Sharing makes that cheap.
//!
//! A store is trusted with nothing but to keep what it was given: it can lose objects, or show an older state of
//! itself. Lengths of objects and times are visible in it.
//!
//! # Layers
//!
//! A file imports only from lines below its own:
//!
//! ```text
//!   open                                         from an address to a store
//!   upload, download, verify, collect            what is done with one
//!   store                                        one that was opened
//!   lease, fetch, manifest, serve, ssh
//!   archive                                      an archive of a container on disk
//!   tree                                         an image on disk
//!   pack, frame, directory, s3
//!   piece, cut, parallel, progress, tar
//!   seal, transport
//!   key, random, address
//!   hash, error
//! ```

mod address;
mod archive;
mod collect;
mod cut;
mod directory;
mod download;
mod error;
mod fetch;
mod frame;
mod hash;
mod key;
mod lease;
mod manifest;
mod open;
mod pack;
mod parallel;
mod piece;
mod progress;
mod random;
#[cfg(feature = "s3")]
mod s3;
mod seal;
mod serve;
mod ssh;
mod store;
mod tar;
mod transport;
mod tree;
mod upload;
mod verify;

pub use address::Address;
#[doc(hidden)]
pub use archive::fuzz_archive;
pub use archive::{ARCHIVE, Archive, Container};
pub use collect::Collected;
pub use download::Received;
pub use error::StoreError;
pub use hash::{Hash, NotHex256};
pub use key::{CREDENTIAL, StoreKey};
pub use lease::Timing;
#[doc(hidden)]
pub use manifest::fuzz_body;
pub use manifest::{Head, is_image_name};
pub use open::transport;
pub use progress::{OnProgress, Progress};
pub use serve::serve;
pub use store::{Store, StoredFile, StoredImage};
pub use transport::{Found, MAX_OBJECT, ObjectName, Transport};
pub use upload::Sent;
pub use verify::{Verified, Wrong};
