//! Images that go into stores and come out again, whatever happens meanwhile.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod archives;
mod collecting;
mod common;
mod damage;
mod interrupted;
mod round_trip;
mod sharing;
