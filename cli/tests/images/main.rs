//! `rekindle images`, as a user calls it: with stores in directories, on a server that speaks S3, and by ssh.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod by_ssh;
mod common;
mod directories;
mod on_s3;
mod s3_server;
