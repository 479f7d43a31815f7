//! The guard of processes that run before CRIU has brought their own pages (`rekindle restore --lazy`).

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rekindle_wire::lazy_pages::{GUARDED, SOCKET, VARIABLE};
use thiserror::Error;

/// How long the guard may take to answer: it lists the processes of the machine.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The guard does not know the processes.
#[derive(Debug, Error)]
pub enum GuardError {
    /// It does not answer.
    #[error("the guard of criu lazy-pages does not answer: {0}")]
    Silent(#[from] io::Error),
    /// It cannot guard them.
    #[error("the guard of criu lazy-pages cannot guard the processes: {0}")]
    Refused(String),
}

/// Tells the guard, if there is one, of a tree that is whole and does not run yet. Of its processes, the root comes first.
pub fn tell_once(process: i32) -> Result<(), GuardError> {
    static TOLD: AtomicBool = AtomicBool::new(false);
    match std::env::var_os(VARIABLE) {
        Some(folder) if !TOLD.swap(true, Ordering::Relaxed) => ask(Path::new(&folder), process),
        _ => Ok(()),
    }
}

fn ask(folder: &Path, root: i32) -> Result<(), GuardError> {
    let mut stream = UnixStream::connect(folder.join(SOCKET))?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    writeln!(stream, "{root}")?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer)?;
    match answer.trim_end() {
        GUARDED => Ok(()),
        "" => Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
        why => Err(GuardError::Refused(why.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn only_one_answer_lets_the_processes_run() {
        let folder = std::env::temp_dir().join(format!("rekindle-guard-test-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        assert!(matches!(ask(&folder, 7), Err(GuardError::Silent(_))));
        let listener = UnixListener::bind(folder.join(SOCKET)).unwrap();
        let guard = std::thread::spawn(move || {
            let mut heard = Vec::new();
            for answer in ["guarded\n", "no such process\n", ""] {
                let (mut stream, _) = listener.accept().unwrap();
                let mut line = String::new();
                BufReader::new(stream.try_clone().unwrap()).read_line(&mut line).unwrap();
                heard.push(line);
                stream.write_all(answer.as_bytes()).unwrap();
            }
            heard
        });
        assert!(ask(&folder, 7).is_ok());
        assert!(matches!(ask(&folder, 8), Err(GuardError::Refused(why)) if why == "no such process"));
        assert!(matches!(ask(&folder, 9), Err(GuardError::Silent(_))));
        assert_eq!(guard.join().unwrap(), ["7\n", "8\n", "9\n"]);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
