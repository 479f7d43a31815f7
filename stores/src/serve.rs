//! A store's directory, served over standard input and output: what `ssh://` starts at the other end.

use std::io::{BufReader, Read, Write};
use std::path::Path;

use crate::StoreError;
use crate::directory::Directory;
use crate::frame::{self, Answer, Request};
use crate::transport::{ObjectName, Transport};

/// Serves a directory until the other side closes its end. Names lead nowhere outside it.
///
/// # Errors
/// The other side does not keep to the protocol, or is gone.
pub fn serve(directory: &Path, from: impl Read, mut to: impl Write) -> Result<(), StoreError> {
    let failed = |error: std::io::Error| StoreError::remote("serve", "the objects", error);
    let directory = Directory::new(directory);
    let mut from = BufReader::with_capacity(1 << 20, from);
    frame::greet(&mut to).map_err(failed)?;
    while let Some((request, body)) = frame::receive::<Request>(&mut from).map_err(failed)? {
        let (answer, body) = answer(&directory, request, &body).unwrap_or_else(|error| {
            // It goes into a head, which is not long.
            (Answer::Failed(error.to_string().chars().take(2000).collect()), Vec::new())
        });
        frame::send(&mut to, &answer, &body).map_err(failed)?;
    }
    Ok(())
}

fn answer(directory: &Directory, request: Request, body: &[u8]) -> Result<(Answer, Vec<u8>), StoreError> {
    let mut content = Vec::new();
    let answer = match request {
        Request::Put { name, if_absent: true } => Answer::Put(directory.put_if_absent(&name, body)?),
        Request::Put { name, if_absent: false } => {
            directory.put(&name, body)?;
            Answer::Put(true)
        }
        Request::Get { name, range } => {
            let found = directory.get(&name, range)?;
            let is_there = found.is_some();
            content = found.unwrap_or_default();
            Answer::Get(is_there)
        }
        Request::Head { name } => Answer::Head(directory.head(&name)?),
        Request::List { folder } => {
            let found = directory.list(ObjectName::as_str(&folder))?;
            content = serde_json::to_vec(&found).map_err(|error| StoreError::refused(error.to_string()))?;
            Answer::List
        }
        Request::Delete { name } => {
            directory.delete(&name)?;
            Answer::Deleted
        }
    };
    Ok((answer, content))
}
